"""Tests that the stub of the core for type checkers defines exactly the names of the core."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import gradwire

native = pytest.importorskip("gradwire._native", reason="the native core is not built")
STUB = ast.parse((Path(gradwire.__file__).parent / "_native.pyi").read_text("utf-8"))


def names_in(body: list[ast.stmt]) -> set[str]:
    """Return the names that a class or module defines, except those that begin with an underscore."""
    names = set()
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def names_of(owner: Any) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def test_stub_defines_exactly_the_names_of_the_core() -> None:
    assert names_in(STUB.body) == names_of(native)
    for node in STUB.body:
        if isinstance(node, ast.ClassDef):
            defined = native.kernels if node.name == "_Kernels" else getattr(native, node.name)
            assert names_in(node.body) == names_of(defined), node.name
