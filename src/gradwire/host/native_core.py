"""Loads the native core. If it is missing, reports why, from the record that the installation wrote.

`gradwire --version` prints the reason.
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
    """Return whether the core is installed and GRADWIRE_PURE does not turn it off."""
    return native is not None and not is_unwanted()


def is_unwanted() -> bool:
    """Return whether GRADWIRE_PURE turns the core off."""
    return os.environ.get(PURE, "") not in ("", "0")


def why_pure() -> str | None:
    """Return why collectives run in Python in this process; None if they run in the native core."""
    if is_unwanted():
        return f"{PURE} is set"
    try:
        import_module("gradwire._native")
    except ImportError as error:
        return why_missing(_RECORD, error)
    return None


def state() -> str:
    """Return whether the core is available, as text for users."""
    reason = why_pure()
    return "with its native core" if reason is None else f"without its native core: {reason}"


def why_missing(record: Path, error: ImportError) -> str:
    """Return why the core cannot be imported, from the record of the build."""
    try:
        built = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        return "gradwire was not installed from this source tree: pip install --editable ."
    if built["native"]:
        return f"it was built, but cannot be loaded: {error}"
    reason: str = built["reason"]
    return reason
