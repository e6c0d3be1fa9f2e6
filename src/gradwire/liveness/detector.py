"""Decides from the times of heartbeats which ranks are lost. It does no I/O and reads no clock.

A rank sends a heartbeat every 50 ms, from a thread that does not need the interpreter. The silence that is allowed
depends on how regular its heartbeats were: min(max(floor, median + k·MAD of the intervals), 0.6 s). A rank on another
host has a fixed deadline instead, because a network may fail for a second: `GRADWIRE_PEER_TIMEOUT`, 3 s by default. A
deadline above 5 s applies in full only if the network drops packets; otherwise it is 5 s. Three rules prevent false
alarms:

    late detector    If a check of this rank was late, heartbeats may have been missed. Deadlines on one host start
                     again; deadlines between hosts are extended by the delay.
    observation      The process of a silent rank on this machine is inspected. If it was stopped, it is lost. If not,
                     it has 0.7 s, or 5 s while it waits for a core or for the kernel (state D).
    confirmation     A silence is reported only when each other rank has sent another heartbeat or is silent for too
                     long as well. So ranks that fell silent together are reported together, and the lowest is named.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

HEARTBEAT_SECONDS = 0.05
SHARED_MEMORY_SECONDS = 0.2  # floor of the allowed silence, for heartbeats in shared memory
LINK_SECONDS = 0.5  # the same over a link: TCP sends a lost packet again after 0.2 s, and hosts can be busy
MAX_SILENCE_SECONDS = 0.6
PEER_SECONDS = 3.0  # deadline between hosts, unless GRADWIRE_PEER_TIMEOUT is set
RUNNING_SECONDS = 0.7  # allowed silence of a process that is known not to be stopped
STARVED_SECONDS = 5.0  # allowed silence of a process that waits for a core or for the kernel
CONFIRM_SECONDS = 0.85  # a silence this long is reported without confirmation
REMOTE_CONFIRM_SECONDS = 0.4  # longest delay of a report about another host while the other ranks are not confirmed
LATE_SECONDS = 0.1  # a check that is this late makes the detector distrust its deadlines
STALL_SECONDS = 0.15  # a tick this late means that other ranks may have missed this one: they allow at least 0.2 s
RECENT_SECONDS = 5.0
POLL_SECONDS = 0.1  # between checks; half of it while a heartbeat is missing
SLOW_HEARTBEAT_SECONDS = 0.5  # between heartbeats of ranks without the native core, and between checks of such ranks
CONFIRM_POLL_SECONDS = 0.01
DEVIATIONS = 8
MAX_INTERVALS = 64
MIN_INTERVALS = 8  # with fewer, the longest silence is allowed


class Observation(enum.Enum):
    """The observed state of a silent rank: of its process on this machine, or of the connection to its host."""

    STOPPED = "stopped"
    STARVED = "waits for a core or for the kernel"
    OTHER = "neither"
    OUTAGE = "the network to it drops packets"


Observe = Callable[[int], Observation | None]  # None: nothing can be observed
_SECONDS = {Observation.STOPPED: 0.0, Observation.STARVED: STARVED_SECONDS, Observation.OTHER: RUNNING_SECONDS}


@dataclass(slots=True)
class _Life:
    last_heartbeat: float
    least: float  # seconds; a shorter silence is never suspicious
    most: float
    deadline: float | None  # of a rank on another host
    slow: bool  # its heartbeats need its interpreter
    counter: int | None = None
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_INTERVALS))

    def allowed(self, observation: Observation | None) -> float:
        """Return the seconds that the rank may be silent, given what was observed."""
        if self.deadline is None or observation is Observation.STOPPED:
            return self.max_silence() if observation is None else _SECONDS[observation]
        if observation is Observation.STARVED:
            return max(self.deadline, STARVED_SECONDS)
        return self.deadline if observation is Observation.OUTAGE else min(self.deadline, self.most)

    def max_silence(self) -> float:
        if len(self.intervals) < MIN_INTERVALS:
            return self.most
        middle = median(self.intervals)
        spread = median(abs(interval - middle) for interval in self.intervals)
        return min(max(self.least, middle + DEVIATIONS * spread), self.most)


class Standstill:
    """Notices when this process itself stood still, from ticks that come late. Other ranks may then have missed it."""

    def __init__(self) -> None:
        self._next_tick = math.inf
        self._noticed = -math.inf

    def tick(self, now: float) -> None:
        if now > self._next_tick + STALL_SECONDS:
            self._noticed = now

    def expect_tick(self, until: float) -> None:
        """Set the time of the next tick."""
        self._next_tick = until

    def lately(self, now: float) -> bool:
        """Whether this process stood still within the last `RECENT_SECONDS`, or until now, before its next tick."""
        return now > self._next_tick + STALL_SECONDS or now - self._noticed < RECENT_SECONDS


class Detector:
    """Detects the silence of the ranks that one rank watches."""

    def __init__(self) -> None:
        self.due = -math.inf  # time of the next tick
        self._lives: dict[int, _Life] = {}
        self._confirming_since: float | None = None  # when the first of the current suspects was found

    def watch(
        self, peer: int, now: float, least: float, most: float = MAX_SILENCE_SECONDS, *, slow: bool = False
    ) -> None:
        """Expect heartbeats of this rank from now on. A `slow` rank sends only two a second."""
        self._watch(peer, _Life(now, least, most, None, slow))

    def watch_remote(self, peer: int, now: float, deadline: float, *, least: float = LINK_SECONDS) -> None:
        """Expect heartbeats of a rank on another host. The network may cause any silence shorter than `deadline`."""
        slow = least > LINK_SECONDS
        self._watch(peer, _Life(now, least, max(least, STARVED_SECONDS), deadline, slow))

    def _watch(self, peer: int, life: _Life) -> None:
        self._lives[peer] = life
        self.due = min(self.due, life.last_heartbeat)

    def forget(self, peer: int) -> None:
        """Stop watching a rank that has left."""
        self._lives.pop(peer, None)

    @property
    def watched(self) -> tuple[int, ...]:
        return tuple(self._lives)

    def record_heartbeat(self, peer: int, now: float, counter: int | None = None) -> None:
        """Record a heartbeat. One with the same counter as the last one is the same heartbeat, and is ignored."""
        life = self._lives.get(peer)
        if life is None or (counter is not None and counter == life.counter):
            return
        if now > life.last_heartbeat:
            life.intervals.append(now - life.last_heartbeat)
        life.last_heartbeat, life.counter = now, counter

    def silence(self, peer: int, now: float) -> float | None:
        """Return the seconds since a rank's last heartbeat; None if it is not watched."""
        life = self._lives.get(peer)
        return now - life.last_heartbeat if life is not None else None

    def last_heartbeat(self, peer: int) -> float | None:
        """Return the time of a rank's last heartbeat; None if it is not watched."""
        life = self._lives.get(peer)
        return life.last_heartbeat if life is not None else None

    def restart(self, now: float, missed: float = math.inf) -> None:
        """Disregard the last `missed` seconds, in which heartbeats may have been missed.

        Deadlines on one host start again. Deadlines between hosts are extended by `missed`: they are so long that on a
        busy machine they would never end if they started again.
        """
        self._confirming_since = None
        for life in self._lives.values():
            life.last_heartbeat = max(
                life.last_heartbeat, now if life.deadline is None else min(now, life.last_heartbeat + missed)
            )

    def tick(self, now: float, observe: Observe = lambda peer: None) -> list[tuple[int, float]]:
        """Return the ranks that are lost, each with the seconds of its silence.

        Record all heartbeats that have arrived before calling this.
        """
        if now > self.due + LATE_SECONDS and self.due > -math.inf:
            self.restart(now, now - self.due)
        suspects = {peer for peer, life in self._lives.items() if _is_suspect(peer, life, now, observe)}
        self._confirming_since = (
            None if not suspects else self._confirming_since if self._confirming_since is not None else now
        )
        lost = sorted(suspects) if suspects and self._others_confirmed(suspects, now) else []
        self.due = now + self._pause(now)
        return [(peer, now - self._lives[peer].last_heartbeat) for peer in lost]

    def _pause(self, now: float) -> float:
        if self._confirming_since is not None:
            return CONFIRM_POLL_SECONDS
        heard = [life.last_heartbeat >= now for life in self._lives.values() if not life.slow]
        if not all(heard):
            return POLL_SECONDS / 2
        return POLL_SECONDS if heard else SLOW_HEARTBEAT_SECONDS

    def _others_confirmed(self, suspects: set[int], now: float) -> bool:
        """Whether each other rank has sent a heartbeat since the first suspicion, or the wait for that is over."""
        assert self._confirming_since is not None
        others = [life for peer, life in self._lives.items() if peer not in suspects and not life.slow]
        if all(life.last_heartbeat >= self._confirming_since for life in others):
            return True
        remote = now - self._confirming_since >= REMOTE_CONFIRM_SECONDS
        lives = [self._lives[peer] for peer in suspects]
        return any(remote if life.deadline else now - life.last_heartbeat >= CONFIRM_SECONDS for life in lives)


def _is_suspect(peer: int, life: _Life, now: float, observe: Observe) -> bool:
    silence = now - life.last_heartbeat
    if silence < life.least:
        return False
    return silence >= life.allowed(observe(peer))
