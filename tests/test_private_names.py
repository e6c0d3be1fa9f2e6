"""Packages, and tests, use each other's public names only: nobody reaches for an attribute with an underscore.

A name that begins with an underscore belongs to the package that defines it: the folder of modules in `src/`, the file
in `tests/`. Python's own and other projects' private names (`os._exit`, `torch._C`) are not judged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gradwire

SOURCE = Path(gradwire.__file__).parent
TESTS = Path(__file__).parent
MODULES = sorted(file for file in SOURCE.rglob("*.py") if SOURCE / "membership" / "v1" not in file.parents)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> set[str]:
    """Private names that a source text gives to something: functions, classes, attributes, variables, fields, slots."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(asname=str(name)):
                found.add(name)
            case ast.Assign(targets=[ast.Name("__slots__")], value=ast.Tuple(elts=slots)):
                found.update(str(slot.value) for slot in slots if isinstance(slot, ast.Constant))
    return {name for name in found if is_private(name)}


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each private attribute of something else than `self`, and of each private name imported from us.

    `getattr`, `setattr` and `monkeypatch.setattr` with a private name in quotes count too.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] == "gradwire":
                yield from ((node.lineno, alias.name) for alias in aliases if is_private(alias.name))
            case ast.Call(
                func=ast.Name("setattr" | "getattr" | "hasattr") | ast.Attribute(attr="setattr" | "delattr"),
                args=[_, ast.Constant(str(name)), *_],
            ) if is_private(name):
                yield node.lineno, name
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr" | "object" | "patch"), args=[ast.Constant(str(path)), *_]
            ) if path.startswith("gradwire.") and is_private(path.rpartition(".")[2]):
                yield node.lineno, path.rpartition(".")[2]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


DEFINED = {file: defined(parsed(file)) for file in MODULES}
OURS = set().union(*DEFINED.values())  # whatever is not defined in here belongs to Python or another project


def reached(tree: ast.AST, own: set[str]) -> list[str]:
    return [f"line {line}: {name}" for line, name in used(tree) if name in OURS - own and name != "_native"]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_module_uses_no_private_name_of_another_package(file: Path) -> None:
    own = set().union(*(names for other, names in DEFINED.items() if other.parent == file.parent))
    assert not reached(parsed(file), own)


@pytest.mark.parametrize("package", ["job", "training", "torch", "jax", "simulate", "bench"])
def test_package_sees_groups_only_by_their_calls_and_group_internals(package: str) -> None:
    hidden = {"parts_of", "GroupParts"} | ({"Generation"} if package not in ("job", "simulate") else set())
    for file in (SOURCE / package).rglob("*.py"):
        assert not hidden & {node.name for node in ast.walk(parsed(file)) if isinstance(node, ast.alias)}, file.name


TEST_FILES = sorted(TESTS.rglob("*.py"))


@pytest.mark.parametrize("file", TEST_FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_test_file_uses_no_private_name_of_gradwire(file: Path) -> None:
    tree = parsed(file)
    assert not reached(tree, defined(tree))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("group._runner.calls", ["_runner"]),
        ("self._runner = self.other._runner", ["_runner"]),
        ("self._runner", []),
        ("os.__file__", []),
        ("from gradwire.wire import _pack, pack", ["_pack"]),
        ("from torch import _C", []),
        ("patch.setattr(group, '_now', None)", ["_now"]),
        ("patch.setattr('gradwire.wire._LIMIT', 1)", ["_LIMIT"]),
        ("getattr(group, '_now')", ["_now"]),
    ],
)
def test_every_way_to_reach_in_is_found(source: str, names: list[str]) -> None:
    assert [name for _, name in used(ast.parse(source))] == names


def test_names_that_a_source_defines_are_its_own() -> None:
    source = "class A:\n    __slots__ = ('_a',)\n    _b: int = 0\n    def _c(self): self._d = 1\n_e = public = 2"
    assert defined(ast.parse(source)) == {"_a", "_b", "_c", "_d", "_e"}
