"""The types that operations are written in (`Shape`, `Exchange`, `Operation`), and checks that all of them need."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradwire.arrays import Array, DType
from gradwire.collectives import algorithms
from gradwire.errors import GradwireError, InvalidRank, UnsupportedOp


class Shape(NamedTuple):
    """What an exchange is: everything that all ranks must agree on, and nothing else."""

    collective: str
    dtype: DType
    counts: int | tuple[int, ...]
    op: str | None = None
    root: int | None = None
    algorithm: str = "auto"
    call: str = ""  # how the user's call reads, where it is not just this exchange
    items: tuple[str, ...] = ()


class CallKey(NamedTuple):
    """The arguments of a call, if all calls with these arguments mean the same exchange: they can take the fast path.

    `counts` is the number of elements or, where arrays are joined, all ranks' rows; `row_shape` matters only there.
    """

    collective: str
    dtype: DType | None
    op: str | None = None
    root: int | None = None
    counts: int | tuple[int, ...] = 0
    row_shape: tuple[int, ...] = ()


class Exchange(Protocol):
    """Carries out one schedule as the group's next call."""

    rank: int
    size: int

    def __call__(self, shape: Shape, x: Array, out: Array, form: CallKey | None = None) -> None:
        """`form` says what calls are like this one, if any."""

    def disagree(self, reason: str) -> GradwireError:
        """Ranks turn out to have meant different things: break the group, and the error to raise."""


class Operation(NamedTuple):
    """A checked call, ready to run."""

    name: str
    body: Callable[[Exchange], Any]


@dataclass(frozen=True, slots=True)
class Declined:
    """What a body returns when a rank has nothing sound to send, or no room, and all are done with the call.

    Its caller gets `error`, and the group goes on.
    """

    error: GradwireError


def settled(outcome: Any) -> Any:
    """The outcome of a body as the caller sees it: a result, or the error of a call that was declined."""
    if type(outcome) is Declined:
        raise outcome.error
    return outcome


def nothing(dtype: DType) -> Array:
    """The array of a rank that brings or gets none."""
    return np.empty(0, dtype.storage)


def check_algorithm(collective: str, algorithm: str) -> None:
    if algorithm != "auto" and algorithm not in algorithms(collective):
        known = ", ".join(("auto", *algorithms(collective)))
        raise UnsupportedOp(f"{collective} has no algorithm {algorithm!r}; it has: {known}", operation=collective)


def check_root(root: int, size: int) -> int:
    return check_rank(root, size, "root")


def check_rank(rank: Any, size: int, name: str = "rank") -> int:
    """A rank of the group as a plain int; `InvalidRank` for everything else."""
    try:
        number = -1 if isinstance(rank, (bool, np.bool_)) else operator.index(rank)
    except TypeError:
        raise InvalidRank(f"{name} {rank!r} is not one of the ranks 0 … {size - 1}") from None
    if not 0 <= number < size:
        raise InvalidRank(f"{name} {rank!r} is not one of the ranks 0 … {size - 1}", rank=number)
    return number


def algorithm_text(algorithm: str) -> str:
    """How an algorithm that the user named reads in the text of a call."""
    return "" if algorithm == "auto" else f", algorithm={algorithm!r}"
