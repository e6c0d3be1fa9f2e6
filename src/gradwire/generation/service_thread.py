"""The service thread: it serves a rank's control, point-to-point and lifeline links.

Any thread may post a message. If the link has no room, the service thread sends the rest later. The service thread also
reads all links, and runs the control protocol and the lifeline when they are due. The failure path decides what the end
of a link means.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable

from gradwire.generation.control_gather import GatherRounds
from gradwire.generation.failure_path import FailurePath
from gradwire.generation.mailbox import Mailbox, MessageSink
from gradwire.generation.messages import IncomingMessage
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

GOODBYE_SECONDS = 2.0  # longest time to send the goodbye
CUT_SECONDS = 0.05  # between checks for links that fault injection cuts
MAX_PASSES = 64  # reads of one link in a turn: a peer that sends without pause must not delay other links and timers
CONTROL_READ_AHEAD = 4096  # small, because there is one reader for each peer, and control messages are small and few


class ServiceThread:
    """The links that the service thread of this rank serves, and the objects that handle their messages."""

    def __init__(
        self, identity: Identity, transport: Transport, rounds: GatherRounds, cut_off: Callable[[], Iterable[int]]
    ) -> None:
        """`cut_off` returns the world ranks whose links fault injection cuts."""
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
        self._outboxes: dict[tuple[int, int], Outbox] = {}  # by world rank and channel
        self._readers: list[FrameReader] = []
        self._message_links: dict[int, threading.Lock] = {}
        self._unread: set[int] = set()  # world ranks that do not read their messages
        self._connected = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="gradwire-service", daemon=True)

    def start(self) -> None:
        """Start the thread, and accept the control and message links that other ranks dial."""
        self._transport.adopt(MESSAGE_CHANNEL, self._adopt_message_link)
        self._transport.adopt(CONTROL_CHANNEL, self.add_control_link)
        self._thread.start()

    def close(self) -> None:
        """Send a goodbye to all ranks, and end the thread when it is sent."""
        if self.serving:
            self.control.goodbye()
            self._ending = True
            self._bell.ring()
            if self._thread is not threading.current_thread():
                self._thread.join(GOODBYE_SECONDS + 1)

    def wake(self) -> None:
        """Wake the service thread, because something waits to be sent or decided."""
        self._bell.ring()

    def _broke(self) -> None:
        self.failure.halt()

    @property
    def serving(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    # -- links --------------------------------------------------------------------------------------------------------

    def add_control_link(self, link: Link) -> None:
        """Serve the control link with a rank. Either of the two ranks may have dialled it."""
        if (link.peer, CONTROL_CHANNEL) in self._outboxes:  # lower ranks must not dial a second one
            link.close()
            return
        reader = FrameReader(link, self._control_sink, threading.Lock(), CONTROL_READ_AHEAD)
        self._serve_link(link, CONTROL_CHANNEL, reader)
        self.control.linked(link.peer)
        with self._connected:
            self._connected.notify_all()

    def outbox(self, peer: int, channel: int) -> Outbox | None:
        """Return the outbox of the link to a world rank on a channel, or None."""
        return self._outboxes.get((peer, channel))

    def unconnected(self, peers: Iterable[int]) -> list[int]:
        """Return those of these world ranks that have no control link with this rank."""
        return [peer for peer in peers if (peer, CONTROL_CHANNEL) not in self._outboxes]

    def await_connected(self, peers: Iterable[int], seconds: float) -> None:
        """Wait until there are control links with all these world ranks, or the time is over."""
        with self._connected:
            self._connected.wait_for(lambda: not self.unconnected(peers), seconds)

    def watch_processes(self, shared: SharedMemory) -> None:
        """Watch the processes of the ranks that share memory with this one. Each one is read like a link."""
        watched = [FrameReader(PidfdLink(peer, shared), self._control_sink, self._lock, 1) for peer in shared.pidfds]
        with self._lock:
            self._readers = [*self._readers, *watched]
        self._bell.ring()

    def message_outbox(self, peer: int, dial: Callable[[], Link]) -> Outbox:
        """Return the outbox for point-to-point messages to a world rank. The first call dials its link."""
        with self._lock:
            dialling = self._message_links.setdefault(peer, threading.Lock())
        with dialling:
            outbox = self.outbox(peer, MESSAGE_CHANNEL)
            if outbox is None:
                outbox = self._serve_messages(dial(), MESSAGE_CHANNEL)
            return outbox

    def _adopt_message_link(self, link: Link) -> None:
        self._serve_messages(link, -MESSAGE_CHANNEL)  # the peer sends messages on it; this rank sends only acceptances

    def _serve_messages(self, link: Link, channel: int) -> Outbox:
        return self._serve_link(link, channel, FrameReader(link, self._mail_sink, self.mailbox.changed))

    def _serve_link(self, link: Link, channel: int, reader: FrameReader) -> Outbox:
        """Let the service thread read a link, and write the messages posted to this peer and channel."""
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
        """Whether a world rank has left, and all of its messages have been read."""
        if self._transport.gone(peer):
            return True
        left = self.control.left_at(peer)
        if left is None or time.monotonic() - left < DRAIN_SECONDS:
            return False
        return not any(reader.link.channel == MESSAGE_CHANNEL and reader.link.peer == peer for reader in self._readers)

    # -- messages -----------------------------------------------------------------------------------------------------

    def post_control(self, peer: int, payload: bytes) -> None:
        """Send a control message to a world rank, after earlier messages to it."""
        self._post(peer, CONTROL_CHANNEL, self._identity.frame(Kind.CONTROL, payload))

    def _accept_offer(self, world: int, message: IncomingMessage) -> None:
        self._post(world, -MESSAGE_CHANNEL, self._identity.frame(Kind.ACCEPT, sequence=message.identity))

    def _post(self, peer: int, channel: int, message: bytes) -> None:
        outbox = self.outbox(peer, channel)
        if outbox is not None and outbox.full:  # a peer that sends requests but reads no answers must not fill memory
            # The service thread reports the loss. This thread may hold the mailbox's lock, and `Control` acquires that
            # lock while it holds its own: reporting here could deadlock.
            self._unread.add(peer)
            self._bell.ring()
        elif outbox is not None:
            with contextlib.suppress(LinkClosed, OSError):  # the reader of the link notices too, and handles it
                if outbox.post(message):
                    self._bell.ring()

    def redirect(self, world: int, old: memoryview, new: memoryview) -> None:
        """Make a payload that is arriving from a world rank in `old` continue in `new`. Holds the mailbox's lock."""
        for reader in self._readers:
            if reader.link.peer == world:
                reader.redirect(old, new)

    # -- the service thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # Without this thread no loss would be noticed: break the generation instead of hanging later.
            log.exception("the service thread of rank %d failed", self._identity.rank)
            reason = f"its service thread failed: {type(error).__name__}: {error}"[:1000]
            self.control.report(Finding("aborted", reason, self._identity.rank), time.monotonic())

    def _serve(self) -> None:
        give_up_at: float | None = None
        cut_at = 0.0
        while True:
            now = time.monotonic()
            while self._unread:
                self.control.lost(self._unread.pop(), now, "does not read its messages")
            pause = min(self.control.tick(now), self.lifeline.tick(now))
            if now >= cut_at:
                self._cut_links()
                cut_at = now + CUT_SECONDS
            if self._ending:
                give_up_at = give_up_at or now + GOODBYE_SECONDS
                lost = self.control.unreachable_peers  # their goodbyes cannot be delivered
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
        """Whether a link may be read now. A peer with too many unmatched messages has to wait.

        Acceptances must not wait: they arrive on message links that this rank dialled.
        """
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
        except Exception as error:  # any exception that malformed bytes can cause in a parser
            log.warning("rank %d sent invalid data (%r): its link is closed", reader.link.peer, error)
            # Report it before the link is closed: otherwise the peer would take this rank for the lost one.
            self.control.lost(reader.link.peer, time.monotonic(), "sent invalid data")
            self._end_of_link(reader.link)
