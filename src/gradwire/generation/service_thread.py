"""The links that one thread serves for everybody: control and point-to-point messages, and those of the lifeline.

Any thread may post a message; what finds no room at once is flushed by the service thread, which also reads all links
and gives control and lifeline their turns. What the end of a link means is decided by the failure path.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable

from gradwire.generation.control_gather import GatherRounds
from gradwire.generation.failure_path import FailurePath
from gradwire.generation.mailbox import IncomingMessage, Mailbox, MessageSink
from gradwire.generation.waiting import DRAIN_SECONDS
from gradwire.identity import Identity
from gradwire.liveness.control import Control, ControlSink
from gradwire.liveness.heartbeat_messages import HeartbeatSink
from gradwire.liveness.lifeline import Lifeline
from gradwire.liveness.verdict import Finding
from gradwire.transports.base import CONTROL_CHANNEL, MESSAGE_CHANNEL, Link, LinkClosed, Transport
from gradwire.transports.frames import FrameReader, Outbox, Reader
from gradwire.transports.shm.shared_memory import PidfdLink, SharedMemory
from gradwire.wire import Kind

log = logging.getLogger("gradwire")

GOODBYE_SECONDS = 2.0
CUT_SECONDS = 0.05  # between two looks whether this rank is to be cut off from others
MAX_PASSES = 64  # over one link in a turn: a peer that sends without end must not hold up the others and the clock
CONTROL_READ_AHEAD = 4096  # control messages are small and few, but there is a reader for each peer


class ServiceThread:
    """This rank's served links, and whom their messages go to."""

    def __init__(
        self, identity: Identity, transport: Transport, rounds: GatherRounds, cut_off: Callable[[], Iterable[int]]
    ) -> None:
        """`cut_off` are the world ranks with which links are to end on purpose."""
        self._identity = identity
        self._transport = transport
        self._cut_off = cut_off
        self.control = Control(
            identity.rank, identity.names, identity.number, self.post_control, self._broke, rounds.receive
        )
        self._control_sink = ControlSink(self.control, identity.check_header)
        host = identity.topology.host_of(identity.rank)
        remote = [peer for peer in range(identity.size) if identity.topology.host_of(peer) != host]
        beats = HeartbeatSink(identity.check_header)
        self.lifeline = Lifeline(self.control, identity.frame(Kind.BEAT), beats, self._pump, remote)
        self.mailbox = Mailbox(self._accept_offer, self.wake)
        wake_waiters = (rounds.wake, self.mailbox.wake_waiters)
        self.failure = FailurePath(identity, transport, self.control, self.lifeline.alive, self.wake, wake_waiters)
        self._mail_sink = MessageSink(self.mailbox, identity.check_header)
        self._bell = transport.bell()
        self._lock = threading.Lock()
        self._outboxes: dict[tuple[int, int], Outbox] = {}  # by world rank and channel: links this rank writes to
        self._readers: list[FrameReader] = []
        self._message_links: dict[int, threading.Lock] = {}
        self._unread: set[int] = set()  # world ranks that take no messages off their links
        self._connected = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="gradwire-service", daemon=True)

    def start(self) -> None:
        """Begin to serve, and take the links that others dial."""
        self._transport.adopt(MESSAGE_CHANNEL, self._adopt_message_link)
        self._transport.adopt(CONTROL_CHANNEL, self.add_control_link)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye, and end when it is sent."""
        if self.serving:
            self.control.goodbye()
            self._ending = True
            self._bell.ring()
            if self._thread is not threading.current_thread():
                self._thread.join(GOODBYE_SECONDS + 1)

    def wake(self) -> None:
        """Let the service thread look around: something waits to be sent or decided."""
        self._bell.ring()

    def _broke(self) -> None:
        self.failure.halt()

    @property
    def serving(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # -- links --------------------------------------------------------------------------------------------------------

    def add_control_link(self, link: Link) -> None:
        """Serve the control link with a rank: one that this rank has dialled, or the other."""
        if (link.peer, CONTROL_CHANNEL) in self._outboxes:  # a rank below has no business to dial one
            link.close()
            return
        reader = FrameReader(link, self._control_sink, threading.Lock(), CONTROL_READ_AHEAD)
        self._serve_link(link, CONTROL_CHANNEL, reader)
        self.control.linked(link.peer)
        with self._connected:
            self._connected.notify_all()

    def outbox(self, peer: int, channel: int) -> Outbox | None:
        """Where messages to a world rank wait for their turn, if there is a link that this rank writes to."""
        return self._outboxes.get((peer, channel))

    def unconnected(self, peers: Iterable[int]) -> list[int]:
        """Those of these world ranks with which there is no control link."""
        return [peer for peer in peers if (peer, CONTROL_CHANNEL) not in self._outboxes]

    def await_connected(self, peers: Iterable[int], seconds: float) -> None:
        """Return when there are control links with all these world ranks, or the time is over."""
        with self._connected:
            self._connected.wait_for(lambda: not self.unconnected(peers), seconds)

    def watch_processes(self, shared: SharedMemory) -> None:
        """Watch the processes of those this rank shares memory with, as links on which nothing comes but the end."""
        lives = [FrameReader(PidfdLink(peer, shared), self._control_sink, self._lock, 1) for peer in shared.pidfds]
        with self._lock:
            self._readers = [*self._readers, *lives]
        self._bell.ring()

    def message_outbox(self, peer: int, dial: Callable[[], Link]) -> Outbox:
        """The way for point-to-point messages to a world rank; its link is dialled when first needed."""
        with self._lock:
            dialling = self._message_links.setdefault(peer, threading.Lock())
        with dialling:
            outbox = self.outbox(peer, MESSAGE_CHANNEL)
            if outbox is None:
                outbox = self._serve_messages(dial(), MESSAGE_CHANNEL)
            return outbox

    def _adopt_message_link(self, link: Link) -> None:
        self._serve_messages(link, -MESSAGE_CHANNEL)  # the peer dialled it to send on; this rank only answers on it

    def _serve_messages(self, link: Link, channel: int) -> Outbox:
        return self._serve_link(link, channel, FrameReader(link, self._mail_sink, self.mailbox.changed))

    def _serve_link(self, link: Link, channel: int, reader: FrameReader) -> Outbox:
        """Let the service thread read a link, and write what is posted to it under this peer and channel."""
        outbox = Outbox(link)
        with self._lock:
            self._outboxes[link.peer, channel] = outbox
            self._readers = [*self._readers, reader]
        self._bell.ring()
        return outbox

    def _end_of_link(self, link: Link) -> None:
        with self._lock:
            self._readers = [reader for reader in self._readers if reader.link is not link]
            for key, outbox in list(self._outboxes.items()):
                if outbox.link is link:
                    del self._outboxes[key]
        self.lifeline.link_ended(link)
        link.close()
        self.failure.link_ended(link)
        self.mailbox.wake_waiters()

    def departed(self, peer: int) -> bool:
        """Whether a world rank has left and nothing more can come from it."""
        if self._transport.gone(peer):
            return True
        left = self.control.left_at(peer)
        if left is None or time.monotonic() - left < DRAIN_SECONDS:
            return False
        return not any(reader.link.channel == MESSAGE_CHANNEL and reader.link.peer == peer for reader in self._readers)

    # -- messages -----------------------------------------------------------------------------------------------------

    def post_control(self, peer: int, payload: bytes) -> None:
        """Send a control message to a world rank, in its turn."""
        self._post(peer, CONTROL_CHANNEL, self._identity.frame(Kind.CONTROL, payload))

    def _accept_offer(self, world: int, message: IncomingMessage) -> None:
        self._post(world, -MESSAGE_CHANNEL, self._identity.frame(Kind.ACCEPT, sequence=message.identity))

    def _post(self, peer: int, channel: int, message: bytes) -> None:
        outbox = self.outbox(peer, channel)
        if outbox is not None and outbox.full:  # who asks without end and hears no answer must not fill our memory
            # The service thread reports it: a thread that posts may hold the mailbox's lock, and the control takes it
            # while it holds its own.
            self._unread.add(peer)
            self._bell.ring()
        elif outbox is not None:
            with contextlib.suppress(LinkClosed, OSError):  # the reading side learns of it, and decides
                if outbox.post(message):
                    self._bell.ring()

    def redirect(self, world: int, old: memoryview, new: memoryview) -> None:
        """Let what is arriving from a world rank in `old` go on arriving in `new`; under the mailbox's lock."""
        for reader in self._readers:
            if reader.link.peer == world:
                reader.redirect(old, new)

    # -- the service thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # Without this thread no loss would be noticed any more: better to break than to hang.
            log.exception("the service thread of rank %d failed", self._identity.rank)
            reason = f"its service thread failed: {type(error).__name__}: {error}"[:1000]
            self.control.report(Finding("aborted", reason, self._identity.rank), time.monotonic())

    def _serve(self) -> None:
        give_up_at: float | None = None
        cut_at = 0.0
        while True:
            now = time.monotonic()
            while self._unread:
                self.control.lost(self._unread.pop(), now, "takes no messages off its links")
            pause = min(self.control.tick(now), self.lifeline.tick(now))
            if now >= cut_at:
                self._cut_links()
                cut_at = now + CUT_SECONDS
            if self._ending:
                give_up_at = give_up_at or now + GOODBYE_SECONDS
                lost = self.control.unreachable_peers  # and would not hear a goodbye
                if now >= give_up_at or not any(box.waiting for box in self._served() if box.link.peer not in lost):
                    return
                pause = min(pause, give_up_at - now)
            readers = [reader for reader in self._readers if self._may_read(reader)]
            writers = [outbox.link for outbox in self._served() if outbox.waiting]
            ready = self._transport.wait([reader.link for reader in readers], writers, self._bell, pause)
            self._bell.silence()
            for outbox in self._served():
                if outbox.waiting:
                    self._flush(outbox)
            for reader in readers:
                if reader.link in ready:
                    self._pump(reader)

    def _cut_links(self) -> None:
        for peer in self._cut_off():
            for outbox in self._served():
                if outbox.link.peer == peer:
                    self._end_of_link(outbox.link)

    def _served(self) -> list[Outbox]:
        with self._lock:
            return list(self._outboxes.values())

    def _may_read(self, reader: Reader) -> bool:
        """Whoever sends more than is asked for has to wait; but not with answers, which come on links dialled here."""
        link = reader.link
        dialled = self.outbox(link.peer, MESSAGE_CHANNEL)
        answers = dialled is not None and dialled.link is link
        return link.channel != MESSAGE_CHANNEL or answers or not self.mailbox.overfull(link.peer)

    def _flush(self, outbox: Outbox) -> None:
        try:
            done = outbox.flush()
        except (LinkClosed, OSError):
            self._end_of_link(outbox.link)
            return
        if done:
            self.mailbox.wake_waiters()

    def _pump(self, reader: Reader) -> None:
        try:
            for _ in range(MAX_PASSES):
                if not (reader.pump() and reader.more and self._may_read(reader)):
                    break
        except LinkClosed:
            self._end_of_link(reader.link)
        except OSError as error:
            log.warning("the link to rank %d failed: %s", reader.link.peer, error)
            self._end_of_link(reader.link)
        except Exception as error:  # whatever bytes can make a parser do
            log.warning("rank %d sent nonsense (%r): its link is closed", reader.link.peer, error)
            # The peer hears it before its link ends, so that it does not take this rank for the lost one.
            self.control.lost(reader.link.peer, time.monotonic(), "sent nonsense")
            self._end_of_link(reader.link)
