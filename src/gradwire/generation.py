"""One numbered membership at work: the links, the thread that serves them, and the one failure path.

A generation connects this rank with all others, listens to their control and point-to-point messages on one thread,
and knows whether it is sound. Groups belong to it; when it breaks they all do, on all ranks, with one error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from gradwire.errors import Closed, GradwireError, NoConnection
from gradwire.liveness.calls import CallLog
from gradwire.liveness.control import Control, Position, disagreement
from gradwire.liveness.verdict import Finding
from gradwire.messages import Mailbox
from gradwire.topology import Topology
from gradwire.transports.base import CONTROL_CHANNEL, MESSAGE_CHANNEL, Link, LinkClosed, Transport
from gradwire.transports.frames import FrameReader, Outbox
from gradwire.wire import MAX_CONTROL, Header, Kind, WireError, parse

log = logging.getLogger("gradwire")

SLOW_SECONDS = 5.0
VERDICT_SECONDS = 5.0  # a settled verdict takes half a second at most; this is for a starved machine
ANSWER_SECONDS = 0.3
GOODBYE_SECONDS = 2.0
LAST_WORDS_SECONDS = 0.2  # in which messages sent before a goodbye may still arrive


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this rank is, and among whom: what every message says."""

    job: int
    number: int
    rank: int
    names: tuple[str, ...]  # of all ranks, as errors show them
    topology: Topology

    @property
    def size(self) -> int:
        return len(self.names)


class Generation:
    """This rank's part in one membership."""

    def __init__(self, identity: Identity, transport: Transport) -> None:
        self.identity = identity
        self.transport = transport
        self.alarm = transport.bell()  # rings for good when the generation breaks or is closed
        self.closed = False
        self.inherited = False
        self.control = Control(identity.rank, identity.names, identity.number, self._post_control, self._broke)
        self.mailbox = Mailbox(self._accept_offer)
        self._bell = transport.bell()
        self._lock = threading.Lock()
        self._outboxes: dict[tuple[int, int], Outbox] = {}  # by world rank and channel: links this rank writes to
        self._readers: list[FrameReader] = []
        self._message_links: dict[int, threading.Lock] = {}
        self._ending = False
        self._said_goodbye = False
        self._thread = threading.Thread(target=self._serve, name="gradwire-service", daemon=True)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def dial(self, deadline: float) -> None:
        """Open the control links to the ranks below: of each pair the higher one dials, so that they never cross."""
        self.transport.adopt(MESSAGE_CHANNEL, self._adopt_message_link)
        for peer in range(self.identity.rank):
            self._add_control_link(self.transport.dial(peer, CONTROL_CHANNEL, deadline))

    def serve(self, deadline: float) -> None:
        """Wait for the ranks above to have dialled, and begin."""
        for peer in range(self.identity.rank + 1, self.identity.size):
            self._add_control_link(self.transport.accept(peer, CONTROL_CHANNEL, deadline))
        self._thread.start()

    def _add_control_link(self, link: Link) -> None:
        self._serve_link(link, CONTROL_CHANNEL, FrameReader(link, _ControlSink(self), threading.Lock()))

    def _serve_link(self, link: Link, channel: int, reader: FrameReader) -> Outbox:
        """Let the service thread read a link, and write what is posted to it under this peer and channel."""
        outbox = Outbox(link)
        with self._lock:
            self._outboxes[link.peer, channel] = outbox
            self._readers = [*self._readers, reader]
        self._bell.ring()
        return outbox

    def close(self, finding: Finding | None = None) -> None:
        """Say goodbye — or, with a finding, why not — and let go of everything; idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if finding is not None:
            self.control.report(finding, time.monotonic())
        if self._thread.is_alive():
            self.control.goodbye()
            self._said_goodbye = True
            self._ending = True
            self._bell.ring()
            if self._thread is not threading.current_thread():
                self._thread.join(GOODBYE_SECONDS + 1)
        self.alarm.ring()
        with self.mailbox.changed:
            self.mailbox.changed.notify_all()
        self.transport.close()

    def abandon(self) -> None:
        """In a forked child: this process is not the rank."""
        self.closed = self.inherited = True
        self.transport.abandon()

    # -- the service thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        give_up_at: float | None = None
        while True:
            now = time.monotonic()
            pause = self.control.tick(now)
            if self._ending:
                give_up_at = give_up_at or now + GOODBYE_SECONDS
                if now >= give_up_at or not self._unsent():
                    return
                pause = min(pause, give_up_at - now)
            readers = [reader for reader in list(self._readers) if self._may_read(reader)]
            writers = [outbox.link for outbox in list(self._outboxes.values()) if outbox.waiting]
            self.transport.wait([reader.link for reader in readers], writers, self._bell, pause)
            self._bell.silence()
            for outbox in list(self._outboxes.values()):
                if outbox.waiting:
                    self._flush(outbox)
            for reader in readers:
                self._pump(reader)

    def _may_read(self, reader: FrameReader) -> bool:
        return reader.link.channel == CONTROL_CHANNEL or not self.mailbox.overfull(reader.link.peer)

    def _unsent(self) -> bool:
        return any(outbox.waiting for outbox in list(self._outboxes.values()))

    def _flush(self, outbox: Outbox) -> None:
        try:
            done = outbox.flush()
        except (LinkClosed, OSError):
            self._end_of_link(outbox.link)
            return
        if done:
            with self.mailbox.changed:
                self.mailbox.changed.notify_all()

    def _pump(self, reader: FrameReader) -> None:
        try:
            while reader.pump():
                if not self._may_read(reader):
                    break
        except LinkClosed:
            self._end_of_link(reader.link)
        except (WireError, ValueError, KeyError, TypeError) as error:
            log.warning("rank %d sent nonsense (%s): its link is closed", reader.link.peer, error)
            reader.link.close()
            self._end_of_link(reader.link)
            self.control.lost(reader.link.peer, time.monotonic(), "sent nonsense")
        except OSError as error:
            log.warning("the link to rank %d failed: %s", reader.link.peer, error)
            self._end_of_link(reader.link)

    def _end_of_link(self, link: Link) -> None:
        with self._lock:
            self._readers = [reader for reader in self._readers if reader.link is not link]
            for key, outbox in list(self._outboxes.items()):
                if outbox.link is link:
                    del self._outboxes[key]
        # Only the control link says why it ends; the end of a message link may overtake a goodbye.
        if link.channel == CONTROL_CHANNEL and not self.closed:
            self.control.lost(link.peer, time.monotonic())
        with self.mailbox.changed:
            self.mailbox.changed.notify_all()

    def departed(self, peer: int) -> bool:
        """Whether a world rank has left and nothing more can come from it."""
        if self.transport.gone(peer):
            return True
        left = self.control.left_at(peer)
        if left is None or time.monotonic() - left < LAST_WORDS_SECONDS:
            return False
        return not any(reader.link.channel == MESSAGE_CHANNEL and reader.link.peer == peer for reader in self._readers)

    def _broke(self) -> None:
        self.alarm.ring()
        self._bell.ring()
        with self.mailbox.changed:
            self.mailbox.changed.notify_all()

    def wake(self) -> None:
        """Let the service thread look around: something waits to be sent or decided."""
        self._bell.ring()

    # -- sending on served links --------------------------------------------------------------------------------------

    def frame(self, kind: Kind, payload: bytes = b"", **fields: int) -> bytes:
        """A whole message of a served channel."""
        identity = self.identity
        known = {"source": identity.rank, "group": 0, "sequence": 0, "fingerprint": 0, "tile": 0, "round": 0}
        header = Header(
            kind=kind, job=identity.job, generation=identity.number, nbytes=len(payload), **(known | fields)
        )
        return header.pack() + payload

    def _post_control(self, peer: int, payload: bytes) -> None:
        self._post(peer, CONTROL_CHANNEL, self.frame(Kind.CONTROL, payload))

    def _post(self, peer: int, channel: int, message: bytes) -> None:
        outbox = self._outboxes.get((peer, channel))
        if outbox is not None:
            with contextlib.suppress(LinkClosed, OSError):  # the reading side learns of it, and decides
                if outbox.post(message):
                    self._bell.ring()

    def message_outbox(self, peer: int, deadline: float) -> Outbox:
        """The way for point-to-point messages to a world rank; its link is dialled when first needed."""
        with self._lock:
            dialling = self._message_links.setdefault(peer, threading.Lock())
        with dialling:
            outbox = self._outboxes.get((peer, MESSAGE_CHANNEL))
            if outbox is None:
                try:
                    link = self.transport.dial(peer, MESSAGE_CHANNEL, deadline)
                except NoConnection:
                    self.fail_if_broken("send")
                    raise
                reader = FrameReader(link, _MessageSink(self), self.mailbox.changed)
                outbox = self._serve_link(link, MESSAGE_CHANNEL, reader)
            return outbox

    def _adopt_message_link(self, link: Link) -> None:
        # The peer dialled it to send on; this rank only answers on it.
        self._serve_link(link, -MESSAGE_CHANNEL, FrameReader(link, _MessageSink(self), self.mailbox.changed))

    def _accept_offer(self, world: int, letter: object) -> None:
        identity = getattr(letter, "identity", 0)
        self._post(world, -MESSAGE_CHANNEL, self.frame(Kind.ACCEPT, sequence=identity))

    def redirect(self, world: int, old: memoryview, new: memoryview) -> None:
        for reader in self._readers:
            if reader.link.peer == world:
                reader.redirect(old, new)

    # -- the one failure path -----------------------------------------------------------------------------------------

    def check(self, operation: str | None = None) -> None:
        """Raise if this generation can no longer be used."""
        if self.closed:
            self._raise_closed()
        if not self.control.sound:
            raise self.error(operation)

    def fail_if_broken(self, operation: str) -> None:
        """As `check`, after giving the control channel a moment to say why a link ended."""
        if not self.closed:
            self.control.settle(ANSWER_SECONDS)
        self.check(operation)

    def _raise_closed(self) -> NoReturn:
        if self.inherited:
            raise Closed("this process was forked from a rank: the group belongs to the parent")
        raise Closed("the group is closed")

    def error(self, operation: str | None, during: str = "") -> GradwireError:
        """The error of a broken generation, once the verdict is in; also for the one who closed it meanwhile."""
        if not self.control.settle(VERDICT_SECONDS):
            return Closed("the group was closed while it broke", operation=operation)
        return self.control.error(operation, during)

    def lost(self, peer: int, operation: str, during: str) -> GradwireError:
        """A data link to a world rank ended. Its control link says why; if it stays silent, the rank is lost."""
        if self.closed:
            return Closed("the group was closed", operation=operation)
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.control.sound and not self.control.has_left(peer) and time.monotonic() < deadline:
            self.transport.wait((), (), self.alarm, 0.01)
        if self.control.sound:
            self.control.missed(peer, time.monotonic())
            self.control.lost(peer, time.monotonic())
        self._bell.ring()
        return self.error(operation, during)

    def interrupt(self, operation: str, error: BaseException) -> None:
        """The user's Ctrl-C, or an error of our own, left an operation half done: nobody can go on."""
        what = "interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        finding = Finding("aborted", f"{what} during {operation}"[:1000], self.identity.rank, operation=operation)
        self.control.report(finding, time.monotonic())


class Watch:
    """The patience of one operation of a group: waits, tells of long waits, and knows what to raise in the end."""

    def __init__(self, generation: Generation, calls: CallLog, operation: str, sequence: int, timeout: float) -> None:
        self._generation = generation
        self._calls = calls
        self.operation = operation
        self.sequence = sequence
        self._timeout = timeout
        self._began = 0.0
        self._slow_at = 0.0
        self._deadline = 0.0

    def begin(self) -> None:
        """Start counting; called when the operation first has to wait."""
        self._began = time.monotonic()
        self._slow_at = self._began + SLOW_SECONDS
        self._deadline = self._began + self._timeout

    def during(self) -> str:
        call = self._calls.call(self.sequence)
        site = f", {call.site}" if call else ""
        return f" during {self.operation} #{self.sequence}{site}"

    def wait(self, reads: Iterable[Link], writes: Iterable[Link]) -> None:
        generation = self._generation
        if not self._began:
            self.begin()
        now = time.monotonic()
        pause = min(self._deadline, self._slow_at, now + 0.25) - now
        generation.transport.wait(reads, writes, generation.alarm, max(0.0, pause))
        if self._calls.closed or generation.closed or not generation.control.sound:
            raise self.broken()
        now = time.monotonic()
        for link in {*reads, *writes}:
            if generation.transport.gone(link.peer):
                generation.control.lost(link.peer, now, "ended its thread")
                raise self.broken()
        if now >= self._deadline:
            raise self._timed_out()
        if now >= self._slow_at:
            self._tell_slow(now)

    def broken(self) -> GradwireError:
        if self._generation.closed or (self._calls.closed and self._generation.control.sound):
            return Closed("the group was closed", operation=self.operation)
        return self._generation.error(self.operation, self.during())

    def lost(self, peer: int) -> GradwireError:
        if self._calls.closed:
            return self.broken()
        return self._generation.lost(peer, self.operation, self.during())

    def mismatch(self, peer: int, header: bytes) -> GradwireError:
        sequence = self.sequence
        try:
            sequence = min(sequence, max(1, parse(header).sequence))
        except WireError as error:
            log.warning("rank %d sent nonsense: %s", peer, error)
        self._generation.control.report(disagreement(self._calls, sequence), time.monotonic())
        self._generation.wake()
        return self.broken()

    def late(self) -> list[tuple[int, Position | None]]:
        """Ranks that have not reached this call, as far as they answer; lowest first."""
        positions = self._generation.control.positions(self._calls, ANSWER_SECONDS)
        peers = [rank for rank in self._calls.members if rank != self._generation.identity.rank]
        silent = [(rank, None) for rank in peers if rank not in positions]
        behind = [(rank, place) for rank, place in positions.items() if place.sequence < self.sequence]
        return sorted([*silent, *behind], key=lambda entry: entry[0])

    def _tell_slow(self, now: float) -> None:
        waited = now - self._began
        self._slow_at = now + waited  # at 5, 10, 20 … seconds
        log.warning(
            "rank %d has waited %.0f s%s: %s",
            self._generation.identity.rank,
            waited,
            self.during(),
            describe_late(self.late()),
        )

    def _timed_out(self) -> GradwireError:
        late = self.late()
        culprit = late[0][0] if late else None
        reason = f"{self.operation} #{self.sequence} did not finish in {self._timeout:g} s: {describe_late(late)}"
        finding = Finding("timeout", reason[:4000], culprit, self._timeout, self.operation)
        self._generation.control.report(finding, time.monotonic())
        self._generation.wake()
        return self.broken()


def describe_late(late: Sequence[tuple[int, Position | None]]) -> str:
    """Who keeps the others waiting, in words."""
    if not late:
        return "all ranks have arrived, but their messages have not"
    parts = [
        f"rank {rank} has not arrived, its last call was {place.last}" if place else f"rank {rank} does not answer"
        for rank, place in late
    ]
    return "; ".join(parts)


class _ControlSink:
    """Control messages go to `Control.hear`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def begin(self, link: Link, header: Header) -> memoryview:
        if header.kind != Kind.CONTROL or header.nbytes > MAX_CONTROL:
            raise WireError(f"kind {header.kind}, {header.nbytes} bytes, on the control channel")
        return memoryview(bytearray(header.nbytes))

    def finish(self, link: Link, header: Header, payload: memoryview) -> None:
        self._generation.control.hear(link.peer, bytes(payload), time.monotonic())


class _MessageSink:
    """Point-to-point messages go to the mailbox."""

    def __init__(self, generation: Generation) -> None:
        self._mailbox = generation.mailbox

    def begin(self, link: Link, header: Header) -> memoryview:
        return self._mailbox.begin(link.peer, header)

    def finish(self, link: Link, header: Header, payload: memoryview) -> None:
        self._mailbox.finish(link.peer, header, payload)
