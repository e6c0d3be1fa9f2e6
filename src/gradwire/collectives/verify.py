"""Proves that a schedule is correct, for all counts, dtypes and links.

All ranks' programs are run on symbols: a place holds the ordered expression of what would be there. What is proved:

- every message is sent and received in the same round, with the same segments and type, and no rank sends to itself;
- nothing reads what was never written, or what an executor that lays the buffers over each other has overwritten;
- no operation of a round reads or writes what another of that round writes;
- no input is folded twice; what is finished is complete, and nothing is folded after that;
- every rank ends with what the collective promises: the right input moved, or one expression, the same on all ranks;
- nothing is done in vain: no value is written that nobody uses, or that was there already;
- what the schedule claims about itself (`one_shot`, `mirrored`) holds, by the rules in `claims`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakSet

from gradwire.collectives.claims import objections
from gradwire.collectives.expressions import Expression, Expressions
from gradwire.collectives.schedule import (
    REDUCING,
    Buffer,
    Copy,
    Finish,
    Fold,
    From,
    Operation,
    Recv,
    Round,
    Schedule,
    Send,
    Slice,
    origin,
    placement,
)
from gradwire.errors import GradwireError

PROVED_RANKS = 16
"""Up to here a whole proof takes at most about 10 ms; the work grows with the square of the ranks."""

_BUFFERS: tuple[Buffer, ...] = ("in", "out", "acc")
_OVERWRITTEN = -1


class InvalidSchedule(GradwireError, ValueError):
    """A schedule that would not do what it promises: `rank`, `round_number` and `operation` say where, `reason` why."""

    def __init__(self, message: str = "", *, round_number: int | None = None, reason: str = "", **facts: Any) -> None:
        super().__init__(message, **facts)
        self.round_number = round_number
        self.reason = reason


def verify(schedule: Schedule) -> dict[int, Expression]:
    """The expression of each segment of the result; raises InvalidSchedule if the schedule is wrong anywhere."""
    result = _Run(schedule).prove()
    _prove_claims(schedule)
    return result


_proved: WeakSet[Schedule] = WeakSet()


def prove_once(schedule: Schedule) -> None:
    """Before a schedule is first used in this process: prove it, or of a large one what memory safety depends on."""
    if schedule in _proved:
        return
    if schedule.size <= PROVED_RANKS:
        verify(schedule)
    else:
        _prove_claims(schedule)
    _proved.add(schedule)


def _prove_claims(schedule: Schedule) -> None:
    for rank, number, op, reason in objections(schedule):
        raise _invalid(schedule, rank, number, op, reason)


def _invalid(schedule: Schedule, rank: int, number: int, op: Operation | None, reason: str) -> InvalidSchedule:
    where = f"rank {rank}" if op is None else f"rank {rank}, round {number}, {op}"
    return InvalidSchedule(
        f"{schedule.collective} by {schedule.algorithm} with {schedule.size} ranks: {where}: {reason}",
        rank=rank,
        round_number=None if op is None else number,
        operation=None if op is None else str(op),
        reason=reason,
    )


class _Message(NamedTuple):
    """A message of a pair of ranks, as its sender or its receiver sees it."""

    op: Operation
    slice: Slice
    partial: bool


class _Write(NamedTuple):
    rank: int
    op: Operation
    dst: Slice
    numbers: list[int]


class _Run:
    """The symbolic execution of all ranks, a round at a time: what is read is what stood there before the round."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.reducing = schedule.collective in REDUCING
        self.terms = Expressions()
        self.everyone = (1 << schedule.size) - 1
        self.round = 0
        self.owed: list[frozenset[int]] = []
        self.values: list[dict[Buffer, dict[int, int]]] = []
        # What was written and not read since, by rank: (buffer, segment) -> (round, operation).
        self.unread: list[dict[tuple[Buffer, int], tuple[int, Operation]]] = []
        for rank in range(schedule.size):
            brought, owed = placement(schedule.collective, schedule.size, schedule.segments, schedule.root, rank)
            self.owed.append(frozenset(owed))
            self.values.append({"in": {s: self.terms.leaf(rank, s) for s in brought}, "out": {}, "acc": {}})
            self.unread.append({})

    def prove(self) -> dict[int, Expression]:
        programs = [self.schedule.program(rank) for rank in range(self.schedule.size)]
        for rank, program in enumerate(programs):
            if len(program) != len(programs[0]):
                raise self.wrong(rank, None, f"it has {len(program)} rounds, but rank 0 has {len(programs[0])}")
        for number in range(len(programs[0])):
            self.round = number
            self.step([program[number] for program in programs])
        return self.conclude()

    def step(self, rounds: list[Round]) -> None:
        for rank, ops in enumerate(rounds):
            for op in ops:
                self.check_alone(rank, op)
            self.check_hazards(rank, ops)
        arriving = self.deliver(rounds)
        writes = []
        for rank, ops in enumerate(rounds):
            for op in ops:
                dst = _written(op)
                if dst is not None:
                    writes.append(_Write(rank, op, dst, self.result(rank, op, arriving[rank])))
                for piece in _read(op):
                    for segment in piece.segments:
                        self.unread[rank].pop((piece.buffer, segment), None)
        for write in writes:
            self.write(write)

    # What can be said of an operation alone.

    def check_alone(self, rank: int, op: Operation) -> None:
        dst = _written(op)
        for piece in (*_read(op), *([dst] if dst else [])):
            if piece.count < 1 or piece.first < 0 or piece.first + piece.count > self.schedule.segments:
                raise self.wrong(rank, op, f"{piece} is not within the {self.schedule.segments} segments")
        if dst is not None:
            self.check_written(rank, op, dst)
        for peer in _peers(op):
            if peer == rank or not 0 <= peer < self.schedule.size:
                raise self.wrong(rank, op, f"rank {peer} is not another rank")
        if (isinstance(op, Send) and not op.to) or (isinstance(op, Fold) and not op.terms):
            raise self.wrong(rank, op, "it has nothing to do")

    def check_written(self, rank: int, op: Operation, dst: Slice) -> None:
        for piece in _read(op):
            if piece.segments != dst.segments:
                raise self.wrong(rank, op, f"{piece} and {dst} are not the same segments")
        if dst.buffer == "in":
            raise self.wrong(rank, op, "inputs are not written")
        if dst.buffer == "out" and not self.owed[rank].issuperset(dst.segments):
            raise self.wrong(rank, op, f"rank {rank} has no output {dst}")
        match op:
            case Fold() | Finish() if not self.reducing:
                raise self.wrong(rank, op, f"{self.schedule.collective} reduces nothing")
            case Fold() if dst.buffer != "acc":
                raise self.wrong(rank, op, "a fold is into acc")
            case Finish(src=src) if (dst.buffer, src.buffer) != ("out", "acc"):
                raise self.wrong(rank, op, "a finish is from acc to out")
            case Copy(src=src) if self.partial(src) != self.partial(dst):
                raise self.wrong(rank, op, "a copy does not change the type")

    # What can be said of the operations of one rank in one round.

    def check_hazards(self, rank: int, ops: Round) -> None:
        writers: dict[tuple[Buffer, int], Operation] = {}
        for op in ops:
            if (dst := _written(op)) is None:
                continue
            for segment in dst.segments:
                place = self.place(dst.buffer), segment
                if place in writers:
                    raise self.wrong(rank, op, f"{writers[place]} writes segment {segment} in the same round")
                writers[place] = op
        for op in ops:
            for piece in _read(op):
                for segment in piece.segments:
                    writer = writers.get((self.place(piece.buffer), segment), op)
                    if writer is not op and not (piece.buffer == "in" and _is_identity(writer)):
                        raise self.wrong(rank, op, f"{writer} writes segment {segment} in the same round")

    def place(self, buffer: Buffer) -> Buffer:
        """Buffers that an executor may lay over each other are one place, which goes by one name."""
        return "acc" if buffer == "acc" and self.schedule.separate_acc else "out"

    # Messages.

    def deliver(self, rounds: list[Round]) -> list[Iterator[list[int]]]:
        """Match all messages of a round: by receiver, what arrives, in the order in which it takes them."""
        sent: dict[tuple[int, int], deque[_Message]] = {}
        for rank, ops in enumerate(rounds):
            for op in ops:
                if isinstance(op, Send):
                    message = _Message(op, op.slice, self.partial(op.slice))
                    for to in op.to:
                        sent.setdefault((rank, to), deque()).append(message)
        arriving = []
        for rank, ops in enumerate(rounds):
            expected = [pair for op in ops for pair in self.expected(op)]
            arriving.append(
                iter([self.match(source, rank, wanted, sent.get((source, rank))) for source, wanted in expected])
            )
        for (rank, to), left in sent.items():
            if left:
                raise self.wrong(rank, left[0].op, f"rank {to} does not receive it in this round")
        return arriving

    def expected(self, op: Operation) -> Iterator[tuple[int, _Message]]:
        if isinstance(op, Recv):
            yield op.source, _Message(op, op.slice, self.partial(op.slice))
        elif isinstance(op, Fold):
            for term in op.terms:
                if isinstance(term, From):
                    yield term.rank, _Message(op, op.dst, term.partial)

    def match(self, source: int, rank: int, wanted: _Message, queue: deque[_Message] | None) -> list[int]:
        if not queue:
            raise self.wrong(rank, wanted.op, f"rank {source} does not send it in this round")
        message = queue.popleft()
        if message.slice.segments != wanted.slice.segments:
            raise self.wrong(rank, wanted.op, f"rank {source} sends other segments: {message.op}")
        if message.partial != wanted.partial:
            raise self.wrong(rank, wanted.op, f"rank {source} sends another type: {message.op}")
        return self.read(source, message.op, message.slice)

    def partial(self, piece: Slice) -> bool:
        """Whether it is of type A, and not of type T."""
        return self.reducing and piece.buffer == "acc"

    # Values.

    def result(self, rank: int, op: Operation, arriving: Iterator[list[int]]) -> list[int]:
        """The expressions that an operation writes, by segment."""
        match op:
            case Copy(src=src):
                return self.read(rank, op, src)
            case Finish(src=src):
                return [self.finish(rank, op, number) for number in self.read(rank, op, src)]
            case Fold(terms=terms):
                columns = (next(arriving) if isinstance(term, From) else self.read(rank, op, term) for term in terms)
                return [self.fold(rank, op, numbers) for numbers in zip(*columns, strict=True)]
        return next(arriving)

    def read(self, rank: int, op: Operation, piece: Slice) -> list[int]:
        held = self.values[rank][piece.buffer]
        numbers = []
        for segment in piece.segments:
            number = held.get(segment)
            if number is None:
                raise self.wrong(rank, op, f"{piece.buffer}[{segment}] was never written")
            if number == _OVERWRITTEN:
                raise self.wrong(rank, op, f"{piece.buffer}[{segment}] may have been overwritten")
            numbers.append(number)
        return numbers

    def fold(self, rank: int, op: Operation, numbers: tuple[int, ...]) -> int:
        if any(map(self.terms.is_finished, numbers)):
            raise self.wrong(rank, op, "it folds a finished result")
        total = numbers[0]
        for number in numbers[1:]:
            if twice := self.terms.ranks(total) & self.terms.ranks(number):
                raise self.wrong(rank, op, f"it folds the input of {_ranks(twice)} twice")
            total = self.terms.sum(total, number)
        return total

    def finish(self, rank: int, op: Operation, number: int) -> int:
        if self.terms.is_finished(number):
            raise self.wrong(rank, op, "it finishes a finished result")
        if missing := self.everyone & ~self.terms.ranks(number):
            raise self.wrong(rank, op, f"the input of {_ranks(missing)} is missing")
        return self.terms.finished(number)

    def write(self, write: _Write) -> None:
        rank, op, dst, numbers = write
        buffers, unread = self.values[rank], self.unread[rank]
        over = [buffers[buffer] for buffer in _BUFFERS if self.place(buffer) == self.place(dst.buffer)]
        for segment, number in zip(dst.segments, numbers, strict=True):
            if buffers[dst.buffer].get(segment) == number:
                raise self.wrong(rank, op, f"{dst.buffer}[{segment}] holds that already")
            if (dst.buffer, segment) in unread:
                raise self.wrong(rank, op, f"nobody has read what was in {dst.buffer}[{segment}]")
            for held in over:
                if held.get(segment, number) != number:
                    held[segment] = _OVERWRITTEN
            buffers[dst.buffer][segment] = number
            unread[dst.buffer, segment] = self.round, op

    # The end.

    def conclude(self) -> dict[int, Expression]:
        promised: dict[int, int] = {}
        for rank, owed in enumerate(self.owed):
            for segment in sorted(owed):
                number = self.check_result(rank, segment)
                if promised.setdefault(segment, number) != number:
                    raise self.wrong(rank, None, f"out[{segment}] is folded in another order than elsewhere")
            for (buffer, segment), (written, op) in self.unread[rank].items():
                if buffer != "out":
                    self.round = written
                    raise self.wrong(rank, op, f"nobody reads {buffer}[{segment}]")
        return {segment: self.terms.show(number) for segment, number in sorted(promised.items())}

    def check_result(self, rank: int, segment: int) -> int:
        s = self.schedule
        number = self.values[rank]["out"].get(segment, _OVERWRITTEN)
        if number == _OVERWRITTEN:
            raise self.wrong(rank, None, f"it ends without out[{segment}]")
        source = origin(s.collective, s.size, s.root, segment)
        if source is None and not self.terms.is_finished(number):
            raise self.wrong(rank, None, f"out[{segment}] is not finished")
        if source is not None and number != self.terms.leaf(source, segment):
            raise self.wrong(rank, None, f"out[{segment}] is not the input of rank {source}")
        return number

    def wrong(self, rank: int, op: Operation | None, reason: str) -> InvalidSchedule:
        return _invalid(self.schedule, rank, self.round, op, reason)


def _read(op: Operation) -> tuple[Slice, ...]:
    match op:
        case Send(piece):
            return (piece,)
        case Finish(src=src) | Copy(src=src):
            return (src,)
        case Fold(terms=terms):
            return tuple(term for term in terms if isinstance(term, Slice))
    return ()


def _written(op: Operation) -> Slice | None:
    match op:
        case Recv(dst) | Fold(dst) | Finish(dst) | Copy(dst):
            return dst
    return None


def _peers(op: Operation) -> tuple[int, ...]:
    match op:
        case Send(to=to):
            return to
        case Recv(source=source):
            return (source,)
        case Fold(terms=terms):
            return tuple(term.rank for term in terms if isinstance(term, From))
    return ()


def _is_identity(op: Operation) -> bool:
    """A copy that does nothing if the executor lays `out` over `in`, and so disturbs no reader of `in`."""
    return isinstance(op, Copy) and op.dst.buffer == "out" and op.src.buffer == "in"


def _ranks(bits: int) -> str:
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(ranks)
