"""One numbered membership at work: the links, the thread that serves them, and the one failure path.

A generation connects this rank with all others, listens to their control and point-to-point messages on one thread,
and knows whether it is sound. Groups belong to it; when it breaks they all do, on all ranks, with one error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from gradwire.collectives import DEFAULTS
from gradwire.errors import Closed, CollectiveMismatch, GradwireError, NoConnection
from gradwire.identity import Identity
from gradwire.liveness.control import Control, ControlSink
from gradwire.liveness.lifeline import BeatSink, Lifeline, Nature
from gradwire.liveness.parley import Parley
from gradwire.liveness.verdict import Finding
from gradwire.liveness.watch import ANSWER_SECONDS
from gradwire.messages import Letter, Mailbox, MessageSink
from gradwire.transports.base import (
    CHECK_SECONDS,
    CONTROL_CHANNEL,
    LIFELINE_CHANNEL,
    MESSAGE_CHANNEL,
    Belonging,
    Link,
    LinkClosed,
    Transport,
)
from gradwire.transports.frames import FrameReader, Outbox
from gradwire.transports.shm import Life, OwnArena, SharedMemory
from gradwire.wire import Kind

log = logging.getLogger("gradwire")

VERDICT_SECONDS = 5.0  # a settled verdict takes half a second at most; this is for a starved machine
GOODBYE_SECONDS = 2.0
EXPECTED_SECONDS = 3.0  # of waiting for a rank to dial, after which to look whether it is still there
CONTROL_READ_AHEAD = 4096  # control messages are small and few, but there is a reader for each peer
LAST_WORDS_SECONDS = 0.2  # in which messages sent before a goodbye may still arrive
EXIT_SECONDS = 0.01  # from the end of a dying process's links to its own


class Generation:
    """This rank's part in one membership."""

    def __init__(self, identity: Identity, transport: Transport, member_ids: tuple[str, ...] = ()) -> None:
        self.identity = identity
        self.transport = transport
        self.member_ids = member_ids  # by rank, for the coordinator
        self.succeed: Callable[[Generation, float], Any] | None = None  # makes the next generation's group
        self.news: Callable[[], Any] = lambda: None  # what the coordinator last told: who waits to join
        self.cuts: Callable[[], frozenset[str]] = frozenset  # the members this one is cut off from, on purpose
        self.joined = False  # this member was not in the generation before
        self.stranger = False  # a member that joined, and does not have the state of the training yet
        self.finished = False  # the work of the job is done: whoever came now would begin it anew
        self.alarm = transport.bell()  # rings for good when the generation breaks or is closed
        self.closed = False
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()  # the engine rooms of groups, which end with it
        self._halts: list[Callable[[], None]] = []
        self.raised = False  # whether this rank's program has seen why the generation broke
        self.inherited = False
        self.shared: SharedMemory | None = None  # with the neighbours on this rank's host
        self.sharing = (False,) * identity.size  # by world rank: who shares memory with its neighbours
        self.control = Control(identity.rank, identity.names, identity.number, self._post_control, self._wake_all)
        self.parley = Parley(self)
        self._control_sink = ControlSink(self.control, identity.check_header)
        self.lifeline = Lifeline(self.control, identity.frame(Kind.BEAT), BeatSink(identity.check_header), self._pump)
        self.table = DEFAULTS  # by which algorithms are chosen; agreed before the first call of a user
        self.mailbox = Mailbox(self._accept_offer, self.wake)
        self._mail_sink = MessageSink(self.mailbox, identity.check_header)
        self.belongings: list[Belonging] = [transport]
        self._bell = transport.bell()
        self._lock = threading.Lock()
        self._outboxes: dict[tuple[int, int], Outbox] = {}  # by world rank and channel: links this rank writes to
        self._readers: list[FrameReader] = []
        self._message_links: dict[int, threading.Lock] = {}
        self._met = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="gradwire-service", daemon=True)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def dial(self, deadline: float) -> None:
        """Begin to serve, and open the control links to the ranks below: of each pair the higher one dials, so that
        they never cross."""
        self.transport.adopt(MESSAGE_CHANNEL, self._adopt_message_link)
        self.transport.adopt(CONTROL_CHANNEL, self._add_control_link)
        self._thread.start()
        for link in self.connect_all(range(self.identity.rank), CONTROL_CHANNEL, deadline, "init"):
            self._add_control_link(link)

    def serve(self, deadline: float) -> None:
        """Wait for the ranks above to have dialled. One that is lost meanwhile ends the wait."""
        look_at = time.monotonic() + EXPECTED_SECONDS
        while missing := self._not_met():
            with self._met:
                self._met.wait_for(lambda: not self._not_met(), CHECK_SECONDS)
            self.check("init")
            now, name = time.monotonic(), self.identity.names[missing[0]]
            if now >= deadline:
                raise NoConnection(f"{name} did not connect in time", peer=missing[0])
            if now >= look_at:
                look_at = now + EXPECTED_SECONDS
                if not self.transport.listens(missing[0]):
                    reason = ConnectionRefusedError(f"nobody listens any more where {name} did")
                    raise NoConnection(f"{name} has registered and then ended", peer=missing[0]) from reason

    def _not_met(self) -> list[int]:
        above = range(self.identity.rank + 1, self.identity.size)
        return [peer for peer in above if (peer, CONTROL_CHANNEL) not in self._outboxes]

    def connect(self, peer: int, channel: int, deadline: float, operation: str) -> Link:
        """A link to a world rank; fails as soon as it is known that the rank has left or the generation is broken."""
        return self.connect_all([peer], channel, deadline, operation)[0]

    def connect_all(self, peers: Sequence[int], channel: int, deadline: float, operation: str) -> list[Link]:
        """The same, to several ranks at a time."""

        def check() -> None:
            self.check(operation)
            for peer in peers:
                if self.control.has_left(peer):
                    raise self.lost(peer, operation, f" during {operation}")

        check()
        try:
            return self.transport.dial_all(peers, channel, deadline, check)
        except NoConnection as error:
            if error.peer is not None:
                self._await_reason(error.peer)
            check()
            raise

    def _add_control_link(self, link: Link) -> None:
        if (link.peer, CONTROL_CHANNEL) in self._outboxes:  # a rank below has no business to dial one
            link.close()
            return
        reader = FrameReader(link, self._control_sink, threading.Lock(), CONTROL_READ_AHEAD)
        self._serve_link(link, CONTROL_CHANNEL, reader)
        self.control.introduce(link.peer)
        with self._met:
            self._met.notify_all()

    def _serve_link(self, link: Link, channel: int, reader: FrameReader) -> Outbox:
        """Let the service thread read a link, and write what is posted to it under this peer and channel."""
        outbox = Outbox(link)
        with self._lock:
            self._outboxes[link.peer, channel] = outbox
            self._readers = [*self._readers, reader]
        self._bell.ring()
        return outbox

    def share_memory(self, shared: SharedMemory | None, sharing: tuple[bool, ...]) -> None:
        """Know who shares memory, and watch the processes of those this rank shares it with."""
        self.shared, self.sharing = shared, sharing
        if shared is not None:
            self.belongings.append(shared)
            lives = [FrameReader(Life(peer, shared), self._control_sink, self._lock, 1) for peer in shared.pidfds]
            with self._lock:
                self._readers = [*self._readers, *lives]
            self._bell.ring()

    def begin_to_beat(self, own: Nature, arena: OwnArena | None) -> None:
        """Show the others that this rank lives, in memory that some of them may come to see."""
        self.belongings.append(self.lifeline)
        self.lifeline.begin(own.native, arena)

    def connect_lifeline(self, deadline: float) -> None:
        """Show it to those as well who share no memory with this rank; it is known by now who does."""

        def dial(peer: int) -> Link:
            return self.connect(peer, LIFELINE_CHANNEL, deadline, "init")

        self.lifeline.connect(self.shared, self.identity.size, self.transport, dial)

    def shares(self, world: int) -> bool:
        """Whether a world rank shares memory with all others on its host."""
        return self.sharing[world]

    def close(self, finding: Finding | None = None) -> None:
        """Say goodbye — or, with a finding, why not — and let go of everything; idempotent."""
        if self.inherited:
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._halt()
        if (unseen := self.unseen_mismatch()) is not None:
            log.error("the group is closed, and nobody has been told: %s", unseen)
        self._wake_all()
        if finding is not None:
            self.control.report(finding, time.monotonic())
        if self._thread.is_alive():
            self.control.goodbye()
            self._ending = True
            self._bell.ring()
            if self._thread is not threading.current_thread():
                self._thread.join(GOODBYE_SECONDS + 1)
        for group in list(self.groups):
            group.close()
        for belonging in reversed(self.belongings):
            belonging.close()

    def abandon(self) -> None:
        """In a forked child: this process is not the rank. No locks: threads that are not here may hold them."""
        self.closed = self.inherited = True
        self._halt()
        for belonging in self.belongings:
            belonging.abandon()

    # -- the service thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # Without this thread no loss would be noticed any more: better to break than to hang.
            log.exception("the service thread of rank %d failed", self.identity.rank)
            reason = f"its service thread failed: {type(error).__name__}: {error}"[:1000]
            self.control.report(Finding("aborted", reason, self.identity.rank), time.monotonic())

    def _serve(self) -> None:
        give_up_at: float | None = None
        while True:
            now = time.monotonic()
            pause = min(self.control.tick(now), self.lifeline.tick(now))
            self._cut_links()
            if self._ending:
                give_up_at = give_up_at or now + GOODBYE_SECONDS
                lost = self.unreachable()  # and would not hear a goodbye
                if now >= give_up_at or not any(box.waiting for box in self._served() if box.link.peer not in lost):
                    return
                pause = min(pause, give_up_at - now)
            readers = [reader for reader in self._readers if self._may_read(reader)]
            writers = [outbox.link for outbox in self._served() if outbox.waiting]
            self.transport.wait([reader.link for reader in readers], writers, self._bell, pause)
            self._bell.silence()
            for outbox in self._served():
                if outbox.waiting:
                    self._flush(outbox)
            for reader in readers:
                self._pump(reader)

    def _cut_links(self) -> None:
        for member in self.cuts():
            peer = self.member_ids.index(member) if member in self.member_ids else self.identity.rank
            for outbox in self._served():
                if outbox.link.peer == peer and peer != self.identity.rank:
                    self._end_of_link(outbox.link)

    def _served(self) -> list[Outbox]:
        with self._lock:
            return list(self._outboxes.values())

    def _may_read(self, reader: FrameReader) -> bool:
        return reader.link.channel != MESSAGE_CHANNEL or not self.mailbox.overfull(reader.link.peer)

    def _flush(self, outbox: Outbox) -> None:
        try:
            done = outbox.flush()
        except (LinkClosed, OSError):
            self._end_of_link(outbox.link)
            return
        if done:
            self.mailbox.wake_waits()

    def _pump(self, reader: FrameReader) -> None:
        try:
            while reader.pump():
                if not self._may_read(reader):
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

    def _end_of_link(self, link: Link) -> None:
        with self._lock:
            self._readers = [reader for reader in self._readers if reader.link is not link]
            for key, outbox in list(self._outboxes.items()):
                if outbox.link is link:
                    del self._outboxes[key]
        self.lifeline.end_of(link)
        link.close()
        # Only the control link says why it ends; the end of a message link, or of the process, may overtake a goodbye.
        if link.channel == CONTROL_CHANNEL and not self.closed and not self.control.has_left(link.peer):
            died = self.shared is not None and self.shared.died(link.peer, EXIT_SECONDS)
            self.control.lost(link.peer, time.monotonic(), "died" if died else "closed its link")
        self.mailbox.wake_waits()

    def departed(self, peer: int) -> bool:
        """Whether a world rank has left and nothing more can come from it."""
        if self.transport.gone(peer):
            return True
        left = self.control.left_at(peer)
        if left is None or time.monotonic() - left < LAST_WORDS_SECONDS:
            return False
        return not any(reader.link.channel == MESSAGE_CHANNEL and reader.link.peer == peer for reader in self._readers)

    def unreachable(self) -> set[int]:
        """The world ranks that this rank itself, and not only by hearsay, found to be lost."""
        return set(self.control.complaints)

    def on_halt(self, halt: Callable[[], None]) -> None:
        """Call this when the generation breaks or ends: from then on calls have to look at what happened."""
        self._halts.append(halt)
        if self.closed or not self.control.sound:
            halt()

    def forget(self, halt: Callable[[], None]) -> None:
        """Whoever is called by this has ended."""
        with contextlib.suppress(ValueError):
            self._halts.remove(halt)

    def _halt(self) -> None:
        for halt in tuple(self._halts):
            halt()

    def _wake_all(self) -> None:
        self._halt()
        self.alarm.ring()
        self._bell.ring()
        self.parley.wake()
        self.mailbox.wake_waits()

    def wake(self) -> None:
        """Let the service thread look around: something waits to be sent or decided."""
        self._bell.ring()

    # -- sending on served links --------------------------------------------------------------------------------------

    def _post_control(self, peer: int, payload: bytes) -> None:
        self._post(peer, CONTROL_CHANNEL, self.identity.frame(Kind.CONTROL, payload))

    def _post(self, peer: int, channel: int, message: bytes) -> None:
        outbox = self._outboxes.get((peer, channel))
        if outbox is not None and outbox.full:  # who asks without end and hears no answer must not fill our memory
            self.control.lost(peer, time.monotonic(), "takes no messages off its links")
        elif outbox is not None:
            with contextlib.suppress(LinkClosed, OSError):  # the reading side learns of it, and decides
                if outbox.post(message):
                    self._bell.ring()

    def message_outbox(self, peer: int, deadline: float, operation: str) -> Outbox:
        """The way for point-to-point messages to a world rank; its link is dialled when first needed."""
        with self._lock:
            dialling = self._message_links.setdefault(peer, threading.Lock())
        with dialling:
            outbox = self._outboxes.get((peer, MESSAGE_CHANNEL))
            if outbox is None:
                link = self.connect(peer, MESSAGE_CHANNEL, deadline, operation)
                outbox = self._serve_link(
                    link, MESSAGE_CHANNEL, FrameReader(link, self._mail_sink, self.mailbox.changed)
                )
            return outbox

    def _adopt_message_link(self, link: Link) -> None:
        # The peer dialled it to send on; this rank only answers on it.
        self._serve_link(link, -MESSAGE_CHANNEL, FrameReader(link, self._mail_sink, self.mailbox.changed))

    def _accept_offer(self, world: int, letter: Letter) -> None:
        self._post(world, -MESSAGE_CHANNEL, self.identity.frame(Kind.ACCEPT, sequence=letter.identity))

    def redirect(self, world: int, old: memoryview, new: memoryview) -> None:
        for reader in self._readers:
            if reader.link.peer == world:
                reader.redirect(old, new)

    # -- the one failure path -----------------------------------------------------------------------------------------

    def check(self, operation: str | None = None, during: str = "") -> None:
        """Raise if this generation can no longer be used; `during` is for those who have waited."""
        if self.inherited:
            raise Closed("this process was forked from a rank: the group belongs to the parent")
        if self.closed:
            raise Closed("the group is closed")
        if not self.control.sound:
            raise self.error(operation, during)

    def error(self, operation: str | None, during: str = "") -> GradwireError:
        """The error of a broken generation, once the verdict is in; also for the one who closed it meanwhile."""
        if not self.control.settle(VERDICT_SECONDS):
            return Closed("the group was closed while it broke", operation=operation)
        self.raised = True
        self._leave_memory_behind()
        return self.control.error(operation, during)

    def _leave_memory_behind(self) -> None:
        """A rank that does not know yet that all is over, or was frozen, may go on writing: not into users' arrays."""
        if self.shared is not None:
            self.shared.own.leave_behind()

    def unseen_mismatch(self) -> CollectiveMismatch | None:
        """The error of ranks that disagreed without waiting for each other, if no call has raised it yet."""
        if self.raised or self.control.sound or not self.control.settle(VERDICT_SECONDS):
            return None
        error = self.control.error(None, "")
        return error if isinstance(error, CollectiveMismatch) else None

    def lost(self, peer: int, operation: str, during: str) -> GradwireError:
        """A data link to a world rank ended. Its control link says why; if it stays silent, the rank is lost."""
        self._await_reason(peer)
        if self.closed:
            return Closed("the group was closed", operation=operation)
        if self.control.sound:
            now = time.monotonic()
            self.control.missed(peer, now)
            self.control.lost(peer, now, "ended its thread" if self.transport.gone(peer) else "closed its link")
        self._bell.ring()
        return self.error(operation, during)

    def _await_reason(self, peer: int) -> None:
        """Give the control channel a moment to say why a link to a world rank ended or cannot be made."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.control.sound and not self.closed and not self.control.has_left(peer):
            if time.monotonic() >= deadline:
                return
            self.transport.wait((), (), self.alarm, 0.01)

    def interrupt(self, operation: str, error: BaseException) -> None:
        """The user's Ctrl-C, or an error of our own, left an operation half done: nobody can go on."""
        what = "interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        finding = Finding("aborted", f"{what} during {operation}"[:1000], self.identity.rank, operation=operation)
        self.control.report(finding, time.monotonic())
        self._leave_memory_behind()
