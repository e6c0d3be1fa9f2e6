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

_OPERATIONS = ("all_reduce", "broadcast")


class Desk:
    """The core's desk for one group; without the core, every call takes the long way.

    `all_reduce` and `broadcast` return the result, or None if the call has to be made the long way.
    """

    def __init__(self, desk: _native.Desk | None) -> None:
        self._desk = desk
        self.all_reduce: Callable[..., Any] = desk.all_reduce if desk is not None else _the_long_way
        self.broadcast: Callable[..., Any] = desk.broadcast if desk is not None else _the_long_way

    def learn(self, operation: str, dtype: DType, how: str | int | None, count: int, plan: Plan) -> None:
        """From now on calls of this kind, with this op or root, run this plan."""
        if self._desk is not None and operation in _OPERATIONS:
            kind, program, meaning = _OPERATIONS.index(operation), plan.native or lower(plan), plan.meaning
            self._desk.learn(kind, dtype.storage, how, count, plan, meaning, program, meaning.fingerprint)

    def halt(self) -> None:
        """Every call takes the long way from now on: the group is broken or closed."""
        if self._desk is not None:
            self._desk.halt()


def _the_long_way(*args: object) -> None:
    return None


NO_DESK = Desk(None)
