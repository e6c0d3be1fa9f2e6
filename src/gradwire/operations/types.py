"""Defines the types that operations use (`Position`, `Shape`, `Exchange`, `Operation`), and common checks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradwire.arrays import Array, DType
from gradwire.collectives import algorithms
from gradwire.errors import GradwireError, InvalidRank, UnsupportedOp


class Position(NamedTuple):
    """This process in the group: its rank, and the size of the group."""

    rank: int
    size: int


class Shape(NamedTuple):
    """The description of an exchange: everything that must be equal on all ranks, and nothing else."""

    collective: str
    dtype: DType
    counts: int | tuple[int, ...]
    op: str | None = None
    root: int | None = None
    algorithm: str = "auto"
    call: str = ""  # the text of the user's call, if the call is more than this exchange
    items: tuple[str, ...] = ()


class CallKey(NamedTuple):
    """The arguments of a call for which all later calls with these arguments have the same exchange.

    Such calls can take the fast path. `counts` is the number of elements. For a collective that joins arrays, `counts`
    is the number of rows of each rank, and `row_shape` the shape of a row.
    """

    collective: str
    dtype: DType | None
    op: str | None = None
    root: int | None = None
    counts: int | tuple[int, ...] = 0
    row_shape: tuple[int, ...] = ()


class Exchange(Protocol):
    """Runs one schedule as the group's next call."""

    rank: int
    size: int

    def __call__(self, shape: Shape, x: Array, out: Array, key: CallKey | None = None) -> None:
        """Run the exchange. Later calls with the same `key`, if it is given, can take the fast path."""

    def disagree(self, reason: str) -> GradwireError:
        """Break the group because ranks have made different calls; return the error to raise."""


class Operation(NamedTuple):
    """A call whose arguments have been checked, ready to run."""

    name: str
    body: Callable[[Exchange], Any]


@dataclass(frozen=True, slots=True)
class Declined:
    """The result of a call that failed on a rank, although all ranks have completed its exchanges.

    For example, a value could not be encoded, or `out` is too small. The caller gets `error`, and the group stays
    usable.
    """

    error: GradwireError


def result_or_raise(outcome: Any) -> Any:
    """Return the outcome of a body, or raise the error if the outcome is `Declined`."""
    if type(outcome) is Declined:
        raise outcome.error
    return outcome


def nothing(dtype: DType) -> Array:
    """Return an empty array, for a rank that sends or receives no elements."""
    return np.empty(0, dtype.storage)


def check_algorithm(collective: str, algorithm: str, operation: str | None = None) -> None:
    """Raise `UnsupportedOp` if a collective has no such algorithm. `operation` is the name of the user's call."""
    if algorithm != "auto" and algorithm not in algorithms(collective):
        known = ", ".join(("auto", *algorithms(collective)))
        operation = operation or collective
        raise UnsupportedOp(f"{collective} has no algorithm {algorithm!r}; it has: {known}", operation=operation)


def check_root(root: int, size: int) -> int:
    return check_rank(root, size, "root")


def check_rank(rank: Any, size: int, name: str = "rank") -> int:
    """Return a rank of the group as an int; raise `InvalidRank` for everything else."""
    try:
        number = -1 if isinstance(rank, (bool, np.bool_)) else operator.index(rank)
    except TypeError:
        raise InvalidRank(f"{name} {rank!r} is not one of the ranks 0 … {size - 1}", size=size) from None
    if not 0 <= number < size:
        raise InvalidRank(f"{name} {rank!r} is not one of the ranks 0 … {size - 1}", rank=number, size=size)
    return number


def algorithm_text(algorithm: str) -> str:
    """Return the text for an algorithm in the description of a call; empty for "auto"."""
    return "" if algorithm == "auto" else f", algorithm={algorithm!r}"
