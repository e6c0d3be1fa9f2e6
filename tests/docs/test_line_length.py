"""Pages have lines of at most 120 characters, so that they can be read and reviewed in an editor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.pages import PAGES, prose, title

LIMIT = 120


def too_long(line: str) -> bool:
    """Whether a line is too long; tables, indented code and URLs do not count."""
    if line.startswith(("|", "    ")):
        return False
    return len(re.sub(r"https?://[^\s)>]+", "", line)) > LIMIT


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_page_has_no_line_over_the_limit(page: Path) -> None:
    lines = enumerate(prose(page).split("\n"), start=1)
    assert [f"line {number}: {len(line)} characters" for number, line in lines if too_long(line)] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x" * 121, True),
        ("x" * 120, False),
        ("| " + "x" * 121, False),
        ("    " + "x" * 121, False),
        ("see [this](https://example.org/" + "x" * 121 + ")", False),
    ],
)
def test_too_long_excepts_tables_code_and_urls(line: str, expected: bool) -> None:
    assert too_long(line) is expected
