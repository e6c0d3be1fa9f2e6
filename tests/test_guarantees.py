"""Tests that each row of docs/guarantees.md names existing tests."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_guarantees_named_test_exists(path: str, name: str) -> None:
    assert name in functions_of(path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_guarantees_every_fault_names_a_test(row: str) -> None:
    _, _, guarantee, _, tests, _ = row.split("|")
    assert guarantee.strip()
    assert re.fullmatch(r" (`tests/[\w/]+\.py::\w+` ?)+", tests), f"this row names no test: {row}"
