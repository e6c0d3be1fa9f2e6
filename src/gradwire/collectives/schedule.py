"""The terms in which every collective is written: slices, operations, rounds, programs, schedules.

A schedule gives each rank a program: a sequence of rounds, each a handful of operations on slices of segments. It
knows nothing of counts, dtypes or transports, so what is proved of it once holds for all of them.

**Buffers.** `in` and `out` hold elements of the array's type T; `acc` holds partial results in the type A that is
accumulated in (f32 for half types, else T). An executor may lay `acc` over `out` and `out` over `in`: a schedule
therefore treats the three of one segment as one place, and never reads one of them after writing another. A schedule
that needs `acc` apart from the other two says so (`separate_acc`). The collectives that only move data use `acc` as
scratch of type T.

**Rounds.** All ranks have equally many. A message is sent and received in the same round; messages of one pair of ranks
match in the order in which the operations list them, and cover the same segments. Within a round no operation reads
or writes a place that another writes; only `Copy(out[s], in[s])` may stand beside readers of `in[s]`.
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
    """Segments first … first + count - 1 of a buffer."""

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
    """The same segments to each of some ranks."""

    slice: Slice
    to: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.slice} → {','.join(map(str, self.to))}"


@dataclass(frozen=True, slots=True)
class Recv:
    """What `source` sends, into a slice."""

    slice: Slice
    source: int

    def __str__(self) -> str:
        return f"{self.slice} ← {self.source}"


@dataclass(frozen=True, slots=True)
class From:
    """A term of a fold that arrives from a rank; a partial one is of type A (sent from `acc`), else of type T."""

    rank: int
    partial: bool

    def __str__(self) -> str:
        return f"←{self.rank}"


Term = Slice | From


@dataclass(frozen=True, slots=True)
class Fold:
    """dst, in `acc`, = the terms reduced from left to right in type A; all of them cover the segments of dst."""

    dst: Slice
    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return f"{self.dst} = {' + '.join(map(str, self.terms))}"


@dataclass(frozen=True, slots=True)
class Finish:
    """dst = the complete result: divided if it is a mean, and rounded to T, here and nowhere else."""

    dst: Slice
    src: Slice

    def __str__(self) -> str:
        return f"{self.dst} ⇐ {self.src}"


@dataclass(frozen=True, slots=True)
class Copy:
    """dst = src, of the same type."""

    dst: Slice
    src: Slice

    def __str__(self) -> str:
        return f"{self.dst} = {self.src}"


Operation = Send | Recv | Fold | Finish | Copy
Round = tuple[Operation, ...]
Program = tuple[Round, ...]


@dataclass(frozen=True, eq=False)
class Phase:
    """Rounds for some ranks over some segments: a whole collective or a piece of one, to be composed."""

    ranks: Collection[int]
    segments: int
    rounds: int
    make: Callable[[int], Program]
    separate_acc: bool = False
    one_shot: bool = False
    mirrored: bool = False

    def program(self, rank: int) -> Program:
        """The rounds of one rank: empty ones for a rank that has no part in this phase."""
        return self.make(rank) if rank in self.ranks else ((),) * self.rounds


Builder = Callable[[int, int], Phase]
"""From the number of ranks and the root (any rank where the collective has none) to the phase that does it."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """A collective spelled out for `size` ranks; programs are made when first asked for."""

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
        """Whether `acc` must have memory of its own, because it is written while `in` is still being sent."""
        return self.phase.separate_acc

    @property
    def one_shot(self) -> bool:
        """Claims that all ranks send their whole input to all others and fold alike: see `claims`."""
        return self.phase.one_shot

    @property
    def mirrored(self) -> bool:
        """Claims that parts of the result may be written straight into the receiver's: see `claims`."""
        return self.phase.mirrored

    @property
    def rounds(self) -> int:
        """How many rounds every program has, those without messages included."""
        return self.phase.rounds

    def program(self, rank: int) -> Program:
        program = self._programs.get(rank)
        if program is None:
            if not 0 <= rank < self.size:
                raise InvalidRank(f"rank {rank} is not one of 0 … {self.size - 1}", rank=rank)
            program = self._programs[rank] = self.phase.program(rank)
        return program


def placement(
    collective: str, size: int, segments: int, root: int | None, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which segments a rank brings in `in`, and which it must end with in `out`."""
    if collective == "all_to_all":  # segment i * size + j travels from rank i to rank j
        return tuple(range(rank * size, (rank + 1) * size)), tuple(range(rank, segments, size))
    everything, own = tuple(range(segments)), (rank,)
    match collective:
        case "all_reduce":
            return everything, everything
        case "broadcast":
            return everything if rank == root else (), everything
        case "reduce":
            return everything, everything if rank == root else ()
        case "all_gather":
            return own, everything
        case "reduce_scatter":
            return everything, own
        case "gather":
            return own, everything if rank == root else ()
        case "scatter":
            return everything if rank == root else (), own
    raise UnsupportedOp(f"there is no collective {collective!r}; there are: {', '.join(COLLECTIVES)}")


def origin(collective: str, size: int, root: int | None, segment: int) -> int | None:
    """The rank whose input a segment of the result is; None where it is reduced from all ranks."""
    match collective:
        case "broadcast" | "scatter":
            return root
        case "all_gather" | "gather":
            return segment
        case "all_to_all":
            return segment // size
    return None
