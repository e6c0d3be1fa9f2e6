"""Starts a worker by path, in any environment:

    python -I start.py ENGINE MEETING_PLACE OPTIONS

The environment of another engine has NumPy and that engine, but neither gradwire nor what gradwire needs. So there the
package is entered by a side door that does not run its `__init__`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]


def enter(name: str) -> None:
    if name == "gradwire":
        sys.path.insert(0, str(PACKAGE.parent))  # the very one that was asked to measure itself
        return
    door = ModuleType("gradwire")
    door.__path__ = [str(PACKAGE)]
    sys.modules["gradwire"] = door


if __name__ == "__main__":
    engine, meeting_place, options = sys.argv[1:]
    enter(engine)
    from gradwire.bench.worker import main

    main(engine, meeting_place, json.loads(options))
