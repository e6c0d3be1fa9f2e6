"""Reads the settings of a job from a TOML file: `JobConfig.from_file`, and the file that `GRADWIRE_CONFIG` names.

    size = 4
    address = "10.0.0.1:29500"
    timeout = 60

    [tls]
    ca = "certs/ca.pem"
    cert = "certs/host-a.pem"
    key = "certs/host-a.key"

Paths are relative to the folder of the file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire.job.settings import FLAGS, INSECURE, JOB, NUMBERS, SECONDS, TEXTS, Setting, checked
from gradwire.security.credentials import CA, CERT, KEY, Credentials
from gradwire.security.secret import TOKEN, with_token

FILE = "GRADWIRE_CONFIG"
LONGEST_FILE = 1 << 20
TLS_FILES = ("ca", "cert", "key")
# "address_taken" describes a launcher at work, so a file cannot know it.
KEYS = sorted({*NUMBERS, *SECONDS, *FLAGS, *TEXTS, "address", "tls", "token_file"} - {"address_taken"})


def read(path: str | os.PathLike[str]) -> dict[str, Setting]:
    """Return the settings in a file. Errors are `ConfigError` and name the file and the key."""
    origin = f"file {os.fspath(path)}"
    table = _table(Path(path), origin)
    for key in table:
        _check_key(key, KEYS, origin)
    return {key: Setting(_value(key, value, Path(path).parent, origin), origin) for key, value in table.items()}


def named_by(environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the settings in the file that `GRADWIRE_CONFIG` names, or none if it is not set."""
    path = environ.get(FILE, "").strip()
    return read(path) if path else {}


def with_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with variables for what a launcher and its coordinator need from the file.

    Variables that are set already are kept. Workers do not need this: they read the file themselves.
    """
    found, added = named_by(environ), dict[str, str]()
    if "tls" in found and not any(environ.get(name) for name in (CA, CERT, KEY)):
        tls = found["tls"].value
        added |= {CA: str(tls.ca), CERT: str(tls.cert), KEY: str(tls.key)}
    if "token_file" in found and not environ.get(TOKEN):
        added[TOKEN] = with_token({}, found["token_file"].value)[TOKEN]
    if "job" in found and not environ.get(JOB):
        added[JOB] = found["job"].value
    if "insecure" in found and not environ.get(INSECURE):
        added[INSECURE] = str(found["insecure"].value)
    return {**environ, **added}


def _table(path: Path, origin: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except (OSError, ValueError) as error:  # a null byte in the path is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the configuration {origin}: {reason}") from error
    if len(content) > LONGEST_FILE:
        raise ConfigError(f"the configuration {origin} is too large: at most {LONGEST_FILE} bytes are allowed")
    import tomllib  # imported late: most processes read no file

    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError too
        raise ConfigError(f"the configuration {origin} is not valid TOML: {error}") from error


def _value(key: str, value: Any, folder: Path, origin: str) -> Any:
    where = f"{key!r} in {origin}"
    if key == "tls":
        return _credentials(value, folder, origin)
    checked_value = checked(key, value, where)
    return folder / checked_value if key == "token_file" else checked_value


def _credentials(value: Any, folder: Path, origin: str) -> Credentials:
    if not isinstance(value, dict):
        raise ConfigError(f"'tls' in {origin} is {value!r}: write a table [tls] with the keys ca, cert and key")
    for key in value:
        _check_key(key, TLS_FILES, origin, "tls.")
    if missing := [key for key in TLS_FILES if key not in value]:
        raise ConfigError(f"'tls' in {origin} needs three files: {' and '.join(missing)} must be set too")
    names = {key: f"'tls.{key}' in {origin}" for key in TLS_FILES}
    for key in TLS_FILES:
        if not isinstance(value[key], str) or not value[key]:
            raise ConfigError(f"{names[key]} is {value[key]!r}, which is not the path of a file")
    return Credentials(*(folder / value[key] for key in TLS_FILES), names=tuple(names.values()))


def _check_key(key: str, known: tuple[str, ...] | list[str], origin: str, prefix: str = "") -> None:
    if key not in known:
        close = difflib.get_close_matches(key, known, 1)
        hint = f"do you mean {prefix + close[0]!r}?" if close else f"the keys are {', '.join(known)}"
        raise ConfigError(f"{prefix + key!r} in {origin} is not a setting: {hint}")
