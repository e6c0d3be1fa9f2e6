"""Links between pages, on a forge and in the site: each leads to a file that exists, and to a heading in it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from gradwire.cli import main
from support.pages import PAGES, ROOT, prose, title

LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
COMMANDS_MARKER = "<!-- all commands -->"  # replaced by the sections of all commands when the site is built


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = prose(page)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    if COMMANDS_MARKER in text:
        headings += [f"gradwire {name}" for name in main.commands]
    found: list[str] = []
    for heading in map(slug, headings):
        found.append(f"{heading}-{found.count(heading)}" if heading in found else heading)
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_page_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} does not exist"
        assert target.is_relative_to(ROOT), f"{link} is outside of the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: {title(target)} has no such heading"


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("A process is frozen, or cut off", "a-process-is-frozen-or-cut-off"),
        ("`gw.init`: what it takes", "gwinit-what-it-takes"),
        ("See [the page](page.md)", "see-the-page"),
    ],
)
def test_slug_is_that_of_github(heading: str, expected: str) -> None:
    assert slug(heading) == expected
