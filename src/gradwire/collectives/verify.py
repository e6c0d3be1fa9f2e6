"""Proves that a schedule is correct, for all counts, dtypes and links.

The verifier executes the programs of all ranks symbolically: instead of a value, a buffer holds the ordered expression
for this value. It proves that:

- every message is sent and received in the same round, with the same segments and type, and no rank sends to itself;
- no operation reads a segment that was never written, or that was overwritten because buffers share memory;
- no operation of a round reads or writes a segment that another operation of that round writes;
- no input is folded twice, only complete results are finished, and no finished result is folded;
- every rank ends with the result of the collective: the right input, or an expression that is equal on all ranks;
- there is no useless work: no value is written that is never read or that the buffer already holds;
- the claims of the schedule (`one_shot`, `mirrored`) hold, by the rules in `claims`.
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
"""Schedules of up to this many ranks are proved completely, in 10 ms or less. The work grows with ranks squared."""

_BUFFERS: tuple[Buffer, ...] = ("in", "out", "acc")
_OVERWRITTEN = -1


class InvalidSchedule(GradwireError, ValueError):
    """A schedule is wrong: `rank`, `round_number` and `operation` say where, `reason` says why."""

    def __init__(self, message: str = "", *, round_number: int | None = None, reason: str = "", **facts: Any) -> None:
        super().__init__(message, **facts)
        self.round_number = round_number
        self.reason = reason


def verify(schedule: Schedule) -> dict[int, Expression]:
    """Return the expression of each segment of the result; raise InvalidSchedule if the schedule is wrong."""
    result = _Run(schedule).prove()
    _prove_claims(schedule)
    return result


_proved: WeakSet[Schedule] = WeakSet()


def prove_once(schedule: Schedule) -> None:
    """Prove a schedule before its first use in this process. Of a large schedule, prove only the claims.

    The memory safety of the native executor depends on the claims.
    """
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
    """A message, as its sender or its receiver describes it."""

    op: Operation
    slice: Slice
    partial: bool


class _Write(NamedTuple):
    rank: int
    op: Operation
    dst: Slice
    numbers: list[int]


class _Run:
    """The symbolic execution of all ranks, round by round. Operations read the values from before their round."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.reducing = schedule.collective in REDUCING
        self.terms = Expressions()
        self.all_ranks = (1 << schedule.size) - 1
        self.round = 0
        self.outputs: list[frozenset[int]] = []  # by rank, the segments of its result
        self.values: list[dict[Buffer, dict[int, int]]] = []
        # By rank, the writes that were not read yet: (buffer, segment) -> (round, operation).
        self.unread: list[dict[tuple[Buffer, int], tuple[int, Operation]]] = []
        for rank in range(schedule.size):
            inputs, outputs = placement(schedule.collective, schedule.size, schedule.segments, schedule.root, rank)
            self.outputs.append(frozenset(outputs))
            self.values.append({"in": {s: self.terms.leaf(rank, s) for s in inputs}, "out": {}, "acc": {}})
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
                self.check_operation(rank, op)
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

    # -- checks of a single operation ---------------------------------------------------------------------------------

    def check_operation(self, rank: int, op: Operation) -> None:
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
            raise self.wrong(rank, op, "it has no receivers or no terms")

    def check_written(self, rank: int, op: Operation, dst: Slice) -> None:
        for piece in _read(op):
            if piece.segments != dst.segments:
                raise self.wrong(rank, op, f"{piece} and {dst} are not the same segments")
        if dst.buffer == "in":
            raise self.wrong(rank, op, "it must not write inputs")
        if dst.buffer == "out" and not self.outputs[rank].issuperset(dst.segments):
            raise self.wrong(rank, op, f"rank {rank} has no output {dst}")
        match op:
            case Fold() | Finish() if not self.reducing:
                raise self.wrong(rank, op, f"{self.schedule.collective} does not reduce")
            case Fold() if dst.buffer != "acc":
                raise self.wrong(rank, op, "a fold must write acc")
            case Finish(src=src) if (dst.buffer, src.buffer) != ("out", "acc"):
                raise self.wrong(rank, op, "a finish must read acc and write out")
            case Copy(src=src) if self.partial(src) != self.partial(dst):
                raise self.wrong(rank, op, "a copy must not change the type")

    # -- checks of the operations of one rank in one round ------------------------------------------------------------

    def check_hazards(self, rank: int, ops: Round) -> None:
        writers: dict[tuple[Buffer, int], Operation] = {}
        for op in ops:
            if (dst := _written(op)) is None:
                continue
            for segment in dst.segments:
                location = self.memory(dst.buffer), segment
                if location in writers:
                    raise self.wrong(rank, op, f"{writers[location]} writes segment {segment} in the same round")
                writers[location] = op
        for op in ops:
            for piece in _read(op):
                for segment in piece.segments:
                    writer = writers.get((self.memory(piece.buffer), segment), op)
                    if writer is not op and not (piece.buffer == "in" and _is_identity(writer)):
                        raise self.wrong(rank, op, f"{writer} writes segment {segment} in the same round")

    def memory(self, buffer: Buffer) -> Buffer:
        """Return one name for all buffers that may share memory in an executor."""
        return "acc" if buffer == "acc" and self.schedule.separate_acc else "out"

    # -- messages -----------------------------------------------------------------------------------------------------

    def deliver(self, rounds: list[Round]) -> list[Iterator[list[int]]]:
        """Match all messages of a round; return, by receiver, the messages in the order in which it receives them."""
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
        """Return whether a slice has type A, and not type T."""
        return self.reducing and piece.buffer == "acc"

    # -- values -------------------------------------------------------------------------------------------------------

    def result(self, rank: int, op: Operation, arriving: Iterator[list[int]]) -> list[int]:
        """Return the expressions that an operation writes, by segment."""
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
        if missing := self.all_ranks & ~self.terms.ranks(number):
            raise self.wrong(rank, op, f"the input of {_ranks(missing)} is missing")
        return self.terms.finished(number)

    def write(self, write: _Write) -> None:
        rank, op, dst, numbers = write
        buffers, unread = self.values[rank], self.unread[rank]
        sharing = [buffers[buffer] for buffer in _BUFFERS if self.memory(buffer) == self.memory(dst.buffer)]
        for segment, number in zip(dst.segments, numbers, strict=True):
            if buffers[dst.buffer].get(segment) == number:
                raise self.wrong(rank, op, f"{dst.buffer}[{segment}] already holds this value")
            if (dst.buffer, segment) in unread:
                raise self.wrong(rank, op, f"the previous value of {dst.buffer}[{segment}] was never read")
            for held in sharing:
                if held.get(segment, number) != number:
                    held[segment] = _OVERWRITTEN
            buffers[dst.buffer][segment] = number
            unread[dst.buffer, segment] = self.round, op

    # -- results ------------------------------------------------------------------------------------------------------

    def conclude(self) -> dict[int, Expression]:
        results: dict[int, int] = {}
        for rank, outputs in enumerate(self.outputs):
            for segment in sorted(outputs):
                number = self.check_result(rank, segment)
                if results.setdefault(segment, number) != number:
                    raise self.wrong(rank, None, f"out[{segment}] is folded in another order than on other ranks")
            for (buffer, segment), (written, op) in self.unread[rank].items():
                if buffer != "out":
                    self.round = written
                    raise self.wrong(rank, op, f"{buffer}[{segment}] is never read")
        return {segment: self.terms.show(number) for segment, number in sorted(results.items())}

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
    """Return whether an operation is a copy from `in` to `out`.

    Such a copy does nothing if `in` and `out` share memory, so it does not disturb readers of `in`.
    """
    return isinstance(op, Copy) and op.dst.buffer == "out" and op.src.buffer == "in"


def _ranks(bits: int) -> str:
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(ranks)
