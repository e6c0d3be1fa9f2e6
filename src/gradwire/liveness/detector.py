"""Decides which ranks have been silent for too long: heartbeat times in, suspects out. Pure.

Pure. A rank beats every 50 ms, by a thread that needs nothing of the interpreter. How long it may be silent follows
from how regular it was: min(max(floor, median + k·MAD of its intervals), 0.6 s). A rank on another host has a fixed
deadline instead, because a network may fail for a second: `GRADWIRE_PEER_TIMEOUT`, 3 s by default. Where that is longer
than 5 s, only a network that drops packets gets all of it. Three rules keep false alarms away:

    a late watcher       knows nothing of the time it missed: when its own look came late, deadlines on one host begin
                         anew, and those between hosts are put off by that time
    a look               at a rank on this machine tells whether it was stopped: then there is no doubt. If not, it has
                         0.7 s; and if it is seen waiting for a core, or for the kernel (state D), 5 s
    confirmation         before a silence is told, every other rank is heard once more, or is silent for too long as
                         well: so of ranks that fell silent together all are told at once, and the lowest is named
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

HEARTBEAT_SECONDS = 0.05
SHARED_MEMORY_SECONDS = 0.2  # the least silence that counts, where beats are seen in memory
LINK_SECONDS = 0.5  # and over a link: a packet that was lost is sent again after 0.2 s, and hosts can be busy
MAX_SILENCE_SECONDS = 0.6
PEER_SECONDS = 3.0  # the deadline between hosts, unless GRADWIRE_PEER_TIMEOUT says otherwise
RUNNING_SECONDS = 0.7  # of one that is seen, and was not stopped
STARVED_SECONDS = 5.0  # and of one that visibly waits for a core or for the kernel
CONFIRM_SECONDS = 0.85  # a silence that long is told whatever the others do
REMOTE_CONFIRM_SECONDS = 0.4  # that a silence between hosts is held back, at most, until the others are heard
LATE_SECONDS = 0.1  # later than it was due: a watcher that was held up
STALL_SECONDS = 0.15  # by which a look was late, for who may have been missed: it takes 0.2 s of silence at least
RECENT_SECONDS = 5.0
POLL_SECONDS = 0.1  # between looks; half of it where somebody was not heard
SLOW_HEARTBEAT_SECONDS = 0.5  # where nobody beats faster
CONFIRM_POLL_SECONDS = 0.01
DEVIATIONS = 8
MAX_INTERVALS = 64  # intervals
MIN_INTERVALS = 8  # intervals, which say little


class Observation(enum.Enum):
    """What is seen of a silent rank: its process, if that runs on this machine, or the connection to its host."""

    STOPPED = "stopped"
    STARVED = "waits for a core or for the kernel"
    OTHER = "neither"
    OUTAGE = "the network to it drops packets"


Observe = Callable[[int], Observation | None]  # None: nothing can be seen
_SECONDS = {Observation.STOPPED: 0.0, Observation.STARVED: STARVED_SECONDS, Observation.OTHER: RUNNING_SECONDS}


@dataclass(slots=True)
class _Life:
    last_heartbeat: float
    least: float  # seconds of silence that count
    most: float
    deadline: float | None  # of a rank on another host
    slow: bool  # its beats need its interpreter
    counter: int | None = None
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_INTERVALS))

    def allowed(self, observation: Observation | None) -> float:
        """The seconds that it may be silent, after what was seen of it."""
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
    """Whether this process stood still itself: then others may have missed it. Told when it looks, and when it will."""

    def __init__(self) -> None:
        self._next_tick = math.inf
        self._noticed = -math.inf

    def tick(self, now: float) -> None:
        if now > self._next_tick + STALL_SECONDS:
            self._noticed = now

    def expect_tick(self, until: float) -> None:
        """The next look is due by then."""
        self._next_tick = until

    def lately(self, now: float) -> bool:
        """Also if it has only just begun to move, and has not looked yet."""
        return now > self._next_tick + STALL_SECONDS or now - self._noticed < RECENT_SECONDS


class Detector:
    """The silence of the ranks that one rank watches."""

    def __init__(self) -> None:
        self.due = -math.inf  # when to look next
        self._lives: dict[int, _Life] = {}
        self._confirming_since: float | None = None  # since when

    def watch(
        self, peer: int, now: float, least: float, most: float = MAX_SILENCE_SECONDS, *, slow: bool = False
    ) -> None:
        """From now on expect beats of this rank; `slow` says that it beats twice a second only."""
        self._watch(peer, _Life(now, least, most, None, slow))

    def watch_remote(self, peer: int, now: float, deadline: float, *, least: float = LINK_SECONDS) -> None:
        """The same for a rank on another host, where any silence of less than `deadline` may be the network's."""
        slow = least > LINK_SECONDS
        self._watch(peer, _Life(now, least, max(least, STARVED_SECONDS), deadline, slow))

    def _watch(self, peer: int, life: _Life) -> None:
        self._lives[peer] = life
        self.due = min(self.due, life.last_heartbeat)

    def forget(self, peer: int) -> None:
        """It has left."""
        self._lives.pop(peer, None)

    @property
    def watched(self) -> tuple[int, ...]:
        return tuple(self._lives)

    def record_heartbeat(self, peer: int, now: float, beat: int | None = None) -> None:
        """A rank was heard; the same number as before is the same beat, seen once more."""
        life = self._lives.get(peer)
        if life is None or (beat is not None and beat == life.counter):
            return
        if now > life.last_heartbeat:
            life.intervals.append(now - life.last_heartbeat)
        life.last_heartbeat, life.counter = now, beat

    def silence(self, peer: int, now: float) -> float | None:
        """For how long a rank has not been heard; None if it is not watched."""
        life = self._lives.get(peer)
        return now - life.last_heartbeat if life is not None else None

    def last_heartbeat(self, peer: int) -> float | None:
        """When a rank was last heard; None if it is not watched."""
        life = self._lives.get(peer)
        return life.last_heartbeat if life is not None else None

    def restart(self, now: float, missed: float = math.inf) -> None:
        """Nothing is known of the last `missed` seconds. Deadlines on one host begin anew; those between hosts, which
        are so long that a busy watcher would never see the end of one, are put off by that much."""
        self._confirming_since = None
        for life in self._lives.values():
            life.last_heartbeat = max(
                life.last_heartbeat, now if life.deadline is None else min(now, life.last_heartbeat + missed)
            )

    def tick(self, now: float, observe: Observe = lambda peer: None) -> list[tuple[int, float]]:
        """Who is lost by now, and for how long each has been silent; after all that was heard has been told."""
        if now > self.due + LATE_SECONDS and self.due > -math.inf:
            self.restart(now, now - self.due)
        suspects = {peer for peer, life in self._lives.items() if _is_suspect(peer, life, now, observe)}
        self._confirming_since = (
            None if not suspects else self._confirming_since if self._confirming_since is not None else now
        )
        lost = sorted(suspects) if suspects and self._others_confirmed(suspects, now) else []
        self.due = now + self._pause(now)
        return [(peer, now - self._lives[peer].heard) for peer in lost]

    def _pause(self, now: float) -> float:
        if self._confirming_since is not None:
            return CONFIRM_POLL_SECONDS
        heard = [life.last_heartbeat >= now for life in self._lives.values() if not life.slow]
        if not all(heard):
            return POLL_SECONDS / 2
        return POLL_SECONDS if heard else SLOW_HEARTBEAT_SECONDS

    def _others_confirmed(self, suspects: set[int], now: float) -> bool:
        """Whether everybody else has been heard since the first was suspected."""
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
