"""`Capabilities`: what a group can do, to be asked before calling it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.arrays import REDUCE_OPS, parse_dtype
from gradwire.collectives import REDUCING
from gradwire.errors import ArrayError

_AS_ALL_REDUCE = ("all_reduce_named", "barrier")
_OF_ARRAYS = ("send", "recv", "sendrecv", "copy", "empty")
_PLAIN = ("broadcast_value", "all_gather_values", "subgroup", "stream", "abort", "close")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this group's backend can do; ask before, instead of catching `UnsupportedOp` after.

    `native` says whether the native core runs, `registered` whether `empty()` gives memory that is reduced without a
    copy, `recovers` whether `recover()` can; `algorithms` lists by collective what may be asked for by name.

    >>> import gradwire as gw
    >>> with gw.init() as group: able = group.capabilities
    >>> able.transport, able.native, "ring" in able.algorithms["all_reduce"]
    ('local', False, True)
    """

    transport: str
    native: bool
    registered: bool
    recovers: bool
    algorithms: Mapping[str, tuple[str, ...]]
    reduce_ops: tuple[str, ...] = REDUCE_OPS

    def supports(
        self, operation: str, *, dtype: Any = "float32", op: str | None = None, algorithm: str = "auto"
    ) -> bool:
        """Whether a call with these arguments is understood here.

        >>> import gradwire as gw
        >>> with gw.init() as group: able = group.capabilities
        >>> able.supports("all_reduce", dtype="int32", op="mean"), able.supports("gather", algorithm="tree")
        (False, False)
        """
        if operation == "recover":
            return self.recovers
        if operation in _PLAIN:
            return op is None and algorithm == "auto"
        collective = "all_reduce" if operation in _AS_ALL_REDUCE else operation
        known = ("auto", *self.algorithms.get(collective, ()))
        if (collective not in self.algorithms and operation not in _OF_ARRAYS) or algorithm not in known:
            return False
        try:
            row = parse_dtype(dtype)
        except ArrayError:
            return False
        return op is None or (op in row.ops and collective in REDUCING and operation != "barrier")
