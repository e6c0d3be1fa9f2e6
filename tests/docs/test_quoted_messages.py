"""The messages that docs/troubleshooting.md quotes are messages of the source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from support.documents import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
CODE = re.findall(r"`([^`\n]*)`", PAGE)
QUOTES = re.findall(r"^### `(.*)`", PAGE, re.MULTILINE) + [
    text for text in CODE if text.count(" ") >= 3 and not text.startswith("gradwire ")
]
VALUE = "\0"  # in the place of a value in a message


def message_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(message_of(part) or VALUE for part in node.values) if isinstance(node, ast.JoinedStr) else ""


@cache
def messages() -> str:
    """All texts of the source, with a mark in the place of each value."""
    trees = (ast.parse(file.read_text("utf-8")) for file in sorted((ROOT / "src").rglob("*.py")))
    texts = "\n".join(message_of(node) for tree in trees for node in ast.walk(tree))
    return re.sub(r"%d|%s|%\.\df", VALUE, texts)


@pytest.mark.parametrize("quote", sorted(set(QUOTES)))
def test_troubleshooting_page_quotes_a_message_of_the_source(quote: str) -> None:
    """Names in quotes are values, and " during" joins an error to the call that raised it."""
    for part in re.split(r"…|'[a-z]+'| during", quote):
        assert part.strip(" :;,.()") in messages(), f"no message of the source contains {part!r}"
