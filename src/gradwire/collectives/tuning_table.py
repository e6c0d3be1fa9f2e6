"""The tuning table: link costs by which algorithms are chosen, in the file that `gradwire tune` writes.

Anything may be in that file. What is not exactly a table is refused with a reason, and the defaults serve instead.
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
LARGEST = 64 << 10
_NAMES = {field.name for field in fields(Constants)}
_KINDS = {field.name for field in fields(Table)}
_MOST_SECONDS = 1.0  # of a round, a message or a byte

log = logging.getLogger("gradwire")


def path(environ: Mapping[str, str]) -> Path:
    """Where the table is kept.

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
    """The table in force: the file's, or the defaults if there is none, or with a warning if it is broken."""
    table, problem = find(environ)
    if problem and (environ.get(FILE) or problem != MISSING):
        log.warning("algorithms are chosen by the defaults, not by %s: %s", path(environ), problem)
    return table


def find(environ: Mapping[str, str]) -> tuple[Table, str]:
    """The table in force, and why it is not the file's, if it is not."""
    try:
        return read(path(environ)), ""
    except FileNotFoundError:
        return DEFAULTS, MISSING
    except OSError as error:
        return DEFAULTS, error.strerror or str(error)
    except ValueError as error:  # also a name that no file can have
        return DEFAULTS, str(error)


def read(file: Path) -> Table:
    """What a file says; `ValueError` if that is no table."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer must not hold us
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST} bytes")
    try:
        value = parse_json(data)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    return decode(value)


def store(table: Table, file: Path) -> None:
    """Write the whole table or nothing; whoever reads meanwhile sees the old one or the new one."""
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
        raise TransportError(f"cannot write {file}: {error.strerror}; {FILE} names another place") from error


def encode(table: Table) -> dict[str, Any]:
    """The table as a JSON-like value."""
    return {"version": VERSION, "seconds": asdict(table)}


def decode(value: object) -> Table:
    """A table from a JSON-like value of anybody's; `ValueError` says what is wrong. Kinds left out keep the defaults.

    >>> decode({"version": 1, "seconds": {}}) == DEFAULTS
    True
    """
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if value.get("version") != VERSION:
        raise ValueError(f"its version is {str(value.get('version'))[:40]!r}, not {VERSION}")
    if value.keys() != {"version", "seconds"} or not isinstance(value["seconds"], dict):
        raise ValueError("it needs 'version' and 'seconds', an object, and nothing else")
    kinds = value["seconds"]
    if not kinds.keys() <= _KINDS:
        raise ValueError(f"it knows kinds of links other than {', '.join(sorted(_KINDS))}")
    return replace(DEFAULTS, **{kind: _constants(kind, costs) for kind, costs in kinds.items()})


def _constants(kind: str, costs: object) -> Constants:
    if not isinstance(costs, dict) or costs.keys() != _NAMES:
        raise ValueError(f"{kind!r} needs exactly {', '.join(sorted(_NAMES))}")
    for name, seconds in costs.items():
        # Comparing, unlike converting, is safe with integers of any size, and false for NaN.
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds <= _MOST_SECONDS:
            raise ValueError(f"{name!r} of {kind!r} is not a number of seconds from 0 to {_MOST_SECONDS:g}")
    return Constants(**{name: float(seconds) for name, seconds in costs.items()})
