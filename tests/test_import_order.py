"""A module imports only from those that stand above it, and importing the package stays light."""

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

# From the top down, as in the map that opens gradwire/__init__.py. A package is one layer, whatever its files do.
LAYERS = [
    "_native",  # compiled, and not always there
    "core",
    "errors",
    "events",
    "arrays",
    "wire",
    "topology",
    "identity",
    "machine",
    "malloc",
    "collectives",
    "tuning",
    "security",
    "transports",
    "liveness",
    "executors",
    "messages",
    "switchboard",
    "generation",
    "operations",
    "work",
    "plans",
    "exchange",
    "post",
    "group",
    "lifetime",
    "agreement",
    "membership",
    "environments",
    "address",
    "config",
    "seat",
    "threads",
    "job",
    "launch",
    "training",
    "torch",
    "jax",
    "simulate",
    "observe",
    "__init__",
    "bench",
    "cli",
    "__main__",
]
HEIGHT = {name: height for height, name in enumerate(LAYERS)}

ROOT = Path(gradwire.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
# Heavy or optional: nobody pays for them who only says `import gradwire`.
UNASKED = (
    *("grpc", "h2", "google.protobuf", "click", "rich", "cloudpickle", "cryptography", "ml_dtypes"),
    *("torch", "jax", "mpi4py"),
    *("gradwire.membership.state", "gradwire.training"),
)


def layer(dotted: str) -> str:
    """The layer of a module below the package, by its dotted name: "gradwire.launch.supervisor" is in "launch"."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and layer of each import of ours, in functions too, but not those for type checkers alone."""
    children = ast.iter_child_nodes(tree)
    match tree:
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            children = iter(tree.orelse)
        case ast.Import(names=aliases):
            yield from of_ours(tree.lineno, *(alias.name for alias in aliases))
        case ast.ImportFrom():
            yield from of_ours(tree.lineno, *from_import(tree, package))
        case ast.Call(
            func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(str(name)), *_],
        ):
            yield from of_ours(tree.lineno, name)
    for node in children:
        yield from imports(node, package)


def of_ours(line: int, *names: str) -> Iterator[tuple[int, str]]:
    return ((line, layer(name)) for name in names if name.split(".")[0] == "gradwire")


def from_import(node: ast.ImportFrom, package: str) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        parents = package.split(".")
        base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
    for alias in node.names:
        # `from gradwire import events` means the module; any other name means the package itself.
        yield f"{base}.{alias.name}" if base == "gradwire" and alias.name in HEIGHT else base


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_only_from_above(file: Path) -> None:
    parts = ("gradwire", *file.relative_to(ROOT).with_suffix("").parts)
    own = layer(".".join(parts))
    assert own in HEIGHT, f"{own} has no place yet: give it one in LAYERS"
    for line, other in imports(ast.parse(file.read_text("utf-8")), ".".join(parts[:-1])):
        assert other in HEIGHT, f"{file.name}:{line} imports {other}, which has no place in LAYERS"
        allowed = other == own or HEIGHT[other] < HEIGHT[own]
        assert allowed, f"{file.name}:{line} is in {own}, which stands above {other} and must not import from it"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import gradwire.job", ["job"]),
        ("import gradwire", ["__init__"]),
        ("from gradwire import wire, init", ["wire", "__init__"]),
        ("from gradwire.launch.supervisor import run", ["launch"]),
        ("from . import cost\nfrom .. import group\nfrom ..launch import run", ["collectives", "group", "launch"]),
        ("def f():\n    from gradwire import cli", ["cli"]),
        ("importlib.import_module('gradwire.torch')", ["torch"]),
        ("if TYPE_CHECKING:\n    import gradwire.job\nelse:\n    import gradwire.wire", ["wire"]),
        ("import numpy\nimport torch\nfrom torch import nn", []),
    ],
)
def test_the_test_itself_sees_every_way_to_import(source: str, found: list[str]) -> None:
    assert [name for _, name in imports(ast.parse(source), "gradwire.collectives")] == found


def test_the_map_of_the_package_shows_the_same_order() -> None:
    shown = re.findall(r"^    (\w+) {2,}\S", gradwire.__doc__ or "", re.MULTILINE)
    built = {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in MODULES}
    assert shown == [name for name in LAYERS if name in built and not name.startswith("__")]


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
