"""The layers are as the docstrings of the packages say: complete, in order, and importing gradwire stays light.

The docstring of each package has one line for each of its modules, `name   what it is`, and a module imports only
from those in lines above its own. Imports in functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire

ROOT = Path(gradwire.__file__).parent
GENERATED = ROOT / "membership" / "v1"
FILES = sorted(file for file in ROOT.rglob("*.py") if GENERATED not in file.parents)
PACKAGES = sorted(file.parent for file in FILES if file.name == "__init__.py")
ENTRY = re.compile(r"^ *(\w+) {2,}\S", re.MULTILINE)
# Heavy or optional: `import gradwire` alone must not load them.
UNASKED = (
    *("grpc", "h2", "google.protobuf", "click", "rich", "cloudpickle", "cryptography", "ml_dtypes"),
    *("torch", "jax", "mpi4py"),
    *("gradwire.membership.coordinator.state_machine", "gradwire.training"),
)


def dotted(path: Path) -> str:
    """The module's name: src/gradwire/group/work.py is gradwire.group.work."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


NAMES = {dotted(file) for file in FILES} | {dotted(GENERATED)}


def declared(package: Path) -> list[str]:
    """The modules of a package from the top down, as its docstring lists them."""
    return ENTRY.findall(ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8")), clean=False) or "")


def built(package: Path) -> set[str]:
    """The modules and packages that lie in a package's folder."""
    modules = {file.stem for file in package.glob("*.py") if not file.name.startswith("__")}
    return modules | {folder.parent.name for folder in package.glob("*/__init__.py")}


def imports(source: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module of ours that is imported anywhere in a source text."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                found = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(base), names=aliases):
                found = [full if (full := f"{base}.{alias.name}") in names else base for alias in aliases]
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                found = [name]
            case _:
                continue
        for name in found:
            if name.split(".")[0] == "gradwire":
                yield node.lineno, name


@pytest.mark.parametrize("package", PACKAGES, ids=dotted)
def test_package_docstring_lists_each_of_its_modules_once(package: Path) -> None:
    listed = declared(package)
    assert len(listed) == len(set(listed)), "a module is listed twice"
    assert set(listed) == built(package)


@pytest.mark.parametrize("file", FILES, ids=dotted)
def test_module_imports_only_from_modules_listed_above_it(file: Path) -> None:
    own = dotted(file).split(".")
    for line, name in imports(file.read_text("utf-8"), NAMES):
        problem = misplaced(own, name.split("."), is_package=file.name == "__init__.py")
        assert problem is None, f"{file.name}:{line} imports {name}: {problem}"


def misplaced(own: list[str], other: list[str], *, is_package: bool) -> str | None:
    """Why a module must not import another one; None if it may."""
    common = next((at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
    if common == len(own):  # a package and its modules: only `__init__` itself may import them
        return None if is_package or own == other else "it is inside of this module"
    above = own[:common]
    if common == len(other):  # the package that this module is in
        return None if own[-1] in ("cli", "__main__") or above == ["gradwire"] else "import its module, not the package"
    order = declared(ROOT.parent.joinpath(*above))
    if own[common].startswith("__") or other[common] == "_native":
        return None
    return None if order.index(other[common]) < order.index(own[common]) else f"it is not above {own[common]}"


@pytest.mark.parametrize(
    ("own", "other", "allowed"),
    [
        ("gradwire.group.work", "gradwire.wire", True),
        ("gradwire.wire", "gradwire.group.work", False),
        ("gradwire.group.stream", "gradwire.group.work", True),
        ("gradwire.group.work", "gradwire.group.stream", False),
        ("gradwire.group.work", "gradwire.group", False),
    ],
)
def test_rule_allows_imports_from_above_only(own: str, other: str, allowed: bool) -> None:
    assert (misplaced(own.split("."), other.split("."), is_package=False) is None) is allowed


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import gradwire.wire", ["gradwire.wire"]),
        ("from gradwire import wire, init", ["gradwire.wire", "gradwire"]),
        ("from gradwire.group.work import Work", ["gradwire.group.work"]),
        ("def f():\n    from gradwire import cli", ["gradwire.cli"]),
        ("importlib.import_module('gradwire.torch')", ["gradwire.torch"]),
        ("if TYPE_CHECKING:\n    import gradwire.job", ["gradwire.job"]),
        ("import numpy\nimport torch\nfrom torch import nn", []),
    ],
)
def test_every_way_to_import_is_found(source: str, found: list[str]) -> None:
    assert [name for _, name in imports(source, NAMES)] == found


def test_few_modules_lie_loose_at_the_root_of_the_package() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 10


def test_import_is_light_and_starts_no_thread() -> None:
    report = """
import json, os, sys, threading
import gradwire
tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
print(json.dumps([sorted(sys.modules), threading.active_count(), tasks]))
"""
    # NumPy's BLAS has a pool of its own, which is not ours to count.
    environ = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", report], env=environ, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    modules, threads, tasks = json.loads(done.stdout)
    loaded = [name for name in UNASKED if name in modules]
    assert not loaded, f"`import gradwire` loads {loaded}"
    assert (threads, tasks) == (1, 1)
