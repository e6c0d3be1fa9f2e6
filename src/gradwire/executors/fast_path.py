"""Implements the fast path: the native core runs repeated calls without Python code.

A call that repeats the dtype, op, root and number of elements of an earlier call needs only the exchange. The core
inspects the array, waits for the call's turn in the group's order, records the call with its line in the user's
program, and runs the cached plan. For a call that the core does not handle (a strided array, queued works, a subscriber
of events, a broken group, new arguments) it returns None before it has any effect. The call then takes the general
path, `CollectiveRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from gradwire.arrays import DType
from gradwire.executors.native import lower
from gradwire.executors.plan import Plan
from gradwire.host.native_core import native as _native_core

if TYPE_CHECKING:
    from gradwire import _native

ResultLayout = Literal["NO_ARRAY", "ELEMENTWISE", "SPLIT_ROWS", "JOINED_ROWS"]
"""How the result of a fast call relates to its array: a member of the core's `ResultLayout`."""

FastCall = Callable[[Any, Any, Any, Any, Any, Any], Any]
"""(x, op, root, out, algorithm, timeout) → the result, True if there is none, or None: take the general path."""


class FastPath:
    """The fast calls of one group. Each is an attribute with the name of its collective.

    Before `start` and after `end`, every call takes the general path.
    """

    if TYPE_CHECKING:

        def __getattr__(self, collective: str) -> FastCall: ...

    def __init__(self, layouts: Mapping[str, ResultLayout]) -> None:
        """`layouts` are the collectives that have a fast path, with the layouts of their results."""
        self._layouts = layouts
        self._core: _native.FastPath | None = None
        self._collectives: dict[str, _native.FastCollective] = {}
        self._take_general_path()

    def _take_general_path(self) -> None:
        for name in self._layouts:
            setattr(self, name, _general_path)

    def start(self, core: _native.FastPath) -> None:
        """Let the core try each call first."""
        self._core = core
        for name, layout in self._layouts.items():
            result = _native_core.ResultLayout[layout]
            collective = self._collectives[name] = _native_core.FastCollective(path=core, name=name, result=result)
            setattr(self, name, collective.run)

    def end(self) -> None:
        """Halt, and drop the reference to the core, which refers to the group."""
        self.halt()
        self._take_general_path()
        self._core, self._collectives = None, {}

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
        """Run this plan for later calls with these arguments.

        `counts` is the number of elements of the array, or, if the plan joins rows, the number of rows of each rank.
        """
        fast = self._collectives.get(collective)
        if fast is None:
            return
        fast.add_plan(
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
        """Send all later calls to the general path, because the group is broken or closed."""
        core = self._core
        if core is not None:
            core.halt()


def _general_path(*args: object) -> None:
    return None
