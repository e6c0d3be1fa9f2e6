"""Installs of gradwire: this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

THIS = "gradwire"  # this install's name in tables and JSON


@dataclass(frozen=True)
class Install:
    """A gradwire install; `folder` is where to import it from."""

    name: str
    python: Path
    folder: Path

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment in which this interpreter imports this install and no other."""
        given = environ.get("PYTHONPATH")
        return {**environ, "PYTHONPATH": os.pathsep.join([str(self.folder), *([given] if given else [])])}


def this_install() -> Install:
    return Install(THIS, Path(sys.executable), Path(__file__).resolve().parents[2])
