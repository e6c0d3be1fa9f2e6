"""The text of the documentation: quoted messages exist in the source, links and anchors lead somewhere, lines fit."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from support.documents import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
WIDEST = 120
MISSING = "\0"  # in the place of a value in a message


def headings(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def message_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(message_of(part) or MISSING for part in node.values) if isinstance(node, ast.JoinedStr) else ""


@cache
def messages() -> str:
    """All texts in the source, with a mark in the place of each value."""
    trees = (ast.parse(file.read_text("utf-8")) for file in sorted((ROOT / "src").rglob("*.py")))
    return "\n".join(message_of(node) for tree in trees for node in ast.walk(tree)).replace("%d", MISSING)


def quotes(page: str, pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("quote", quotes("troubleshooting.md", r"^### `(.*)`"))
def test_troubleshooting_page_quotes_messages_of_the_source(quote: str) -> None:
    for part in re.split(r"…|'[a-z]+'| during", quote):
        assert part.strip(" :;,.()") in messages(), f"no message in the source contains {part!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_lines_outside_of_tables_and_code_fit(page: Path) -> None:
    code, long = False, []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
        code ^= line.startswith("```")
        if len(line) > WIDEST and not code and not line.startswith("|") and "://" not in line:
            long.append(number)
    assert not long, f"lines {long} have more than {WIDEST} characters"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_anchors_are_headings_of_their_page(page: Path) -> None:
    for target, fragment in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            there = page.parent / target if target else page
            assert fragment in map(anchor, headings(there)), f"{target}#{fragment}"
