"""The fast path: the native core makes repeated calls entirely by itself.

For arguments of a known kind (dtype, op, root, number of elements) everything but the exchange is known. The core then
inspects the array, takes the group's turn, records the call with its place in the user's program, and runs the cached
plan. A call that it does not handle (a strided array, queued works, a subscriber of events, a broken group, arguments
that are new) returns None before anything has happened, and takes the general path: `CollectiveRunner`.
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
"""(x, op, root, out, algorithm, timeout) → the result, True where there is none, or None: take the general path."""


class FastPath:
    """The fast calls of one group, each an attribute by the name of the collective.

    Before the core is started, and after the end, every call takes the general path.
    """

    if TYPE_CHECKING:

        def __getattr__(self, collective: str) -> FastCall: ...

    def __init__(self, layouts: Mapping[str, ResultLayout]) -> None:
        """`layouts`: the collectives that have a fast path, and how their results are laid out."""
        self._layouts = layouts
        self._core: _native.FastPath | None = None
        self._collectives: dict[str, _native.FastCollective] = {}
        self._take_general_path()

    def _take_general_path(self) -> None:
        for name in self._layouts:
            setattr(self, name, _general_path)

    def start(self, core: _native.FastPath) -> None:
        """From now on the core tries each call first."""
        self._core = core
        for name, layout in self._layouts.items():
            result = _native_core.ResultLayout[layout]
            collective = self._collectives[name] = _native_core.FastCollective(path=core, name=name, result=result)
            setattr(self, name, collective.run)

    def end(self) -> None:
        """Halt, and let go of the core, which refers to the group."""
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
        """From now on calls with these arguments run this plan. `counts`: the elements of the array; all ranks' rows,
        where the plan joins them."""
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
        """Send every call to the general path from now on: the group is broken or closed."""
        core = self._core
        if core is not None:
            core.halt()


def _general_path(*args: object) -> None:
    return None
