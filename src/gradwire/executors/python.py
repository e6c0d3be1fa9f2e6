"""Implements the reference executor, which runs plans over any transport in readable Python.

Within a wave all messages progress independently of each other, so ranks cannot deadlock, whatever the sizes of their
messages. Links send from and receive into the user's memory directly; only received terms of a fold are staged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradwire.arrays import Array, raw
from gradwire.executors import numerics
from gradwire.executors.plan import IN, Folding, Incoming, Moving, Pieces, Plan, Term, Wave
from gradwire.transports.base import Link, LinkClosed
from gradwire.wire import HEADER_BYTES, MAGIC, Kind, pack_collective

SPIN_SECONDS = 100e-6  # how long a wait polls before it sleeps: about as long as two wake-ups of a thread

_COLLECTIVE = int(Kind.COLLECTIVE)
_NOTHING = np.empty(0, np.uint8)
_NO_CONTEXT = contextlib.nullcontext()


class WaitStrategy(Protocol):
    """How an executor waits while it cannot progress, and the errors that it raises."""

    def wait(self, reads: Iterable[Link], writes: Iterable[Link]) -> None:
        """Return when a link may be ready. Raise if the group broke or the deadline passed."""

    def poll(self) -> float:
        """Check what `wait` checks, without waiting; returns the seconds after which to check again."""

    def lost(self, peer: int) -> BaseException:
        """Return the error to raise if the link to a world rank is closed."""

    def mismatch(self, peer: int, header: bytes) -> BaseException:
        """Return the error to raise if a world rank sent a header other than the expected one."""


class Idle(NamedTuple):
    """No progress is possible until one of these links can be read or written.

    `passes` counts the passes over all links since the last progress.
    """

    reads: Collection[Link]
    writes: Collection[Link]
    passes: int


class CallHeader:
    """The header fields that all messages of one call share: the group, and the call's number and fingerprint."""

    __slots__ = ("fingerprint", "generation", "group", "job", "rank", "sequence")

    def __init__(self, job: int, generation: int, group: int, rank: int) -> None:
        self.job = job
        self.generation = generation
        self.group = group
        self.rank = rank
        self.sequence = 0
        self.fingerprint = 0

    def header(self, source: int, tile: int, number: int, nbytes: int) -> bytes:
        return pack_collective(
            MAGIC,
            _COLLECTIVE,
            self.job,
            self.generation,
            source,
            self.group,
            self.sequence,
            self.fingerprint,
            tile,
            number,
            nbytes,
        )


class _Arrival:
    """A message that is being received. `views` are the parts of it that are still missing."""

    __slots__ = ("expected", "got", "head", "index", "nbytes", "views")

    def __init__(self, index: int, expected: bytes, head: memoryview, views: list[memoryview], nbytes: int) -> None:
        self.index = index
        self.expected = expected
        self.head = head
        self.views = views
        self.nbytes = nbytes
        self.got = 0


class PythonExecutor:
    """Runs one plan at a time over the links of one group."""

    def __init__(self, link: Callable[[int], Link]) -> None:
        self._link = link
        self.sent = 0  # bytes sent to peers
        self._staging = memoryview(bytearray(0))
        self._scratch = _NOTHING

    def run(
        self,
        plan: Plan,
        x: Array,
        out: Array,
        call: CallHeader,
        wait_strategy: Callable[[], WaitStrategy],
        spin_seconds: float,
    ) -> None:
        """Run the plan: read x and write the result to out, which may be x.

        A wait polls for at most `spin_seconds` before it sleeps.
        """
        waits, spin, spin_until = wait_strategy(), min(SPIN_SECONDS, spin_seconds), 0.0
        with numerics.quiet() if plan.reduces else _NO_CONTEXT:
            for idle in self.steps(plan, x, out, call, waits):
                now = time.monotonic()
                if idle.passes == 1:
                    spin_until = now + spin
                if now >= spin_until:
                    waits.wait(idle.reads, idle.writes)

    def steps(self, plan: Plan, x: Array, out: Array, call: CallHeader, waits: WaitStrategy) -> Iterator[Idle]:
        """Run the plan for a caller that waits in its own way: yield whenever no progress is possible."""
        run = _Run(self, plan, x, out, call, waits)
        for wave in plan.waves():
            yield from run.wave(wave)

    def staging(self, nbytes: int) -> memoryview:
        if len(self._staging) < nbytes:
            self._staging = memoryview(bytearray(nbytes))
        return self._staging

    def scratch(self, count: int, dtype: np.dtype[Any]) -> Array:
        if self._scratch.nbytes < count * dtype.itemsize:
            self._scratch = np.empty(count * dtype.itemsize, np.uint8)
        return self._scratch[: count * dtype.itemsize].view(dtype)


class _Run:
    """One execution of a plan."""

    def __init__(
        self, executor: PythonExecutor, plan: Plan, x: Array, out: Array, call: CallHeader, waits: WaitStrategy
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._call = call
        self._waits = waits
        scratch = _NOTHING
        if plan.scratch_count:
            scratch_type = plan.dtype.accumulator if plan.reduces else plan.dtype.storage
            scratch = executor.scratch(plan.scratch_count, scratch_type)
        self._memories = (x, out, scratch)
        self._bytes = tuple(raw(memory) for memory in self._memories)
        self._combine = numerics.combiner(plan.op, plan.dtype.accumulator) if plan.op else None

    def wave(self, wave: Wave) -> Iterator[Idle]:
        for move in wave.moves:
            self._move(move)
        if not wave.receives and not wave.sends:
            for fold in wave.folds:
                self._fold(fold, wave, memoryview(b""))
            return
        staging = self._executor.staging(wave.staging)
        sending = self._messages_out(wave)
        receiving = self._messages_in(wave, staging)
        yield from self._exchange(wave, staging, sending, receiving)

    def _messages_out(self, wave: Wave) -> dict[Link, list[memoryview | bytes]]:
        sending: dict[Link, list[memoryview | bytes]] = {}
        rank, link, header = self._call.rank, self._executor._link, self._call.header
        for peers, pieces, nbytes, tile, number in wave.sends:
            head = header(rank, tile, number, nbytes)
            body = self._views(pieces)
            for peer in peers:
                sending.setdefault(link(peer), []).extend((head, *body))
        return sending

    def _messages_in(self, wave: Wave, staging: memoryview) -> dict[Link, list[_Arrival]]:
        receiving: dict[Link, list[_Arrival]] = {}
        header, link = self._call.header, self._executor._link
        for index, (peer, pieces, staged, nbytes, tile, number) in enumerate(wave.receives):
            if staged >= 0:
                views = [staging[staged : staged + HEADER_BYTES + nbytes]]
                head = views[0][:HEADER_BYTES]
            else:
                head = memoryview(bytearray(HEADER_BYTES))
                views = [head, *self._views(pieces)]
            arrival = _Arrival(index, header(peer, tile, number, nbytes), head, views, HEADER_BYTES + nbytes)
            receiving.setdefault(link(peer), []).append(arrival)
        return receiving

    def _views(self, pieces: Pieces) -> list[memoryview]:
        views = []
        for memory, start, stop in pieces:
            item = self._memories[memory].itemsize
            views.append(self._bytes[memory][start * item : stop * item])
        return views

    def _exchange(
        self,
        wave: Wave,
        staging: memoryview,
        sending: dict[Link, list[memoryview | bytes]],
        receiving: dict[Link, list[_Arrival]],
    ) -> Iterator[Idle]:
        arrived: set[int] = set()
        folds = list(wave.folds)
        passes = 0
        while sending or receiving:
            progress = 0
            for link in list(sending):
                progress += self._push(link, sending)
            for link in list(receiving):
                progress += self._pull(link, receiving, arrived)
            if folds and progress and not (self._plan.folds_last and sending):
                folds = [fold for fold in folds if not self._fold_if_ready(fold, arrived, wave, staging)]
            if progress:
                passes = 0
            elif sending or receiving:
                passes += 1
                yield Idle(receiving.keys(), sending.keys(), passes)
        for fold in folds:
            self._fold(fold, wave, staging)

    def _push(self, link: Link, sending: dict[Link, list[memoryview | bytes]]) -> int:
        views = sending[link]
        try:
            sent = link.send(views)
        except LinkClosed:
            raise self._waits.lost(link.peer) from None
        if sent:
            self._executor.sent += sent
            sending[link] = views = after(views, sent)
            if not views:
                del sending[link]
        return sent

    def _pull(self, link: Link, receiving: dict[Link, list[_Arrival]], arrived: set[int]) -> int:
        arrivals = receiving[link]
        total = 0
        while arrivals:
            arrival = arrivals[0]
            try:
                got = link.receive(arrival.views)
            except LinkClosed:
                raise self._waits.lost(link.peer) from None
            if not got:
                break
            total += got
            before, arrival.got = arrival.got, arrival.got + got
            if before < HEADER_BYTES <= arrival.got and arrival.head != arrival.expected:
                raise self._waits.mismatch(link.peer, bytes(arrival.head))
            if arrival.got < arrival.nbytes:
                arrival.views = after(arrival.views, got)
                break
            arrived.add(arrival.index)
            arrivals.pop(0)
        if not arrivals:
            del receiving[link]
        return total

    def _fold_if_ready(self, fold: Folding, arrived: set[int], wave: Wave, staging: memoryview) -> bool:
        if not arrived.issuperset(fold.waits_for):
            return False
        self._fold(fold, wave, staging)
        return True

    def _fold(self, fold: Folding, wave: Wave, staging: memoryview) -> None:
        terms = [self._term(term, wave, staging) for term in fold.terms]
        for dst, *parts in aligned([self._arrays(fold.dst), *terms]):
            self._fold_arrays(dst, parts)

    def _fold_arrays(self, dst: Array, terms: list[Array]) -> None:
        """Fold from left to right. The running value must not be in dst while a later term has dst's memory."""
        accumulator, combine = self._plan.dtype.accumulator, self._combine
        assert combine is not None
        value = _widened(terms[0], accumulator)
        last = len(terms) - 1
        for position in range(1, last + 1):
            target = dst
            if position < last and any(numerics.same_memory(dst, later) for later in terms[position + 1 :]):
                target = value if self._may_overwrite(value) else np.empty_like(dst)
            combine(value, _widened(terms[position], accumulator), target)
            value = target
        if value is not dst and not numerics.same_memory(value, dst):
            np.copyto(dst, value)

    def _may_overwrite(self, value: Array) -> bool:
        """Return whether a value may be changed: a staged term may be, the user's input must not be."""
        return not np.may_share_memory(value, self._memories[IN]) and value.flags.writeable

    def _term(self, term: Term, wave: Wave, staging: memoryview) -> list[Array]:
        if term.message < 0:
            return self._arrays(term.pieces)
        message: Incoming = wave.receives[term.message]
        kind = self._plan.dtype.accumulator if term.partial else self._plan.dtype.storage
        begin = message.staged + HEADER_BYTES
        return [np.frombuffer(staging[begin : begin + message.nbytes], np.uint8).view(kind)]

    def _arrays(self, pieces: Pieces) -> list[Array]:
        return [self._memories[memory][start:stop] for memory, start, stop in pieces]

    def _move(self, move: Moving) -> None:
        finishes, divisor = move.finishes, self._plan.divisor
        for dst, src in aligned([self._arrays(move.dst), self._arrays(move.src)]):
            if finishes:
                numerics.finish(dst, src, divisor)
            elif not numerics.same_memory(dst, src):
                np.copyto(dst, src)


def _widened(array: Array, accumulator: np.dtype[Any]) -> Array:
    return array if array.dtype == accumulator else array.astype(accumulator)


def after(views: list[Any], nbytes: int) -> list[Any]:
    """Return the views without their first nbytes."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            rest = [memoryview(view)[nbytes:] if nbytes else view]
            rest.extend(views[index + 1 :])
            return rest
        nbytes -= len(view)
    return []


def aligned(sides: list[list[Array]]) -> Iterable[list[Array]]:
    """Split lists of arrays of equal total length at each other's bounds; yield rows of arrays of equal length."""
    if all(len(side) == 1 for side in sides):
        yield [side[0] for side in sides]
        return
    queues = [list(reversed(side)) for side in sides]
    while queues[0]:
        length = min(len(queue[-1]) for queue in queues)
        row = []
        for queue in queues:
            head = queue.pop()
            row.append(head[:length])
            if length < len(head):
                queue.append(head[length:])
        yield row
