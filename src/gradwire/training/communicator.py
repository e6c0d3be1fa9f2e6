"""`gw.Communicator`: the calls that training code needs of a group. A `Group` has them, and so can a user's engine."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from gradwire.errors import ConfigError
from gradwire.group import Group

_CALLS = ("all_reduce", "broadcast", "all_gather")
_NUMBERS = ("rank", "size")


@runtime_checkable
class Communicator(Protocol):
    """The calls that training code needs of a group.

    `Group` has these calls. A class of your own that has them can be passed to `GradientSync`, `Contract`,
    `check_replicas`, `broadcast_named`, `weighted_mean`, `ShardedOptimizer`, the compressions and `gw.jax` in place of
    a group. All ranks make the calls together and in the same order. An exception that a call raises reaches the
    program unchanged.

    gradwire passes contiguous, writable NumPy arrays with one axis: float32 and float64 to `all_reduce` with "sum",
    uint8 to `all_reduce` with "max", and uint8 to the other two. `gw.jax.all_reduce` can pass other dtypes and ops.

    Two more names are used if a class has them: `generation`, a number that errors report, and
    `all_to_all(x, send_counts, recv_counts)`, with which the compressions "f16", "bf16" and "int8" send fewer bytes.

    >>> import gradwire as gw
    >>> with gw.init() as group: isinstance(group, gw.Communicator)
    True
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0 to `size - 1`."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, x: Any, /, op: str = "sum") -> Any:
        """Replace x by its reduction over all ranks, and return x. Every rank must get the same bits.

        Args:
            x: An array, with the same number of elements and dtype on every rank.
            op: "sum" or "max".
        """

    def broadcast(self, x: Any, /, root: int = 0) -> Any:
        """Replace x by the root's x on every other rank, and return x.

        Args:
            x: An array, with the same number of elements and dtype on every rank.
            root: The rank whose x is copied.
        """

    def all_gather(self, x: Any, /) -> Any:
        """Return every rank's x in one new array, in rank order.

        Args:
            x: An array, with the same number of elements and dtype on every rank.
        """


class HasGroup(Protocol):
    """An object whose group changes, such as `gw.Elastic`."""

    @property
    def group(self) -> Communicator: ...


def current_communicator(source: Any) -> Any:
    """Return `source` if it is a communicator, else its current group (`source` is then an elastic run).

    Raise `ConfigError` if it is neither. The error names the calls that are missing.
    """
    if isinstance(source, Group):
        return source
    missing = _missing(source)
    if missing and hasattr(source, "group"):  # an engine may also have an attribute of this name
        source = source.group
        missing = [] if isinstance(source, Group) else _missing(source)
    if missing:
        raise ConfigError(
            f"expected a group or an elastic run, got {type(source).__name__}, which is not a gw.Communicator either: "
            f"it lacks {', '.join(missing)}"
        )
    return source


def _missing(source: Any) -> list[str]:
    calls = [name for name in _CALLS if not callable(getattr(source, name, None))]
    return [*(name for name in _NUMBERS if not hasattr(source, name)), *calls]
