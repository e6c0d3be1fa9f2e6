"""Binds a schedule to counts and a dtype: the plan of one rank.

A plan gives segments bounds in elements and slices ranges of memory. It repeats the program for each tile: tile t is
the elements [t·B, (t+1)·B) of every segment. Tiles are independent, so `IN_FLIGHT` of them run at the same time, each
one round behind its predecessor. The rounds that run at the same time (tile t in round r, tile t+1 in round r−1 …) form
a wave. A wave follows the rules of a round, and both ends of a link list its messages in the same order.

A plan needs two kinds of memory besides the user's: scratch for partial results that cannot be in `out`, and staging
for received terms of folds. Both are bounded by IN_FLIGHT · TILE_BYTES · (segments or terms of a round), for any count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradwire.arrays import DType
from gradwire.collectives.schedule import Copy, Finish, Fold, From, Recv, Schedule, Send, Slice, placement
from gradwire.errors import InvalidSize
from gradwire.liveness.call_log import CallDescription
from gradwire.wire import HEADER_BYTES

TILE_BYTES = 4 << 20  # of all segments together, which limits the staging memory for many ranks
SMALLEST_TILE = 64 << 10
IN_FLIGHT = 3
ALIGNMENT = 64
IN, OUT, SCRATCH = 0, 1, 2


class Piece(NamedTuple):
    """The elements start … stop - 1 of a memory of the plan (IN, OUT or SCRATCH)."""

    memory: int
    start: int
    stop: int


Pieces = tuple[Piece, ...]


class Outgoing(NamedTuple):
    """A message to one or several ranks."""

    peers: tuple[int, ...]
    pieces: Pieces
    nbytes: int
    tile: int
    round: int


class Incoming(NamedTuple):
    """A message from a rank. It is received into `pieces`, or, as a term of a fold, into staging.

    `staged` is the byte offset in staging; -1 if the message is received into pieces.
    """

    peer: int
    pieces: Pieces
    staged: int
    nbytes: int
    tile: int
    round: int


class Term(NamedTuple):
    """A term of a fold: pieces of memory, or the staged message with this index in its wave."""

    pieces: Pieces
    message: int
    partial: bool


class Folding(NamedTuple):
    """A fold of one wave. `waits_for` lists the messages that it needs."""

    dst: Pieces
    terms: tuple[Term, ...]
    waits_for: tuple[int, ...]


class Moving(NamedTuple):
    """A copy, or the finish of a result."""

    dst: Pieces
    src: Pieces
    finishes: bool


@dataclass(slots=True)
class Wave:
    """The messages, folds and moves of rounds that run at the same time."""

    sends: list[Outgoing] = field(default_factory=list)
    receives: list[Incoming] = field(default_factory=list)
    folds: list[Folding] = field(default_factory=list)
    moves: list[Moving] = field(default_factory=list)
    staging: int = 0

    @property
    def empty(self) -> bool:
        return not (self.sends or self.receives or self.folds or self.moves)


def even_bounds(count: int, segments: int, itemsize: int) -> tuple[int, ...]:
    """Return aligned bounds that split a count into segments. The last segments may be short or empty."""
    step = -(-count // segments)
    grain = max(1, ALIGNMENT // itemsize)
    step = -(-step // grain) * grain
    return tuple(min(i * step, count) for i in range(segments + 1))


def ragged_bounds(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the bounds of segments with these lengths."""
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return tuple(bounds)


class Plan:
    """One rank's part in a collective. It can run any number of times."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        dtype: DType,
        op: str | None,
        bounds: tuple[int, ...],
        description: CallDescription,
        tile_bytes: int | None = None,
    ) -> None:
        if len(bounds) != schedule.segments + 1:
            raise InvalidSize(f"{len(bounds) - 1} counts for {schedule.segments} segments")
        self.schedule = schedule
        self.rank = rank
        self.dtype = dtype
        self.op = op
        self.description = description
        self.native: Any = None  # the plan as a program of the native core; made on first use
        self.divisor = schedule.size if op == "mean" else None
        self.reduces = op is not None
        # The result of a fold may be in the memory of an input that the same round sends. The executor then folds
        # after all messages are sent.
        self.folds_last = schedule.separate_acc
        self.lengths = [bounds[i + 1] - bounds[i] for i in range(schedule.segments)]
        self.program = schedule.program(rank)
        inputs, outputs = placement(schedule.collective, schedule.size, schedule.segments, schedule.root, rank)
        self.in_offset, self.in_count = self._lay_out(inputs)
        self.out_offset, self.out_count = self._lay_out(outputs)
        self._find_tile(tile_bytes or TILE_BYTES)
        self._find_scratch()
        self._single: list[Wave] | None = None
        if self.tiles == 1:
            self._single = list(self._make_waves())

    def _lay_out(self, segments: Sequence[int]) -> tuple[dict[int, int], int]:
        offsets, end = {}, 0
        for segment in segments:
            offsets[segment] = end
            end += self.lengths[segment]
        return offsets, end

    def _find_tile(self, tile_bytes: int) -> None:
        longest = max(self.lengths, default=0)
        nbytes = max(min(SMALLEST_TILE, tile_bytes), tile_bytes // max(1, self.schedule.segments))
        grain = max(1, ALIGNMENT // self.dtype.itemsize)
        self.tile = max(grain, nbytes // self.dtype.itemsize // grain * grain)
        self.tiles = max(1, -(-longest // self.tile))
        self.stride = min(self.tile, -(-max(1, longest) // grain) * grain)

    def _find_scratch(self) -> None:
        """Find the segments that need scratch: a partial result is in `out` only if `out` has its segment and type."""
        scratch: dict[int, int] = {}
        for program_round in self.program:
            for operation in program_round:
                for part in _slices(operation):
                    for segment in part.segments:
                        if self._user_memory(part.buffer, segment) is None:
                            scratch.setdefault(segment, len(scratch))
                            # Scratch has one type. If partial results have another type than elements, it has theirs.
                            if self._separate_acc and part.buffer != "acc":
                                raise InvalidSize(f"{part} has no memory on rank {self.rank} of {self.schedule}")
        self.scratch = scratch
        self.in_flight = min(IN_FLIGHT, self.tiles, max(1, len(self.program)))
        self.scratch_count = len(scratch) * self.stride * self.in_flight

    @property
    def _separate_acc(self) -> bool:
        return self.reduces and self.dtype.widens

    def _user_memory(self, buffer: str, segment: int) -> tuple[int, int] | None:
        """Return where a segment is in the user's memory: IN or OUT, and its offset; None if it needs scratch."""
        if buffer == "in" and segment in self.in_offset:
            return IN, self.in_offset[segment]
        if buffer == "acc" and self._separate_acc:
            return None
        if buffer in ("out", "acc") and segment in self.out_offset:
            return OUT, self.out_offset[segment]
        return None

    def _pieces(self, part: Slice, tile: int) -> Pieces:
        pieces: list[Piece] = []
        for segment in part.segments:
            begin = tile * self.tile
            length = min(self.tile, self.lengths[segment] - begin)
            if length <= 0:
                continue
            found = self._user_memory(part.buffer, segment)
            if found is not None:
                memory, start = found[0], found[1] + begin
            else:
                index = self.scratch[segment]
                slot = tile % self.in_flight
                memory, start = SCRATCH, (slot * len(self.scratch) + index) * self.stride
            last = pieces[-1] if pieces else None
            if last is not None and last.memory == memory and last.stop == start:
                pieces[-1] = Piece(memory, last.start, start + length)
            else:
                pieces.append(Piece(memory, start, start + length))
        return tuple(pieces)

    def waves(self) -> Iterator[Wave]:
        """Yield the waves in order. The waves of a plan with one tile are cached."""
        return iter(self._single) if self._single is not None else self._make_waves()

    def _make_waves(self) -> Iterator[Wave]:
        rounds = len(self.program)
        for first in range(0, self.tiles, self.in_flight):
            tiles = range(first, min(first + self.in_flight, self.tiles))
            for step in range(rounds + len(tiles) - 1):
                wave = Wave()
                for tile in tiles:
                    number = step - (tile - first)
                    if 0 <= number < rounds:
                        self._add_round(wave, tile, number)
                if not wave.empty:
                    yield wave

    def _add_round(self, wave: Wave, tile: int, number: int) -> None:
        for operation in self.program[number]:
            match operation:
                case Send(part, to):
                    pieces = self._pieces(part, tile)
                    if pieces:
                        size = _elements(pieces) * self._item(part.buffer)
                        wave.sends.append(Outgoing(to, pieces, size, tile, number))
                case Recv(part, source):
                    pieces = self._pieces(part, tile)
                    if pieces:
                        size = _elements(pieces) * self._item(part.buffer)
                        wave.receives.append(Incoming(source, pieces, -1, size, tile, number))
                case Fold(dst, terms):
                    self._add_fold(wave, self._pieces(dst, tile), terms, tile, number)
                case Finish(dst, src):
                    self._add_move(wave, self._pieces(dst, tile), self._pieces(src, tile), True)
                case Copy(dst, src):
                    self._add_move(wave, self._pieces(dst, tile), self._pieces(src, tile), False)

    def _add_fold(self, wave: Wave, dst: Pieces, terms: Sequence[Slice | From], tile: int, number: int) -> None:
        if not dst:
            return
        bound, waits_for = [], []
        for term in terms:
            if isinstance(term, From):
                size = _elements(dst) * (self.dtype.accumulator.itemsize if term.partial else self.dtype.itemsize)
                bound.append(Term((), len(wave.receives), term.partial))
                waits_for.append(len(wave.receives))
                wave.receives.append(Incoming(term.rank, (), wave.staging, size, tile, number))
                wave.staging += HEADER_BYTES + -(-size // ALIGNMENT) * ALIGNMENT
            else:
                bound.append(Term(self._pieces(term, tile), -1, term.buffer == "acc"))
        wave.folds.append(Folding(dst, tuple(bound), tuple(waits_for)))

    def _add_move(self, wave: Wave, dst: Pieces, src: Pieces, finishes: bool) -> None:
        changes_nothing = dst == src and (not finishes or self.divisor is None)
        if dst and not changes_nothing:
            wave.moves.append(Moving(dst, src, finishes))

    def _item(self, buffer: str) -> int:
        return self.dtype.accumulator.itemsize if buffer == "acc" and self.reduces else self.dtype.itemsize


def _elements(pieces: Pieces) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _slices(operation: object) -> Iterator[Slice]:
    match operation:
        case Send(part, _) | Recv(part, _):
            yield part
        case Fold(dst, terms):
            yield dst
            yield from (term for term in terms if isinstance(term, Slice))
        case Finish(dst, src) | Copy(dst, src):
            yield dst
            yield src
