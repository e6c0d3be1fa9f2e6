"""The requests of the step protocol. All ranks perform them together, unless their description says otherwise."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from gradwire.arrays import Array
from gradwire.training.commit_rules import NONE


@dataclass(frozen=True, slots=True)
class Vote:
    """Reduce the ballots of all ranks by `max`. The result is the reduced ballot."""

    ballot: Array


@dataclass(frozen=True, slots=True)
class Gather:
    """Send a value to all ranks. The result is the list of all ranks' values. Errors show it as `operation`."""

    value: Any
    operation: str


@dataclass(frozen=True, slots=True)
class GatherDigests:
    """Send the digest of each part of the state to all ranks, or None if this rank has no state.

    The result is the list of all ranks' values.
    """

    digests: list[tuple[str, str]] | None


@dataclass(frozen=True, slots=True)
class HandOver:
    """Copy the giver's state, which has this digest, to the takers.

    With `overwrite`, a taker writes into its own state directly, and loses that state if the transfer fails.
    """

    giver: int
    takers: tuple[int, ...]
    digest: str
    step: int
    overwrite: bool


@dataclass(frozen=True, slots=True)
class LoadCheckpoint:
    """Load the newest complete checkpoint into this rank's state. The result is a `Loaded`. Only rank 0 performs it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that rank 0 has loaded: its step (NONE: there is none) and name, or why it cannot be loaded."""

    step: int = NONE
    name: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LoadShard:
    """Load this rank's own part of the state, which other ranks do not have, from the checkpoint of this name.

    The result says why it cannot be loaded; empty if it was.
    """

    name: str
    step: int


@dataclass(frozen=True, slots=True)
class AwaitWriter:
    """Wait until this rank's thread has written its files, but at most for some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class NextGeneration:
    """Leave the current generation, and join the next one."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for some seconds."""

    seconds: float


Request = Vote | Gather | GatherDigests | HandOver | LoadCheckpoint | LoadShard | AwaitWriter | NextGeneration | Pause
Steps = Generator[Request, Any, None]
