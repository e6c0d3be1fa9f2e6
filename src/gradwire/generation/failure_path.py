"""The failure path of a generation: whether it is usable, how it breaks or ends, and which error to raise.

A loss, a timeout, a mismatch or an abort goes to the control protocol, which reaches the same verdict on all ranks.
`halt` then interrupts the calls of this rank, so that they check the verdict and raise its error.
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

ANSWER_SECONDS = 0.3  # that ranks have to answer a control message
VERDICT_SECONDS = 8.0  # a verdict takes at most half of this, but longer on an overloaded machine
EXIT_SECONDS = 0.01  # between the closing of a dying process's links and the end of the process


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
        """Store the callbacks.

        `alive(rank)` is true if a heartbeat of a world rank has arrived recently. `wake` wakes the service thread,
        which then decides and sends what is due. `wake_waiters` wake the threads that wait for messages.
        """
        self.identity = identity
        self.transport = transport
        self.control = control
        self.alive = alive
        self.alarm = transport.bell()  # rung, and never silenced, when the generation breaks or is closed
        self.closed = False
        self.inherited = False  # True in a process that was forked from the rank
        self.step: int | None = None  # the step of an elastic run that this rank is in; errors name it
        self.wake = wake
        self._wake_waiters = tuple(wake_waiters)
        self._halts: list[Callable[[], None]] = []
        self._raised = False  # whether this rank's program has got the error of the broken generation
        self._memory: SharedMemory | None = None
        self._closing = threading.Lock()

    def use_memory(self, shared: SharedMemory) -> None:
        """Note the shared memory of this rank. Other ranks may still write to it after the generation broke."""
        self._memory = shared

    # -- interrupting calls -------------------------------------------------------------------------------------------

    def on_halt(self, halt: Callable[[], None]) -> None:
        """Call `halt` when the generation breaks or ends, or at once if it has. Calls must then check for the error.

        `halt` must not take a lock, because it runs in forked children too.
        """
        self._halts.append(halt)
        if self.closed or not self.control.intact:
            halt()

    def forget_halt(self, halt: Callable[[], None]) -> None:
        """Stop calling `halt`, because its owner was closed."""
        with contextlib.suppress(ValueError):
            self._halts.remove(halt)

    def halt(self) -> None:
        """Make calls check for the error of the generation, and wake the waiting threads."""
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
        """Close the generation for further use; False if it was closed before."""
        with self._closing:
            if self.closed:
                return False
            self.closed = True
            self._halt_calls()
        return True

    def abandon(self) -> None:
        """Mark the generation as inherited, in a forked child. It takes no lock: the holder may not exist there."""
        self.closed = self.inherited = True
        self._halt_calls()

    # -- errors -------------------------------------------------------------------------------------------------------

    def during(self, call: str, site: str = "") -> str:
        """Return the part of an error message that names a call: ` during all_reduce #812, step 40, train.py:88`."""
        return f" during {call}{self.step_text}{site and f', {site}'}"

    @property
    def step_text(self) -> str:
        """The step of an elastic run for a message, such as `, step 40`; empty outside of steps."""
        return "" if self.step is None else f", step {self.step}"

    def check(self, operation: str | None = None, during: str = "") -> None:
        """Raise if this generation can no longer be used. `during` is text for the error of a call that has waited."""
        if self.inherited:
            raise Closed("this process was forked from a rank: the group belongs to the parent")
        if self.closed:
            raise Closed("the group is closed")
        if not self.control.intact:
            raise self.error(operation, during)

    def error(self, operation: str | None, during: str = "") -> GradwireError:
        """Wait for the verdict of a broken generation and return its error, or `Closed` if there is no verdict."""
        if not self.control.await_verdict(VERDICT_SECONDS):
            return Closed("the group was closed while it broke", operation=operation)
        self._raised = True
        self._detach_memory()
        error = self.control.error(operation, during)
        error.step = self.step
        return error

    def _detach_memory(self) -> None:
        """Make the user's arrays in shared memory private: a rank that was frozen may still write to that memory."""
        if self._memory is not None:
            self._memory.own.detach_arrays()

    def take_unseen_mismatch(self) -> CollectiveMismatch | None:
        """Return, once, the error of a mismatch that no call has raised yet; None otherwise.

        Ranks can disagree on a call for which no rank waits.
        """
        if self._raised or self.control.intact or not self.control.await_verdict(VERDICT_SECONDS):
            return None
        error = self.control.error(None, "")
        self._raised = isinstance(error, CollectiveMismatch)
        return error if isinstance(error, CollectiveMismatch) else None

    def lost(self, peer: int, operation: str, during: str) -> GradwireError:
        """Return the error to raise after a data link to a world rank ended.

        The control link may bring the reason. If it does not, the rank is lost.
        """
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
        """Wait briefly for a control message that explains why a link to a world rank ended or cannot be opened."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.control.intact and not self.closed and not self.control.has_left(peer):
            if time.monotonic() >= deadline:
                return
            self.transport.wait((), (), self.alarm, 0.01)

    def link_ended(self, link: Link) -> None:
        """Report the peer of a link that ended as lost, unless it has said goodbye."""
        # Only the control link counts: the end of a message link, or of the process, may be seen before the goodbye.
        if link.channel == CONTROL_CHANNEL and not self.closed and not self.control.has_left(link.peer):
            died = self._memory is not None and self._memory.died(link.peer, EXIT_SECONDS)
            self.control.lost(link.peer, time.monotonic(), "died" if died else "closed its link")

    def interrupt(self, operation: str, error: BaseException) -> None:
        """Break the generation because Ctrl-C or an internal error ended an operation before it was complete."""
        what = "interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        finding = Finding("aborted", f"{what} during {operation}"[:1000], self.identity.rank, operation=operation)
        self.control.report(finding, time.monotonic())
        self._detach_memory()

    def unreachable(self) -> set[int]:
        """Return the world ranks that this rank itself found to be lost, without those that only peers reported."""
        return set(self.control.unreachable_peers)
