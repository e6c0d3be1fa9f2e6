"""The settings of a job by name: the variable and the type of each, and the origin of a value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire.job.address import Address
from gradwire.security.credentials import Credentials

RANK = "GRADWIRE_RANK"
SIZE = "GRADWIRE_SIZE"
LOCAL_RANK = "GRADWIRE_LOCAL_RANK"
ADDRESS = "GRADWIRE_ADDRESS"
COORDINATOR = "GRADWIRE_COORDINATOR"
TRANSPORT = "GRADWIRE_TRANSPORT"
TIMEOUT = "GRADWIRE_TIMEOUT"
PEER_TIMEOUT = "GRADWIRE_PEER_TIMEOUT"
INSECURE = "GRADWIRE_INSECURE"
JOB = "GRADWIRE_JOB"
ELASTIC = "GRADWIRE_ELASTIC"
MEMBER = "GRADWIRE_MEMBER"

# The variables that give one setting each. An address, certificates and the secret have several sources.
VARIABLES = {
    "rank": RANK,
    "size": SIZE,
    "local_rank": LOCAL_RANK,
    "transport": TRANSPORT,
    "timeout": TIMEOUT,
    "peer_timeout": PEER_TIMEOUT,
    "insecure": INSECURE,
    "job": JOB,
    "elastic": ELASTIC,
    "member": MEMBER,
}
NUMBERS = ("rank", "size", "local_rank")
SECONDS = ("timeout", "peer_timeout")
FLAGS = ("insecure", "served", "address_taken", "elastic")
TEXTS = ("role", "transport", "job", "member")
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

ARGUMENT, CONFIG, DEFAULT, DERIVED = "argument", "config", "default", "derived"  # origins without a name of their own


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its origin: "argument", "config", "default", "derived", a variable or a file."""

    value: Any
    origin: str


Layer = Mapping[str, Setting]
"""The settings that one source gives, by name."""


def source(name: str, origin: str) -> str:
    """Return how an error message names the origin of a setting.

    >>> source("rank", "argument"), source("rank", "RANK (torchrun)"), source("rank", "file job.toml")
    ('the argument rank', 'RANK', 'file job.toml')
    """
    if origin == ARGUMENT:
        return f"the argument {name}"
    if origin == CONFIG:
        return f"config.{name}"
    return origin if origin.startswith("file ") else origin.partition(" (")[0]


def checked(name: str, value: object, source: str) -> Any:
    """Return a value given in Python or in a file, with the type of its setting. Errors begin with `source`."""
    if name in NUMBERS:
        return _whole_number(value, source)
    if name in SECONDS:
        return _seconds(value, source)
    if name in FLAGS:
        if not isinstance(value, bool):
            raise ConfigError(f"{source} is {value!r}, which is neither True nor False")
        return value
    if name == "address":
        return _address(value, source)
    if name == "tls":
        if not isinstance(value, Credentials):
            raise ConfigError(f"{source} is {value!r}: pass gw.Credentials(ca, cert, key)")
        return value
    if name == "token_file":
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ConfigError(f"{source} is {value!r}, which is not the path of a file")
        return Path(value)
    if not isinstance(value, str):
        raise ConfigError(f"{source} is {value!r}, which is not a string")
    return value


def parsed(name: str, text: str, source: str) -> Any:
    """Return the value that the text of a variable stands for. Errors begin with `source`."""
    if name in NUMBERS:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ConfigError(f"{source} is {text!r}, which is not a whole number")
        return int(text)
    if name in SECONDS:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{source} is {text!r}, which is not a number of seconds") from None
    if name in FLAGS:
        return _flag(text, source)
    if name == "transport":
        return text.lower()
    return checked(name, text, source)


def _whole_number(value: Any, source: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise ConfigError(f"{source} is {value!r}, which is not a whole number") from None


def _seconds(value: Any, source: str) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{source} is {value!r}, which is not a number of seconds") from None


def _address(value: object, source: str) -> Address:
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ConfigError(f'{source} is {value!r}: write a string of the form "host:port"')
    return Address.parse(value, source)


def _flag(text: str, source: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ConfigError(
            f"{source} is {text!r}, which is neither true ({'/'.join(TRUE)}) nor false ({'/'.join(FALSE)})"
        )
    return text.lower() in TRUE
