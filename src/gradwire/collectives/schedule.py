"""Defines schedules and their parts: slices, operations, rounds and programs.

A schedule has a program for each rank. A program is a sequence of rounds, and a round has a few operations on slices of
segments. A schedule does not depend on counts, dtypes or transports, so a proof of it holds for all of them.

**Buffers.** `in` and `out` hold elements of the array's type T. `acc` holds partial results in the accumulator type A
(float32 for 16-bit floats, otherwise T). An executor may use the same memory for `acc` and `out`, and for `out` and
`in`. A schedule therefore treats the three buffers of a segment as one memory location, and never reads one of them
after writing another. A schedule that needs separate memory for `acc` sets `separate_acc`. Collectives that only move
data use `acc` as scratch memory of type T.

**Rounds.** All ranks have the same number of rounds. A message is sent and received in the same round. The messages
between two ranks match in the order of their operations, and cover the same segments. Within a round no operation reads
or writes a location that another operation writes. The only exception: `Copy(out[s], in[s])` may be in the same round
as readers of `in[s]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from gradwire.errors import InvalidRank, UnsupportedOp

Buffer = Literal["in", "out", "acc"]

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
)
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


@dataclass(frozen=True, slots=True)
class Slice:
    """The segments first … first + count - 1 of a buffer."""

    buffer: Buffer
    first: int
    count: int = 1

    @property
    def segments(self) -> range:
        return range(self.first, self.first + self.count)

    def __str__(self) -> str:
        last = "" if self.count == 1 else f":{self.first + self.count}"
        return f"{self.buffer}[{self.first}{last}]"


@dataclass(frozen=True, slots=True)
class Send:
    """Send the segments of `slice` to each rank of `to`."""

    slice: Slice
    to: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.slice} → {','.join(map(str, self.to))}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive a message of rank `source` into `slice`."""

    slice: Slice
    source: int

    def __str__(self) -> str:
        return f"{self.slice} ← {self.source}"


@dataclass(frozen=True, slots=True)
class From:
    """A term of a fold that `rank` sends. A partial term has type A (sent from `acc`), another term has type T."""

    rank: int
    partial: bool

    def __str__(self) -> str:
        return f"←{self.rank}"


Term = Slice | From


@dataclass(frozen=True, slots=True)
class Fold:
    """Reduce the terms from left to right in type A into `dst`, in `acc`. Each term covers the segments of dst."""

    dst: Slice
    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return f"{self.dst} = {' + '.join(map(str, self.terms))}"


@dataclass(frozen=True, slots=True)
class Finish:
    """Compute the final result `dst` from `src`: divide for a mean, and round to T. Only this operation rounds."""

    dst: Slice
    src: Slice

    def __str__(self) -> str:
        return f"{self.dst} ⇐ {self.src}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `src` to `dst`, which has the same type."""

    dst: Slice
    src: Slice

    def __str__(self) -> str:
        return f"{self.dst} = {self.src}"


Operation = Send | Recv | Fold | Finish | Copy
Round = tuple[Operation, ...]
Program = tuple[Round, ...]


@dataclass(frozen=True, eq=False)
class Phase:
    """The rounds of a whole collective, or of a part of one that is combined with others."""

    ranks: Collection[int]
    segments: int
    rounds: int
    make: Callable[[int], Program]
    separate_acc: bool = False
    one_shot: bool = False
    mirrored: bool = False

    def program(self, rank: int) -> Program:
        """Return the rounds of one rank. They are empty for a rank that does not take part in this phase."""
        return self.make(rank) if rank in self.ranks else ((),) * self.rounds


Builder = Callable[[int, int], Phase]
"""Builds the phase of a collective from the number of ranks and the root (any rank if the collective has none)."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The programs of a collective for `size` ranks. Each program is built on first use."""

    collective: str
    algorithm: str
    size: int
    root: int | None
    phase: Phase = field(repr=False)
    _programs: dict[int, Program] = field(default_factory=dict, init=False, repr=False)

    @property
    def segments(self) -> int:
        return self.phase.segments

    @property
    def separate_acc(self) -> bool:
        """Whether `acc` needs its own memory, because it is written while `in` is still being sent."""
        return self.phase.separate_acc

    @property
    def one_shot(self) -> bool:
        """Claims that all ranks send their whole input to all others and fold in the same order: see `claims`."""
        return self.phase.one_shot

    @property
    def mirrored(self) -> bool:
        """Claims that parts of the result may be written directly into the receiver's result: see `claims`."""
        return self.phase.mirrored

    @property
    def rounds(self) -> int:
        """The number of rounds of every program, including those without messages."""
        return self.phase.rounds

    def program(self, rank: int) -> Program:
        program = self._programs.get(rank)
        if program is None:
            if not 0 <= rank < self.size:
                raise InvalidRank(f"rank {rank} is not one of 0 … {self.size - 1}", rank=rank, size=self.size)
            program = self._programs[rank] = self.phase.program(rank)
        return program


def placement(
    collective: str, size: int, segments: int, root: int | None, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the segments of a rank's input, in `in`, and the segments of its result, in `out`."""
    if collective == "all_to_all":  # segment i * size + j is sent from rank i to rank j
        return tuple(range(rank * size, (rank + 1) * size)), tuple(range(rank, segments, size))
    whole, own = tuple(range(segments)), (rank,)
    match collective:
        case "all_reduce":
            return whole, whole
        case "broadcast":
            return whole if rank == root else (), whole
        case "reduce":
            return whole, whole if rank == root else ()
        case "all_gather":
            return own, whole
        case "reduce_scatter":
            return whole, own
        case "gather":
            return own, whole if rank == root else ()
        case "scatter":
            return whole if rank == root else (), own
    raise UnsupportedOp(f"there is no collective {collective!r}; there are: {', '.join(COLLECTIVES)}")


def origin(collective: str, size: int, root: int | None, segment: int) -> int | None:
    """Return the rank whose input becomes a segment of the result; None if all inputs are reduced to it."""
    match collective:
        case "broadcast" | "scatter":
            return root
        case "all_gather" | "gather":
            return segment
        case "all_to_all":
            return segment // size
    return None
