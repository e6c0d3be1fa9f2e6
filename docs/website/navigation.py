"""Arranges all pages into the sections of the site's sidebar.

Pages that no section names, such as new ones, are added to the last section. So each page has its place in the site
without a list of pages in the pages themselves, which people also read on a forge.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

HOME = "README"
FOLDERS = ("docs", "docs/decisions", "docs/reference", "examples", "examples/data", "benchmarks")
SECTIONS = {
    "Get started": (
        "docs/index",
        "docs/concepts",
        "docs/two-machines",
        "examples/README",
        "docs/migrating",
        "docs/platforms",
        "docs/faq",
    ),
    "Guides": (
        "docs/group",
        "docs/training",
        "docs/data-loading",
        "docs/communicator",
        "docs/pytorch",
        "docs/torch-backend",
        "docs/jax",
        "docs/elastic",
        "docs/checkpoints",
        "docs/stopping",
        "docs/worker-nodes",
        "docs/compression",
        "docs/zero",
        "docs/simulation",
        "docs/security",
        "docs/grpc-transport",
    ),
    "When something goes wrong": ("docs/failures", "docs/troubleshooting", "docs/guarantees"),
    "Reference": ("docs/reference/README", "docs/configuration", "docs/environment-variables", "CHANGELOG"),
    "Inside gradwire": (
        "docs/architecture",
        "benchmarks/README",
        "docs/comparison",
        "CONTRIBUTING",
        "SECURITY",
        "docs/decisions/README",
    ),
}
REFERENCE = (
    "starting",
    "group",
    "stream",
    "errors",
    "training",
    "elastic",
    "torch",
    "jax",
    "testing",
    "configuration",
    "command-line",
)


def pages(root: Path) -> set[str]:
    """Return the names of all pages of the repository, without their ending."""
    found = [*root.glob("*.md"), *(page for folder in FOLDERS for page in (root / folder).glob("*.md"))]
    return {page.relative_to(root).with_suffix("").as_posix() for page in found}


def toctrees(name: str, root: Path) -> str:
    """Return the hidden tables of contents that belong at the end of a page, as Markdown."""
    known = pages(root)
    if name == HOME:
        return "".join(_toctree(names, caption) for caption, names in _sections(known))
    folder, _, file = name.rpartition("/")
    if file == "README":
        return _toctree(_in_folder(folder, known - {name}))
    return ""


def _sections(known: set[str]) -> Iterator[tuple[str, list[str]]]:
    placed = {HOME, *(page for section in SECTIONS.values() for page in section)}
    new = sorted(page for page in known - placed if not _folder_page(page, known))
    *_, last = SECTIONS
    for caption, section in SECTIONS.items():
        yield caption, [page for page in section if page in known] + (new if caption == last else [])


def _folder_page(page: str, known: set[str]) -> str | None:
    """Return the README of the closest folder around a page that has one; the repository's is HOME, and not meant."""
    folder = page.rpartition("/")[0]
    while folder:
        if (readme := f"{folder}/README") in known and readme != page:
            return readme
        folder = folder.rpartition("/")[0]
    return None


def _in_folder(folder: str, known: set[str]) -> list[str]:
    inside = {page for page in known if page.startswith(f"{folder}/")}
    first = [page for name in REFERENCE if (page := f"docs/reference/{name}") in inside]
    return [*first, *sorted(inside.difference(first))]


def _toctree(names: list[str], caption: str = "") -> str:
    if not names:
        return ""
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return f"\n\n```{{toctree}}\n{options}\n" + "\n".join(f"/{name}" for name in names) + "\n```\n"
