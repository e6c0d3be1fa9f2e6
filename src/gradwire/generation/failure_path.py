"""The one failure path of a generation: whether it is sound, how it breaks or ends, and the error to raise then.

Every wait of an operation depends on it. A loss, a timeout, a disagreement or an abort goes to the control protocol,
whose verdict is the same on all ranks; `halt` then makes the threads of this rank look at it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from gradwire.errors import Closed, CollectiveMismatch, GradwireError
from gradwire.identity import Identity
from gradwire.liveness.control import Control
from gradwire.liveness.verdict import Finding
from gradwire.transports.base import CONTROL_CHANNEL, Link, Transport
from gradwire.transports.shm.shared_memory import SharedMemory

ANSWER_SECONDS = 0.3
VERDICT_SECONDS = 5.0  # a verdict takes half a second at most; this is for a machine without idle cores
EXIT_SECONDS = 0.01  # from the end of a dying process's links to its own


class FailurePath:
    """Whether a generation can be used on this rank, and why not."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        control: Control,
        alive: Callable[[int], bool],
        wake: Callable[[], None],
        wake_waiters: Iterable[Callable[[], None]] = (),
    ) -> None:
        """`alive` tells whether a world rank was heard lately. `wake` lets the service thread decide and send what is
        due; `wake_waiters` let the threads that wait for messages look at what happened."""
        self.identity = identity
        self.transport = transport
        self.control = control
        self.alive = alive
        self.alarm = transport.bell()  # rings for good when the generation breaks or is closed
        self.closed = False
        self.inherited = False  # in a process that was forked from the rank
        self.wake = wake
        self._wake_waiters = tuple(wake_waiters)
        self._halts: list[Callable[[], None]] = []
        self._raised = False  # whether this rank's program has seen why the generation broke
        self._memory: SharedMemory | None = None
        self._closing = threading.Lock()

    def use_memory(self, shared: SharedMemory) -> None:
        """This rank shares memory, which must be left to ranks that may still write to it when all is over."""
        self._memory = shared

    # -- calling threads off what they do -----------------------------------------------------------------------------

    def on_halt(self, halt: Callable[[], None]) -> None:
        """Call this when the generation breaks or ends: from then on calls have to look at what happened.

        It must not take a lock: it is called in forked children too.
        """
        self._halts.append(halt)
        if self.closed or not self.control.intact:
            halt()

    def forget_halt(self, halt: Callable[[], None]) -> None:
        """What is called by this has ended."""
        with contextlib.suppress(ValueError):
            self._halts.remove(halt)

    def halt(self) -> None:
        """Let calls look at what happened, and wake the threads that wait."""
        self._halt_calls()
        self.alarm.ring()
        self.wake()
        for wake in self._wake_waiters:
            wake()

    def _halt_calls(self) -> None:
        for halt in tuple(self._halts):
            halt()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Use the generation no more; False if it was closed before."""
        with self._closing:
            if self.closed:
                return False
            self.closed = True
            self._halt_calls()
        return True

    def abandon(self) -> None:
        """In a forked child: this process is not the rank. No locks: threads that are not here may hold them."""
        self.closed = self.inherited = True
        self._halt_calls()

    # -- errors -------------------------------------------------------------------------------------------------------

    def check(self, operation: str | None = None, during: str = "") -> None:
        """Raise if this generation can no longer be used; `during` is for callers that have waited."""
        if self.inherited:
            raise Closed("this process was forked from a rank: the group belongs to the parent")
        if self.closed:
            raise Closed("the group is closed")
        if not self.control.intact:
            raise self.error(operation, during)

    def error(self, operation: str | None, during: str = "") -> GradwireError:
        """The error of a broken generation, once the verdict is in; also for a caller that closed it meanwhile."""
        if not self.control.await_verdict(VERDICT_SECONDS):
            return Closed("the group was closed while it broke", operation=operation)
        self._raised = True
        self._leave_memory_behind()
        return self.control.error(operation, during)

    def _leave_memory_behind(self) -> None:
        """A rank that does not know yet that all is over, or was frozen, may go on writing: not into users' arrays."""
        if self._memory is not None:
            self._memory.own.detach_arrays()

    def take_unseen_mismatch(self) -> CollectiveMismatch | None:
        """The error of ranks that disagreed without waiting for each other, if no call has raised it yet; once."""
        if self._raised or self.control.intact or not self.control.await_verdict(VERDICT_SECONDS):
            return None
        error = self.control.error(None, "")
        self._raised = isinstance(error, CollectiveMismatch)
        return error if isinstance(error, CollectiveMismatch) else None

    def lost(self, peer: int, operation: str, during: str) -> GradwireError:
        """A data link to a world rank ended. Its control link says why; if it stays silent, the rank is lost."""
        self.await_reason(peer)
        if self.closed:
            return Closed("the group was closed", operation=operation)
        if self.control.intact:
            now = time.monotonic()
            self.control.missed(peer, now)
            self.control.lost(peer, now, "ended its thread" if self.transport.gone(peer) else "closed its link")
        self.wake()
        return self.error(operation, during)

    def await_reason(self, peer: int) -> None:
        """Give the control channel a moment to say why a link to a world rank ended or cannot be made."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.control.intact and not self.closed and not self.control.has_left(peer):
            if time.monotonic() >= deadline:
                return
            self.transport.wait((), (), self.alarm, 0.01)

    def link_ended(self, link: Link) -> None:
        """A served link was closed by its peer."""
        # Only the control link says why it ends; the end of a message link, or of the process, may overtake a goodbye.
        if link.channel == CONTROL_CHANNEL and not self.closed and not self.control.has_left(link.peer):
            died = self._memory is not None and self._memory.died(link.peer, EXIT_SECONDS)
            self.control.lost(link.peer, time.monotonic(), "died" if died else "closed its link")

    def interrupt(self, operation: str, error: BaseException) -> None:
        """The user's Ctrl-C, or an error of our own, left an operation half done: no rank can go on."""
        what = "interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        finding = Finding("aborted", f"{what} during {operation}"[:1000], self.identity.rank, operation=operation)
        self.control.report(finding, time.monotonic())
        self._leave_memory_behind()

    def unreachable(self) -> set[int]:
        """The world ranks that this rank itself, and not only by hearsay, found to be lost."""
        return set(self.control.unreachable_peers)
