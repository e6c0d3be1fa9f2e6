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


class FastPath:
    """The core's fast_path for one group; without the core, every call takes the long way.

    The collectives return their result (a barrier True), or None if the call has to be made the long way.
    """

    def __init__(self, fast_path: _native.Desk | None) -> None:
        self._fast_path = fast_path
        self.all_reduce: Callable[..., Any] = fast_path.all_reduce if fast_path is not None else _the_long_way
        self.broadcast: Callable[..., Any] = fast_path.broadcast if fast_path is not None else _the_long_way
        self.reduce_scatter: Callable[..., Any] = fast_path.reduce_scatter if fast_path is not None else _the_long_way
        self.barrier: Callable[..., Any] = fast_path.barrier if fast_path is not None else _the_long_way
        self.all_gather: Callable[..., Any] = fast_path.all_gather if fast_path is not None else _the_long_way

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
        if self._fast_path is not None:
            kind, program, meaning = _OPERATIONS.index(operation), plan.native or lower(plan), plan.description
            storage = dtype.storage if dtype is not None else None
            self._fast_path.learn(kind, storage, how, count, row, plan, meaning, program, meaning.fingerprint)

    def halt(self) -> None:
        """Every call takes the long way from now on: the group is broken or closed."""
        if self._fast_path is not None:
            self._fast_path.halt()


def _the_long_way(*args: object) -> None:
    return None


NO_FAST_PATH = FastPath(None)
