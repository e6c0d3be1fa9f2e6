"""One numbered membership at work: its beginning and end, what belongs to it, and the one failure path.

A generation connects this rank with all others, and knows whether it is sound. Groups belong to it; when it breaks they
all do, on all ranks, with one error.
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
from gradwire.generation.control_gather import ControlGather
from gradwire.generation.service_thread import ServiceThread
from gradwire.generation.waiting import ANSWER_SECONDS
from gradwire.identity import Identity
from gradwire.liveness.detector import PEER_SECONDS
from gradwire.liveness.lifeline import BeatCapability
from gradwire.liveness.verdict import Finding
from gradwire.transports.base import CHECK_SECONDS, CONTROL_CHANNEL, LIFELINE_CHANNEL, Belonging, Link, Transport
from gradwire.transports.shm.shared_memory import OwnArena, SharedMemory

log = logging.getLogger("gradwire")

VERDICT_SECONDS = 5.0  # a settled verdict takes half a second at most; this is for a starved machine
EXPECTED_SECONDS = 3.0  # of waiting for a rank to dial, after which to look whether it is still there
EXIT_SECONDS = 0.01  # from the end of a dying process's links to its own


class Generation:
    """This rank's part in one membership."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        member_ids: tuple[str, ...] = (),
        peer_timeout: float = PEER_SECONDS,
    ) -> None:
        self.identity = identity
        self.transport = transport
        self.member_ids = member_ids  # by rank, for the coordinator
        self.peer_timeout = peer_timeout  # seconds of silence between hosts, as this rank wants it
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
        self.service = ServiceThread(identity, transport, self._wake_all, self._link_ended, self._cut_off)
        self.control = self.service.control
        self.lifeline = self.service.lifeline
        self.mailbox = self.service.mailbox
        self.control_gather = ControlGather(self)
        self.table = DEFAULTS  # by which algorithms are chosen; agreed before the first call of a user
        self.belongings: list[Belonging] = [transport]
        self._closing = threading.Lock()

    # -- beginning and end --------------------------------------------------------------------------------------------

    def dial(self, deadline: float) -> None:
        """Begin to serve, and open the control links to the ranks below: of each pair the higher one dials, so that
        they never cross."""
        self.service.start()
        below = range(self.identity.rank)
        self.connect_all(below, CONTROL_CHANNEL, deadline, "init", self.service.add_control_link)

    def serve(self, deadline: float) -> None:
        """Wait for the ranks above to have dialled. One that is lost meanwhile ends the wait."""
        look_at = time.monotonic() + EXPECTED_SECONDS
        above = range(self.identity.rank + 1, self.identity.size)
        while missing := self.service.not_met(above):
            self.service.await_met(above, CHECK_SECONDS)
            self.check("init")
            now, name = time.monotonic(), self.identity.names[missing[0]]
            if now >= deadline:
                raise NoConnection(f"{name} did not connect in time", peer=missing[0])
            if now >= look_at:
                look_at = now + EXPECTED_SECONDS
                if not self.transport.listens(missing[0]):
                    reason = ConnectionRefusedError(f"nobody listens any more where {name} did")
                    raise NoConnection(f"{name} has registered and then ended", peer=missing[0]) from reason

    def connect(self, peer: int, channel: int, deadline: float, operation: str) -> Link:
        """A link to a world rank; fails as soon as it is known that the rank has left or the generation is broken."""
        made: list[Link] = []
        self.connect_all([peer], channel, deadline, operation, made.append)
        return made[0]

    def connect_all(
        self, peers: Sequence[int], channel: int, deadline: float, operation: str, made: Callable[[Link], None]
    ) -> None:
        """The same, to several ranks at a time; `made` gets each link as soon as it is there."""

        def check() -> None:
            self.check(operation)
            for peer in peers:
                if self.control.has_left(peer):
                    raise self.lost(peer, operation, f" during {operation}")

        check()
        try:
            self.transport.dial_all(peers, channel, deadline, made, check)
        except NoConnection as error:
            if error.peer is not None:
                self._await_reason(error.peer)
            check()
            raise

    def share_memory(self, shared: SharedMemory | None, sharing: tuple[bool, ...]) -> None:
        """Know who shares memory, and watch the processes of those this rank shares it with."""
        self.shared, self.sharing = shared, sharing
        if shared is not None:
            self.belongings.append(shared)
            self.service.add_lives(shared)

    def begin_to_beat(self, own: BeatCapability, arena: OwnArena | None) -> None:
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
        with self._closing:
            if self.closed:
                return
            self.closed = True
            self._halt()
        if (unseen := self.unseen_mismatch()) is not None:
            log.error("the group is closed, and nobody has been told: %s", unseen)
        self._wake_all()
        if finding is not None:
            self.control.report(finding, time.monotonic())
        self.service.close()
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
        self.service.wake()
        self.control_gather.wake()
        self.mailbox.wake_waits()

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
        self.service.wake()
        return self.error(operation, during)

    def _await_reason(self, peer: int) -> None:
        """Give the control channel a moment to say why a link to a world rank ended or cannot be made."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.control.sound and not self.closed and not self.control.has_left(peer):
            if time.monotonic() >= deadline:
                return
            self.transport.wait((), (), self.alarm, 0.01)

    def unreachable(self) -> set[int]:
        """The world ranks that this rank itself, and not only by hearsay, found to be lost."""
        return set(self.control.complaints)

    def _cut_off(self) -> list[int]:
        """The world ranks of the members this one is cut off from."""
        peers = [self.member_ids.index(member) for member in self.cuts() if member in self.member_ids]
        return [peer for peer in peers if peer != self.identity.rank]

    def _link_ended(self, link: Link) -> None:
        # Only the control link says why it ends; the end of a message link, or of the process, may overtake a goodbye.
        if link.channel == CONTROL_CHANNEL and not self.closed and not self.control.has_left(link.peer):
            died = self.shared is not None and self.shared.died(link.peer, EXIT_SECONDS)
            self.control.lost(link.peer, time.monotonic(), "died" if died else "closed its link")

    def interrupt(self, operation: str, error: BaseException) -> None:
        """The user's Ctrl-C, or an error of our own, left an operation half done: nobody can go on."""
        what = "interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        finding = Finding("aborted", f"{what} during {operation}"[:1000], self.identity.rank, operation=operation)
        self.control.report(finding, time.monotonic())
        self._leave_memory_behind()
