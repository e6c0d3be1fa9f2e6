"""Where calls are made that were made before: for arrays of the same kind, everything but the exchange is known.

The native core then does the whole call: it looks at the array, takes the turn, puts the call on record with its place
in the user's program, and runs the plan. Whatever is out of the ordinary (strided arrays, a queue of works, somebody
who watches, a broken group) it leaves to the long way, before anything has happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradwire.arrays import DType
from gradwire.executors.native import lower
from gradwire.executors.plan import Plan

if TYPE_CHECKING:
    from gradwire import _native

_OPERATIONS = ("all_reduce", "broadcast", "reduce_scatter", "barrier", "all_gather", "all_gather_rows")


class Desk:
    """The core's desk for one group; without the core, every call takes the long way.

    The collectives return their result (a barrier True), or None if the call has to be made the long way.
    """

    def __init__(self, desk: _native.Desk | None) -> None:
        self._desk = desk
        self.all_reduce: Callable[..., Any] = desk.all_reduce if desk is not None else _the_long_way
        self.broadcast: Callable[..., Any] = desk.broadcast if desk is not None else _the_long_way
        self.reduce_scatter: Callable[..., Any] = desk.reduce_scatter if desk is not None else _the_long_way
        self.barrier: Callable[..., Any] = desk.barrier if desk is not None else _the_long_way
        self.all_gather: Callable[..., Any] = desk.all_gather if desk is not None else _the_long_way

    def learn(
        self,
        operation: str,
        dtype: DType | None,
        how: str | int | None,
        count: int | tuple[int, ...],
        row: tuple[int, ...],
        plan: Plan,
    ) -> None:
        """From now on calls of this form run this plan."""
        if self._desk is not None:
            kind, program, meaning = _OPERATIONS.index(operation), plan.native or lower(plan), plan.meaning
            storage = dtype.storage if dtype is not None else None
            self._desk.learn(kind, storage, how, count, row, plan, meaning, program, meaning.fingerprint)

    def halt(self) -> None:
        """Every call takes the long way from now on: the group is broken or closed."""
        if self._desk is not None:
            self._desk.halt()


def _the_long_way(*args: object) -> None:
    return None


NO_DESK = Desk(None)
