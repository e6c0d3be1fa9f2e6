"""The fast path: the native core makes repeated calls entirely by itself.

For arguments of a known kind (dtype, op, root, number of elements) everything but the exchange is known. The core then
inspects the array, takes the group's turn, records the call with its place in the user's program, and runs the cached
plan. A call that it does not handle (a strided array, queued works, a subscriber of events, a broken group, arguments
that are new) returns None before anything has happened, and takes the general path: `CollectiveRunner`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradwire.arrays import DType
from gradwire.executors.native import lower
from gradwire.executors.plan import Plan
from gradwire.host.native_core import native as _native_core

if TYPE_CHECKING:
    from gradwire import _native

RESULT_LAYOUTS = {
    "all_reduce": "ELEMENTWISE",
    "broadcast": "ELEMENTWISE",
    "reduce_scatter": "SPLIT_ROWS",
    "all_gather": "JOINED_ROWS",
    "barrier": "NO_ARRAY",
}
"""Collectives with a fast path, and how the result relates to the array: a member of the core's `ResultLayout`."""

FastCall = Callable[[Any, Any, Any, Any, Any, Any], Any]
"""(x, op, root, out, algorithm, timeout) → the result, True where there is none, or None: take the general path."""


class FastPath:
    """The fast calls of one group; without the core, every call takes the general path."""

    all_reduce: FastCall
    broadcast: FastCall
    reduce_scatter: FastCall
    all_gather: FastCall
    barrier: FastCall

    def __init__(self, core: _native.FastPath | None) -> None:
        self._core = core
        self._collectives: dict[str, _native.FastCollective] = {}
        for name, layout in RESULT_LAYOUTS.items():
            call: FastCall = _general_path
            if core is not None:
                result = _native_core.ResultLayout[layout]
                collective = self._collectives[name] = _native_core.FastCollective(path=core, name=name, result=result)
                call = collective.run
            setattr(self, name, call)

    def add_plan(
        self,
        collective: str,
        dtype: DType | None,
        op: str | None,
        root: int | None,
        counts: int | tuple[int, ...],
        row_shape: tuple[int, ...],
        plan: Plan,
    ) -> None:
        """From now on calls with these arguments run this plan. `counts`: the elements of the array; all ranks' rows,
        where the plan joins them."""
        if self._core is None:
            return
        self._collectives[collective].add_plan(
            dtype=dtype.storage if dtype is not None else None,
            op=op,
            root=root,
            count=counts if isinstance(counts, int) else 0,
            row_shape=row_shape,
            rows=None if isinstance(counts, int) else counts,
            program=plan.native or lower(plan),
            fingerprint=plan.description.fingerprint,
            description=plan.description,
        )

    def halt(self) -> None:
        """Send every call to the general path from now on: the group is broken or closed."""
        if self._core is not None:
            self._core.halt()


def _general_path(*args: object) -> None:
    return None


NO_FAST_PATH = FastPath(None)
