"""Find installs of gradwire: this one, and others that the user names by their Python interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import ConfigError

THIS = "gradwire"  # this install's name in tables and JSON
_EXAMPLE = "give the path of a Python that has gradwire, such as old/.venv/bin/python"
_TIMEOUT = 60.0  # seconds for starting an interpreter and importing gradwire
_LONGEST = 28  # characters of a path that is shown in a name
# The last printed line is JSON: the version (null without gradwire), or the traceback of a failed import.
_PROBE = """
import importlib.util, json, traceback
answer = {"version": None, "error": None}
try:
    if importlib.util.find_spec("gradwire") is not None:
        import gradwire
        answer["version"] = gradwire.__version__
except Exception:
    answer["error"] = traceback.format_exc()
print()
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Install:
    """A gradwire install. `folder` is added to the import path, for an interpreter that does not find it without."""

    name: str
    python: Path
    folder: Path | None = None

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which this interpreter imports this install and no other."""
        if self.folder is None:
            return {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        given = environ.get("PYTHONPATH")
        return {**environ, "PYTHONPATH": os.pathsep.join([str(self.folder), *([given] if given else [])])}


def this_install() -> Install:
    return Install(THIS, Path(sys.executable), Path(__file__).resolve().parents[2])


def find(paths: Sequence[str], environ: Mapping[str, str]) -> dict[str, Install]:
    """Return the installs of these interpreters, by path. Their names are unique. Raise `ConfigError` if one is
    unusable."""
    pythons = {path: _interpreter(Path(path)) for path in paths}
    versions = {python: _version(python, environ) for python in dict.fromkeys(pythons.values())}
    names = {python: f"{THIS} {version} ({_short(python)})" for python, version in versions.items()}
    uses = Counter(names.values())
    for python, name in names.items():
        if uses[name] > 1:
            names[python] = f"{THIS} {versions[python]} ({python})"
    return {path: Install(names[python], python) for path, python in pythons.items()}


def _interpreter(path: Path) -> Path:
    """Return the interpreter at this path, or in the virtual environment at this path."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; {_EXAMPLE}")
    if not path.is_dir():
        return path
    python = path / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"{path} is a folder without bin/python; {_EXAMPLE}")
    return python


def _version(python: Path, environ: Mapping[str, str]) -> str:
    """Return the version of the gradwire that this interpreter imports."""
    last_line = _printed(python, environ).rstrip().rpartition("\n")[2]
    try:
        answer = json.loads(last_line)
        version, error = answer["version"], answer["error"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{python} is not a Python interpreter of version 3.11 or later; {_EXAMPLE}") from None
    if error is not None:
        raise ConfigError(f"the gradwire of {python} cannot be imported; repair that install:\n{error.rstrip()}")
    if version is None:
        raise ConfigError(f"{python} has no gradwire: {python} -m pip install gradwire")
    return str(version)


def _printed(python: Path, environ: Mapping[str, str]) -> str:
    # -P keeps the current folder off sys.path: it may contain yet another gradwire.
    command = [str(python), "-P", "-c", _PROBE]
    try:
        return subprocess.run(
            command,
            env=Install(THIS, python).environ(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        ).stdout
    except OSError as error:
        raise ConfigError(f"cannot run {python}: {error.strerror}; {_EXAMPLE}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{python} did not answer within {_TIMEOUT:.0f} s; {_EXAMPLE}") from error


def _short(python: Path) -> str:
    """Return a short path for names: the virtual environment's folder or the interpreter, shortened to its end."""
    folder = python.parent.parent
    shown = folder if (folder / "pyvenv.cfg").exists() else python
    return str(shown) if len(str(shown)) <= _LONGEST else "/".join(["…", *shown.parts[-2:]])
