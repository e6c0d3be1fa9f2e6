"""Defines `Capabilities`: what a group supports, for programs that check before a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.arrays import REDUCE_OPS, parse_dtype
from gradwire.errors import ArrayError
from gradwire.operations.registry import COLLECTIVES

_OF_ARRAYS = ("send", "recv", "isend", "irecv", "sendrecv", "copy", "empty")
_PLAIN = ("probe", "subgroup", "stream", "abort", "close")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a group supports. A program can check this before a call instead of catching `UnsupportedOp`.

    `native`: the native core runs the collectives. `registered`: `empty()` returns memory that is reduced without a
    copy. `recovers`: the group supports `recover()`. `algorithms`: the names that can be requested, by collective.

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
        """Return whether this group supports a call with these arguments.

        >>> import gradwire as gw
        >>> with gw.init() as group: able = group.capabilities
        >>> able.supports("all_reduce", dtype="int32", op="mean"), able.supports("gather", algorithm="tree")
        (False, False)
        """
        if operation == "recover":
            return self.recovers
        collective = COLLECTIVES.get(operation)
        if operation in _PLAIN or (collective is not None and not collective.takes_algorithm):
            return op is None and algorithm == "auto"
        if collective is None and operation not in _OF_ARRAYS:
            return False
        if algorithm not in ("auto", *(self.algorithms[collective.schedule] if collective is not None else ())):
            return False
        try:
            row = parse_dtype(dtype)
        except ArrayError:
            return False
        return op is None or (op in row.ops and collective is not None and collective.reduces)
