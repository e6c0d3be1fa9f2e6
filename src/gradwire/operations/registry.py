"""Holds the table of all collectives. The decorator `@collective` adds a function that builds a collective to it.

The function's name is the name of the call. Its first parameter is the `Position`; the others are those of the public
call, with the same defaults, except for `timeout`. The fast path, `Capabilities`, streams and tests use this table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gradwire.executors.fast_path import ResultLayout
from gradwire.operations.types import Operation

Builder = TypeVar("Builder", bound=Callable[..., Operation])


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: the function that builds a call, and facts about its calls."""

    build: Callable[..., Operation]
    schedule: str  # the collective whose schedules it uses
    fast: ResultLayout | None  # the layout of its result on the fast path; None if it has no fast path
    parameters: tuple[str, ...]  # of the public call, without the timeout

    @property
    def reduces(self) -> bool:
        """Whether a call takes a reduce op."""
        return "op" in self.parameters

    @property
    def takes_algorithm(self) -> bool:
        """Whether a call takes an algorithm. Collectives on JSON-like values do not."""
        return "algorithm" in self.parameters


COLLECTIVES: dict[str, Collective] = {}


def collective(*, schedule: str | None = None, fast: ResultLayout | None = None) -> Callable[[Builder], Builder]:
    """Add the function that builds a collective to the table. Without `schedule`, the function's name is used."""

    def add(build: Builder) -> Builder:
        name = build.__name__
        _, *parameters = inspect.signature(build).parameters
        COLLECTIVES[name] = Collective(build, schedule or name, fast, tuple(parameters))
        return build

    return add


def result_layouts() -> dict[str, ResultLayout]:
    """Return the collectives with a fast path, with the layouts of their results."""
    return {name: entry.fast for name, entry in COLLECTIVES.items() if entry.fast is not None}
