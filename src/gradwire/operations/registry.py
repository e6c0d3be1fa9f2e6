"""The table of all collectives: `@collective` on the function that builds one enters it here.

The builder's name is the name of the call. Its first parameter is the `Position`; the others are those of the public
call, with the same defaults, except for `timeout`. What the fast path, `Capabilities`, streams and tests need to know
of a collective comes from this table.
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
    """One collective: how a call of it is built, and what it runs on."""

    build: Callable[..., Operation]
    schedule: str  # the kind of schedule that it runs on
    fast: ResultLayout | None  # the layout of its result on the fast path; None: it has no fast path
    parameters: tuple[str, ...]  # of the public call, without the timeout

    @property
    def reduces(self) -> bool:
        """Whether a call names a reduce op."""
        return "op" in self.parameters

    @property
    def takes_algorithm(self) -> bool:
        """Whether a call may name an algorithm, which calls on JSON-like values may not."""
        return "algorithm" in self.parameters


COLLECTIVES: dict[str, Collective] = {}


def collective(*, schedule: str | None = None, fast: ResultLayout | None = None) -> Callable[[Builder], Builder]:
    """Enter the function that builds a collective in the table. Without `schedule`, there is one of the same name."""

    def enter(build: Builder) -> Builder:
        name = build.__name__
        _, *parameters = inspect.signature(build).parameters
        COLLECTIVES[name] = Collective(build, schedule or name, fast, tuple(parameters))
        return build

    return enter


def result_layouts() -> dict[str, ResultLayout]:
    """The collectives with a fast path, and the layout of their results."""
    return {name: entry.fast for name, entry in COLLECTIVES.items() if entry.fast is not None}
