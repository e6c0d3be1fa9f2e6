"""Plain English in code and pages: no sentence starts with a headless "Who ..." or "Whoever ..."."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENDINGS = {"src": (".py", ".pyi", ".proto"), "docs": (".md", ".py"), "native": (".cpp", ".hpp", ".h", ".sh")}
FILES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
        *(file for folder, endings in ENDINGS.items() for end in endings for file in (ROOT / folder).rglob(f"*{end}")),
    ]
)
# A capital letter starts a sentence; so does the beginning of a comment or docstring, whatever the letter.
START = re.compile(r"\bWho(?:m?ever)?\b|(?:#|//|\"\"\") *\bwho(?:m?ever)?\b")
END = re.compile(r"[.!?](?=[\s\"'*`)]|$)")


def headless(text: str) -> Iterator[int]:
    """The lines on which a sentence starts with "Who" or "Whoever" and is not a question."""
    for start in START.finditer(text):
        end = END.search(text, start.end())
        if end is None or end[0] != "?":
            yield text.count("\n", 0, start.end()) + 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file_has_no_sentence_that_starts_with_who(file: Path) -> None:
    text = file.read_text("utf-8")
    lines = text.split("\n")
    assert [f"line {number}: {lines[number - 1].strip()}" for number in headless(text)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Who joins gets the state.", [1]),
        ("It ends. Whoever is late waits.", [1]),
        ("x = 1  # who checks types finds it", [1]),
        ("Who decides? The coordinator.", []),
        ("The rank who\nhas it. Nobody whoever.", []),
        ("One line.\n- **Who keeps what** follows from the sizes.", [2]),
    ],
)
def test_headless_finds_sentences_but_no_questions(text: str, expected: list[int]) -> None:
    assert list(headless(text)) == expected
