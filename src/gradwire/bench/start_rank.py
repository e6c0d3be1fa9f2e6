"""Start one rank in the environment of any engine. This is a script:

    python -P start_rank.py ENGINE SOCKET OPTIONS

The rank combines this install's measuring code with that environment's engine. So `gradwire.bench` is always loaded
from this folder. If the engine is gradwire, the parent package `gradwire` is the environment's own. For another engine
it is an empty module: such an environment has NumPy and the engine, but not gradwire and its dependencies.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]


class BenchFinder:
    """Finds `gradwire.bench` and its modules in this folder. It takes precedence over finders of editable installs."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "gradwire.bench" and not name.startswith("gradwire.bench."):
            return None
        folder = PACKAGE.joinpath(*name.split(".")[1:-1])
        return PathFinder.find_spec(name, [str(folder)], target)


def prepare_imports(engine: str) -> None:
    sys.meta_path.insert(0, BenchFinder)
    if engine != "gradwire":
        sys.modules["gradwire"] = empty = ModuleType("gradwire")
        empty.__path__ = []


if __name__ == "__main__":
    engine, socket_path, options = sys.argv[1:]
    prepare_imports(engine)
    from gradwire.bench.rank_process import main

    main(engine, socket_path, json.loads(options))
