"""Loads the native core, or says for users why it is missing, from what the installation recorded.

`gradwire --version` prints it.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path

try:
    from gradwire import _native

    native = _native
except ImportError:  # installed without a compiler
    native = None  # type: ignore[assignment]

PURE = "GRADWIRE_PURE"
_RECORD = Path(__file__).parent / "_build.json"  # written by build_backend/gradwire_build.py


def available() -> bool:
    """Whether the core is installed and wanted."""
    return native is not None and not is_unwanted()


def is_unwanted() -> bool:
    """Whether the environment asks to do without it."""
    return os.environ.get(PURE, "") not in ("", "0")


def why_pure() -> str | None:
    """Why collectives run in Python here; None where they run in the native core."""
    if is_unwanted():
        return f"{PURE} is set"
    try:
        import_module("gradwire._native")
    except ImportError as error:
        return why_missing(_RECORD, error)
    return None


def state() -> str:
    """Whether the core is there, in words."""
    reason = why_pure()
    return "with its native core" if reason is None else f"without its native core: {reason}"


def why_missing(record: Path, error: ImportError) -> str:
    """Why the core cannot be imported, going by the record of the build."""
    try:
        built = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        return "gradwire was not installed from here: pip install --editable ."
    if built["native"]:
        return f"it was built, but does not load: {error}"
    reason: str = built["reason"]
    return reason
