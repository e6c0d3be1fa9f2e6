"""Reads and writes the tuning table: the link costs for choosing algorithms, in the file that `gradwire tune` writes.

The file may have any content. If it is not a valid table, the reason is reported and the defaults are used instead.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from gradwire.collectives.pricing import DEFAULTS, Constants, Table
from gradwire.errors import TransportError
from gradwire.wire import parse_json

FILE = "GRADWIRE_TUNING"
MISSING = "there is no such file"
VERSION = 1
MAX_BYTES = 64 << 10
_NAMES = {field.name for field in fields(Constants)}
_KINDS = {field.name for field in fields(Table)}
_MAX_SECONDS = 1.0  # of a round, a message or a byte

log = logging.getLogger("gradwire")


def path(environ: Mapping[str, str]) -> Path:
    """Return the path of the table's file.

    >>> str(path({"XDG_CONFIG_HOME": "/etc/xdg"}))
    '/etc/xdg/gradwire/tuning.json'
    """
    if named := environ.get(FILE):
        return Path(named)
    config = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(config):
        config = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(config, "gradwire", "tuning.json")


def load(environ: Mapping[str, str]) -> Table:
    """Return the table in the file. Return the defaults if there is no file, or, with a warning, if it is invalid."""
    table, problem = find(environ)
    if problem and (environ.get(FILE) or problem != MISSING):
        log.warning("cannot use the tuning table %s, using the defaults instead: %s", path(environ), problem)
    return table


def find(environ: Mapping[str, str]) -> tuple[Table, str]:
    """Return the table to use, and the reason if it is not the file's; otherwise the reason is empty."""
    try:
        return read(path(environ)), ""
    except FileNotFoundError:
        return DEFAULTS, MISSING
    except OSError as error:
        return DEFAULTS, error.strerror or str(error)
    except ValueError as error:  # also raised by `os.open` for a path with a null character
        return DEFAULTS, str(error)


def read(file: Path) -> Table:
    """Read a table from a file; raise `ValueError` if it is invalid."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # must not block on a pipe without a writer
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    try:
        value = parse_json(data)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    return decode(value)


def store(table: Table, file: Path) -> None:
    """Write the table atomically: a concurrent reader sees the old table or the new one."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(draft, "x") as opened:
                opened.write(json.dumps(encode(table), indent=1) + "\n")
                opened.flush()
                os.fsync(opened.fileno())
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise TransportError(f"cannot write {file}: {error.strerror}; set {FILE} to another path") from error


def encode(table: Table) -> dict[str, Any]:
    """Return the table as a JSON-like value."""
    return {"version": VERSION, "seconds": asdict(table)}


def decode(value: object) -> Table:
    """Return the table of an untrusted JSON-like value; raise `ValueError` with the reason if it is invalid.

    A kind of link that is missing has the default costs.

    >>> decode({"version": 1, "seconds": {}}) == DEFAULTS
    True
    """
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if value.get("version") != VERSION:
        raise ValueError(f"its version is {str(value.get('version'))[:40]!r}, not {VERSION}")
    if value.keys() != {"version", "seconds"} or not isinstance(value["seconds"], dict):
        raise ValueError("it needs 'version' and 'seconds' (an object), and nothing else")
    kinds = value["seconds"]
    if not kinds.keys() <= _KINDS:
        raise ValueError(f"it has kinds of links other than {', '.join(sorted(_KINDS))}")
    return replace(DEFAULTS, **{kind: _constants(kind, costs) for kind, costs in kinds.items()})


def _constants(kind: str, costs: object) -> Constants:
    if not isinstance(costs, dict) or costs.keys() != _NAMES:
        raise ValueError(f"{kind!r} needs exactly {', '.join(sorted(_NAMES))}")
    for name, seconds in costs.items():
        # The comparison works for integers of any size, which a conversion to float does not, and is false for NaN.
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds <= _MAX_SECONDS:
            raise ValueError(f"{name!r} of {kind!r} is not a number of seconds from 0 to {_MAX_SECONDS:g}")
    return Constants(**{name: float(seconds) for name, seconds in costs.items()})
