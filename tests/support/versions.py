"""Other versions of gradwire for tests: changed copies of the package, a revision from the history, or a virtual
environment that imports one.

A copy replaces the installed package in every process with the environment `Version.environ`, including the workers of
a launcher.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import gradwire

ROOT = Path(__file__).parents[2]
# The last revision whose members did not send the version of their protocol.
WITHOUT_VERSIONS = "c404ead"

# Python imports this at its start. The finder must come before the finder of an editable installation.
_SITE = """
import sys
from importlib.machinery import PathFinder


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "gradwire":
            return PathFinder.find_spec(name, [{folder!r}], target)
        return PathFinder.find_spec(name, path, target) if name.startswith("gradwire.") else None


sys.meta_path.insert(0, Finder)
"""


class Version:
    """A copy of the package in a folder."""

    def __init__(self, folder: Path, *, native: bool = True) -> None:
        self._folder, self._native = folder, native
        (folder / "sitecustomize.py").write_text(_SITE.format(folder=str(folder)))

    @property
    def environ(self) -> dict[str, str]:
        path = os.pathsep.join([str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return os.environ | {"PYTHONPATH": path} | ({} if self._native else {"GRADWIRE_PURE": "1"})

    def change(self, module: str, before: str, after: str) -> None:
        """Replace the only line of a module that matches a pattern."""
        path = self._folder / "gradwire" / module
        text, count = re.subn(f"^{before}$", after, path.read_text("utf-8"), flags=re.MULTILINE)
        assert count == 1, f"{module} has {count} lines like {before!r}"
        path.write_text(text, "utf-8")


def copied(folder: Path) -> Version:
    """Copy the current version."""
    source = Path(gradwire.__file__).parent
    shutil.copytree(source, folder / "gradwire", ignore=shutil.ignore_patterns("__pycache__"))
    return Version(folder)


def from_history(folder: Path, revision: str) -> Version | None:
    """Extract a revision, without its native core; None if git does not have it, as in a shallow clone."""
    command = ["git", "-C", str(ROOT), "archive", revision, "src/gradwire"]
    try:
        archive = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    (folder / "src" / "gradwire").rename(folder / "gradwire")
    return Version(folder, native=False)


def interpreter(folder: Path, *sources: Path) -> Path:
    """Make a virtual environment that imports from these folders first, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    installed = [path for path in sys.path if path.endswith("-packages")] if sources else []
    (packages / "sources.pth").write_text("".join(f"{path}\n" for path in [*sources, *installed]))
    return folder / "bin" / "python"


def fake_package(folder: Path, code: str) -> Path:
    """Make a package called gradwire with only this code, and return the folder to import it from."""
    (folder / "gradwire").mkdir(parents=True)
    (folder / "gradwire" / "__init__.py").write_text(code)
    return folder
