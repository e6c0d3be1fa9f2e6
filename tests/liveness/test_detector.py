"""The detector: beats and the time in, suspects out. No clock, no thread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.liveness.detector import (
    CONFIRM_SECONDS,
    HEARTBEAT_SECONDS,
    LATE_SECONDS,
    LINK_SECONDS,
    MAX_SILENCE_SECONDS,
    POLL_SECONDS,
    RECENT_SECONDS,
    REMOTE_CONFIRM_SECONDS,
    RUNNING_SECONDS,
    SHARED_MEMORY_SECONDS,
    STALL_SECONDS,
    STARVED_SECONDS,
    Detector,
    Observation,
    Standstill,
)

STEP = HEARTBEAT_SECONDS
EPSILON = 1e-6


class Watcher:
    """A detector that is asked when it wants to be, and peers that beat."""

    def __init__(self, *peers: int, least: float = SHARED_MEMORY_SECONDS, most: float = MAX_SILENCE_SECONDS) -> None:
        self.now = 1000.0
        self.detector = Detector()
        self.silent: set[int] = set()
        self.observations: dict[int, Observation] = {}  # of those that can be looked at
        self.peers = peers
        self._beats = dict.fromkeys(peers, 0)
        self._next = {peer: self.now + STEP * (index + 1) / (len(peers) + 1) for index, peer in enumerate(peers)}
        for peer in peers:
            self.detector.watch(peer, self.now, least, most)

    def beat(self) -> None:
        """What peers have done until now."""
        for peer in self.peers:
            while self._next[peer] <= self.now:
                self._next[peer] += STEP
                if peer not in self.silent:
                    self._beats[peer] += 1
            if self._beats[peer]:
                self.detector.record_heartbeat(peer, self.now, self._beats[peer])

    def tick(self) -> list[int]:
        self.beat()
        return [peer for peer, _ in self.detector.tick(self.now, self.observations.get)]

    def run(self, seconds: float) -> list[int]:
        """Let time pass until somebody is lost, at most so long."""
        until = self.now + seconds
        while self.now < until:
            if lost := self.tick():
                return lost
            self.now = max(self.now + 0.001, self.detector.due)
        return []

    def loses_after(self, *peers: int) -> float:
        """Seconds from a silence until it is told."""
        began = self.now
        self.silent |= set(peers)
        assert self.run(5.0) == sorted(peers)
        return self.now - began


def test_detector_rank_that_beats_is_not_suspected() -> None:
    assert Watcher(1, 2, 3).run(60.0) == []


def test_detector_finds_silence_soon_and_not_too_soon() -> None:
    watcher = Watcher(1, 2, 3)
    watcher.run(5.0)
    assert SHARED_MEMORY_SECONDS - POLL_SECONDS < watcher.loses_after(2) < SHARED_MEMORY_SECONDS + 3 * STEP


def test_detector_reports_the_length_of_the_silence() -> None:
    watcher = Watcher(1, 2)
    watcher.run(1.0)
    watcher.loses_after(2)
    assert watcher.detector.silence(2, watcher.now) == pytest.approx(SHARED_MEMORY_SECONDS, abs=2.5 * STEP)
    assert watcher.detector.silence(1, watcher.now) == pytest.approx(0, abs=1.5 * STEP)
    assert watcher.detector.silence(7, watcher.now) is None


@pytest.mark.parametrize("peers", [(1, 3), (3, 1), (1, 2, 3)])
def test_detector_ranks_that_fall_silent_together_are_reported_together(peers: tuple[int, ...]) -> None:
    """Although their last beats, and what each is allowed, differ."""
    for phase in range(50):
        watcher = Watcher(1, 2, 3, 4)
        watcher.run(2.0 + phase / 1000)
        assert watcher.loses_after(*peers) < SHARED_MEMORY_SECONDS + 4 * STEP


def irregular(detector: Detector, peer: int, now: float) -> float:
    """Make a rank known as one that may be silent for long; returns the time after it."""
    detector.watch(peer, now, SHARED_MEMORY_SECONDS)
    for number in range(40):
        now += 0.3 if number % 2 else 0.05
        detector.record_heartbeat(peer, now, number)
    return now


def tick(detector: Detector, now: float, observations: dict[int, Observation] | None = None) -> list[int]:
    """Look at that time, as was due."""
    detector.due = now
    return [peer for peer, _ in detector.tick(now, (observations or {}).get)]


def two() -> tuple[Detector, float]:
    """Rank 1 may be silent for 0.6 s and rank 2 for 0.2 s; both were heard at the time that is returned."""
    detector = Detector()
    now = irregular(detector, 1, 100.0)
    detector.watch(2, now - 2.0, SHARED_MEMORY_SECONDS)
    for number in range(20):
        detector.record_heartbeat(2, now - 1.9 + number * POLL_SECONDS, number)
    return detector, now


def test_detector_confirmation_waits_for_a_rank_that_may_be_silent_longer() -> None:
    detector, now = two()
    assert tick(detector, now + 0.19) == []
    assert tick(detector, now + 0.201) == []
    assert tick(detector, now + 0.59) == []
    assert tick(detector, now + 0.601) == [1, 2]


def test_detector_confirmation_does_not_wait_too_long() -> None:
    detector, now = two()
    starved = {1: Observation.STARVED}
    detector.record_heartbeat(1, now + SHARED_MEMORY_SECONDS - STEP / 2, 1 << 20)  # just before the other is suspected
    assert tick(detector, now + CONFIRM_SECONDS - EPSILON, starved) == []
    assert tick(detector, now + CONFIRM_SECONDS + EPSILON, starved) == [2]


def test_detector_confirmation_ends_when_all_other_ranks_are_heard() -> None:
    detector, now = two()
    assert tick(detector, now + 0.201) == []
    detector.record_heartbeat(1, now + 0.21)
    assert tick(detector, now + 0.21) == [2]


def test_detector_suspect_heard_during_the_confirmation_is_cleared() -> None:
    detector, now = two()
    assert tick(detector, now + 0.201) == []
    detector.record_heartbeat(2, now + 0.21)
    assert tick(detector, now + 0.21) == []
    detector.record_heartbeat(1, now + 0.22)
    assert tick(detector, now + 0.25) == []
    assert detector.due == pytest.approx(now + 0.3), "nobody is suspected, one was not heard"


def test_detector_late_tick_restarts_its_deadlines() -> None:
    watcher = Watcher(1, 2)
    watcher.run(1.0)
    watcher.now += 3.0  # this process stood still, and so may the whole machine have done
    assert watcher.detector.tick(watcher.now) == []
    assert watcher.detector.silence(1, watcher.now) == 0
    assert SHARED_MEMORY_SECONDS - POLL_SECONDS < watcher.loses_after(1) < SHARED_MEMORY_SECONDS + 3 * STEP


def test_detector_tick_that_is_a_little_late_counts() -> None:
    watcher = Watcher(1)
    watcher.run(1.0)
    watcher.silent.add(1)
    for _ in range(4):
        watcher.now = watcher.detector.due + LATE_SECONDS * 0.9
        if watcher.tick():
            return
    raise AssertionError("never found")


@given(st.lists(st.floats(LATE_SECONDS + 0.01, 10.0), min_size=1, max_size=30))
def test_detector_that_always_ticks_late_accuses_no_rank(gaps: list[float]) -> None:
    watcher = Watcher(1, 2)
    watcher.run(0.5)
    watcher.silent = {1, 2}
    for gap in gaps:
        watcher.now = watcher.detector.due + gap
        assert watcher.tick() == []


@given(st.lists(st.tuples(st.floats(0.0, 0.14), st.floats(0.0, LATE_SECONDS)), min_size=1, max_size=100))
def test_detector_beats_held_up_for_less_than_the_least_silence_raise_no_alarm(held: list[tuple[float, float]]) -> None:
    """Whenever beats come 0.05 to 0.19 s apart and looks come a little late, nobody is suspected over links."""
    watcher = Watcher(1, least=LINK_SECONDS)
    watcher.run(0.5)
    watcher.silent = {1}  # its beats are made here
    next_beat = watcher.now
    for number, (beat_late, look_late) in enumerate(held):
        watcher.now = watcher.detector.due + look_late - EPSILON
        if watcher.now >= next_beat:
            watcher.detector.record_heartbeat(1, watcher.now, 10_000 + number)
            next_beat = watcher.now + HEARTBEAT_SECONDS + beat_late
        assert watcher.detector.tick(watcher.now) == []


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=200),
    st.sampled_from([SHARED_MEMORY_SECONDS, LINK_SECONDS]),
)
def test_detector_allowed_silence_has_bounds(intervals: list[float], least: float) -> None:
    detector = Detector()
    now = 50.0
    detector.watch(1, now, least)
    for number, interval in enumerate(intervals):
        now += interval
        detector.record_heartbeat(1, now, number)
    detector.restart(now)
    detector.due = now + least - EPSILON
    assert detector.tick(now + least - EPSILON) == []
    detector.due = now + MAX_SILENCE_SECONDS + EPSILON
    assert [peer for peer, _ in detector.tick(now + MAX_SILENCE_SECONDS + EPSILON)] == [1]


def test_detector_irregular_rank_may_be_silent_longer() -> None:
    detector = Detector()
    now = 10.0
    detector.watch(1, now, SHARED_MEMORY_SECONDS)
    for number in range(100):
        now += 0.05 if number % 2 else 0.15
        detector.record_heartbeat(1, now, number)
    detector.due = now + 0.4
    assert detector.tick(now + 0.4) == []  # the median is 0.1 or so, and each differs from it by 0.05
    detector.due = now + 0.55
    assert [peer for peer, _ in detector.tick(now + 0.55)] == [1]


@pytest.mark.parametrize(
    ("observation", "seconds"), [(Observation.OTHER, RUNNING_SECONDS), (Observation.STARVED, STARVED_SECONDS)]
)
def test_detector_rank_that_was_not_stopped_has_more_time_up_to_a_limit(
    observation: Observation, seconds: float
) -> None:
    watcher = Watcher(1, 2)
    watcher.run(1.0)
    watcher.observations = {2: observation}
    assert seconds - 2 * STEP < watcher.loses_after(2) < seconds + 2 * STEP


def test_detector_stopped_rank_gets_no_extra_time() -> None:
    """However irregular it was."""
    watcher = Watcher(2)
    watcher.now = irregular(watcher.detector, 1, watcher.now)
    watcher.observations = {1: Observation.STOPPED}
    began = watcher.now
    assert watcher.run(5.0) == [1]
    assert watcher.now - began < SHARED_MEMORY_SECONDS + 2 * STEP


def test_detector_starved_rank_is_forgiven() -> None:
    watcher = Watcher(1, 2)
    watcher.run(1.0)
    watcher.observations, watcher.silent = {2: Observation.STARVED}, {2}
    assert watcher.run(STARVED_SECONDS - 2 * STEP) == []
    watcher.silent = set()
    assert watcher.run(1.0) == []


def test_detector_rank_without_a_beat_may_be_silent_for_the_longest_time() -> None:
    watcher = Watcher(1)
    assert MAX_SILENCE_SECONDS - STEP < watcher.loses_after(1) < MAX_SILENCE_SECONDS + 2 * STEP


def test_detector_rank_that_left_is_not_missed() -> None:
    watcher = Watcher(1, 2)
    watcher.run(1.0)
    watcher.silent = {2}
    watcher.detector.forget(2)
    watcher.detector.forget(2)
    assert watcher.detector.watched == (1,)
    assert watcher.run(5.0) == []


def test_detector_ranks_without_the_core_get_ten_seconds_and_delay_no_confirmation() -> None:
    watcher = Watcher(1)
    watcher.detector.watch(2, watcher.now, 10.0, 10.0, slow=True)
    watcher.detector.record_heartbeat(2, watcher.now)
    watcher.run(1.0)
    assert watcher.loses_after(1) < SHARED_MEMORY_SECONDS + 2 * STEP
    watcher.detector.forget(1)
    assert watcher.detector.tick(watcher.now + 0.01) == []
    assert watcher.detector.due == pytest.approx(watcher.now + 0.51), "there is no hurry"
    watcher.peers = ()
    assert watcher.run(8.0) == []
    assert watcher.run(3.0) == [2]


class RemoteWatcher(Watcher):
    """One whose peers are on other hosts."""

    def __init__(self, *peers: int, deadline: float) -> None:
        super().__init__(*peers)
        for peer in peers:
            self.detector.watch_remote(peer, self.now, deadline)


@pytest.mark.parametrize(
    ("deadline", "observation", "seconds"),
    [
        (3.0, None, 3.0),
        (3.0, Observation.OTHER, 3.0),
        (3.0, Observation.OUTAGE, 3.0),
        (3.0, Observation.STARVED, STARVED_SECONDS),
        (3.0, Observation.STOPPED, LINK_SECONDS),
        (30.0, None, STARVED_SECONDS),
        (30.0, Observation.OUTAGE, 30.0),
        (0.5, None, 0.5),
    ],
)
def test_detector_rank_on_another_host_may_be_silent_until_the_deadline(
    deadline: float, observation: Observation | None, seconds: float
) -> None:
    watcher = RemoteWatcher(1, 2, deadline=deadline)
    watcher.run(1.0)
    watcher.observations = {} if observation is None else {2: observation}
    began = watcher.now
    watcher.silent = {2}
    assert watcher.run(60.0) == [2]
    assert seconds - 2 * STEP < watcher.now - began < seconds + 3 * STEP


@pytest.mark.parametrize("peers", [(1, 2), (2, 1), (1, 2, 3)])
def test_detector_ranks_of_a_host_that_is_cut_off_are_reported_together(peers: tuple[int, ...]) -> None:
    for phase in range(20):
        watcher = RemoteWatcher(1, 2, 3, 4, deadline=3.0)
        watcher.run(2.0 + phase / 1000)
        assert 3.0 - 2 * STEP < watcher.loses_after(*peers) < 3.0 + 4 * STEP


def test_detector_silent_host_is_reported_although_another_host_is_silent_too() -> None:
    watcher = RemoteWatcher(1, 2, deadline=3.0)
    watcher.run(1.0)
    began = watcher.now
    watcher.silent = {1}
    watcher.run(2.9)
    watcher.silent = {1, 2}
    assert watcher.run(60.0) == [1]
    assert watcher.now - began < 3.0 + REMOTE_CONFIRM_SECONDS + 3 * STEP


def test_detector_that_often_ticks_late_still_misses_a_rank_on_another_host() -> None:
    """Each time that it is late, it forgives as much silence as it was late by, and no more."""
    watcher = RemoteWatcher(1, 2, deadline=3.0)
    watcher.run(1.0)
    watcher.silent = {2}
    began, missed = watcher.now, 0.0
    while not (lost := watcher.run(0.5)):
        assert watcher.now - began < 60
        watcher.now = watcher.detector.due + 2 * LATE_SECONDS
        missed += 2 * LATE_SECONDS
    assert lost == [2]
    assert watcher.now - began == pytest.approx(3.0 + missed, abs=4 * STEP)


def test_standstill_of_the_process_is_known_for_a_while() -> None:
    own, now = Standstill(), 1000.0
    assert not own.lately(now), "before the first look there is nothing to be late for"
    for _ in range(3):
        own.tick(now)
        own.expect_tick(now + POLL_SECONDS)
        now += POLL_SECONDS + STALL_SECONDS
        assert not own.lately(now - EPSILON)
    now += EPSILON
    assert own.lately(now), "even if it has not looked yet"
    own.tick(now)
    own.expect_tick(now + POLL_SECONDS)
    assert own.lately(now)
    own.tick(now + POLL_SECONDS)
    own.expect_tick(now + 2 * RECENT_SECONDS)
    assert own.lately(now + RECENT_SECONDS - EPSILON)
    assert not own.lately(now + RECENT_SECONDS)
