"""The detector: heartbeats and the time go in, lost ranks come out, without a clock or threads."""

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
    """A detector that ticks when it is due, with peers that send heartbeats."""

    def __init__(self, *peers: int, least: float = SHARED_MEMORY_SECONDS, most: float = MAX_SILENCE_SECONDS) -> None:
        self.now = 1000.0
        self.detector = Detector()
        self.silent: set[int] = set()
        self.observations: dict[int, Observation] = {}  # of peers that can be observed
        self.peers = peers
        self._beats = dict.fromkeys(peers, 0)
        self._next = {peer: self.now + STEP * (index + 1) / (len(peers) + 1) for index, peer in enumerate(peers)}
        for peer in peers:
            self.detector.watch(peer, self.now, least, most)

    def send_heartbeats(self) -> None:
        """Record the heartbeats that the peers have sent until now."""
        for peer in self.peers:
            while self._next[peer] <= self.now:
                self._next[peer] += STEP
                if peer not in self.silent:
                    self._beats[peer] += 1
            if self._beats[peer]:
                self.detector.record_heartbeat(peer, self.now, self._beats[peer])

    def tick(self) -> list[int]:
        self.send_heartbeats()
        return [peer for peer, _ in self.detector.tick(self.now, self.observations.get)]

    def run(self, seconds: float) -> list[int]:
        """Let time pass until a rank is lost, at most this long."""
        until = self.now + seconds
        while self.now < until:
            if lost := self.tick():
                return lost
            self.now = max(self.now + 0.001, self.detector.due)
        return []

    def seconds_to_report(self, *peers: int) -> float:
        """Return the seconds from the beginning of a silence until it is reported."""
        began = self.now
        self.silent |= set(peers)
        assert self.run(5.0) == sorted(peers)
        return self.now - began


def test_detector_rank_that_sends_heartbeats_is_not_suspected() -> None:
    assert Watcher(1, 2, 3).run(60.0) == []


def test_detector_reports_silence_after_the_allowed_time_and_not_earlier() -> None:
    watcher = Watcher(1, 2, 3)
    watcher.run(5.0)
    assert SHARED_MEMORY_SECONDS - POLL_SECONDS < watcher.seconds_to_report(2) < SHARED_MEMORY_SECONDS + 3 * STEP


def test_detector_reports_the_length_of_the_silence() -> None:
    watcher = Watcher(1, 2)
    watcher.run(1.0)
    watcher.seconds_to_report(2)
    assert watcher.detector.silence(2, watcher.now) == pytest.approx(SHARED_MEMORY_SECONDS, abs=2.5 * STEP)
    assert watcher.detector.silence(1, watcher.now) == pytest.approx(0, abs=1.5 * STEP)
    assert watcher.detector.silence(7, watcher.now) is None


@pytest.mark.parametrize("peers", [(1, 3), (3, 1), (1, 2, 3)])
def test_detector_ranks_that_fall_silent_together_are_reported_together(peers: tuple[int, ...]) -> None:
    """Their last heartbeats and their allowed silences differ."""
    for phase in range(50):
        watcher = Watcher(1, 2, 3, 4)
        watcher.run(2.0 + phase / 1000)
        assert watcher.seconds_to_report(*peers) < SHARED_MEMORY_SECONDS + 4 * STEP


def irregular(detector: Detector, peer: int, now: float) -> float:
    """Record irregular heartbeats, so that the rank may be silent for long. Return the time of the last one."""
    detector.watch(peer, now, SHARED_MEMORY_SECONDS)
    for number in range(40):
        now += 0.3 if number % 2 else 0.05
        detector.record_heartbeat(peer, now, number)
    return now


def tick(detector: Detector, now: float, observations: dict[int, Observation] | None = None) -> list[int]:
    """Tick at this time, as if the tick were due then."""
    detector.due = now
    return [peer for peer, _ in detector.tick(now, (observations or {}).get)]


def two() -> tuple[Detector, float]:
    """Return a detector and the time of the last heartbeats. Rank 1 may be silent for 0.6 s and rank 2 for 0.2 s."""
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
    detector.record_heartbeat(1, now + SHARED_MEMORY_SECONDS - STEP / 2, 1 << 20)  # just before rank 2 is suspected
    assert tick(detector, now + CONFIRM_SECONDS - EPSILON, starved) == []
    assert tick(detector, now + CONFIRM_SECONDS + EPSILON, starved) == [2]


def test_detector_confirmation_ends_when_all_other_ranks_sent_heartbeats() -> None:
    detector, now = two()
    assert tick(detector, now + 0.201) == []
    detector.record_heartbeat(1, now + 0.21)
    assert tick(detector, now + 0.21) == [2]


def test_detector_suspect_with_a_heartbeat_during_the_confirmation_is_cleared() -> None:
    detector, now = two()
    assert tick(detector, now + 0.201) == []
    detector.record_heartbeat(2, now + 0.21)
    assert tick(detector, now + 0.21) == []
    detector.record_heartbeat(1, now + 0.22)
    assert tick(detector, now + 0.25) == []
    assert detector.due == pytest.approx(now + 0.3), "no rank is suspected, but a heartbeat is missing"


def test_detector_late_tick_restarts_its_deadlines() -> None:
    watcher = Watcher(1, 2)
    watcher.run(1.0)
    watcher.now += 3.0  # this process stood still, and perhaps the whole machine
    assert watcher.detector.tick(watcher.now) == []
    assert watcher.detector.silence(1, watcher.now) == 0
    assert SHARED_MEMORY_SECONDS - POLL_SECONDS < watcher.seconds_to_report(1) < SHARED_MEMORY_SECONDS + 3 * STEP


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
def test_detector_that_always_ticks_late_reports_no_rank(gaps: list[float]) -> None:
    watcher = Watcher(1, 2)
    watcher.run(0.5)
    watcher.silent = {1, 2}
    for gap in gaps:
        watcher.now = watcher.detector.due + gap
        assert watcher.tick() == []


@given(st.lists(st.tuples(st.floats(0.0, 0.14), st.floats(0.0, LATE_SECONDS)), min_size=1, max_size=100))
def test_detector_heartbeats_delayed_less_than_the_floor_cause_no_suspicion(held: list[tuple[float, float]]) -> None:
    """Heartbeats over links that are 0.05 to 0.19 s apart, with ticks that are a little late, cause no suspicion."""
    watcher = Watcher(1, least=LINK_SECONDS)
    watcher.run(0.5)
    watcher.silent = {1}  # the test itself records its heartbeats
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
    assert detector.tick(now + 0.4) == []  # the median is about 0.1, and each interval differs from it by 0.05
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
    assert seconds - 2 * STEP < watcher.seconds_to_report(2) < seconds + 2 * STEP


def test_detector_stopped_rank_gets_no_extra_time() -> None:
    """Irregular heartbeats before that make no difference."""
    watcher = Watcher(2)
    watcher.now = irregular(watcher.detector, 1, watcher.now)
    watcher.observations = {1: Observation.STOPPED}
    began = watcher.now
    assert watcher.run(5.0) == [1]
    assert watcher.now - began < SHARED_MEMORY_SECONDS + 2 * STEP


def test_detector_starved_rank_gets_more_time() -> None:
    watcher = Watcher(1, 2)
    watcher.run(1.0)
    watcher.observations, watcher.silent = {2: Observation.STARVED}, {2}
    assert watcher.run(STARVED_SECONDS - 2 * STEP) == []
    watcher.silent = set()
    assert watcher.run(1.0) == []


def test_detector_rank_without_a_heartbeat_may_be_silent_for_the_longest_time() -> None:
    watcher = Watcher(1)
    assert MAX_SILENCE_SECONDS - STEP < watcher.seconds_to_report(1) < MAX_SILENCE_SECONDS + 2 * STEP


def test_detector_rank_that_left_is_not_reported() -> None:
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
    assert watcher.seconds_to_report(1) < SHARED_MEMORY_SECONDS + 2 * STEP
    watcher.detector.forget(1)
    assert watcher.detector.tick(watcher.now + 0.01) == []
    assert watcher.detector.due == pytest.approx(watcher.now + 0.51), "slow ranks are checked less often"
    watcher.peers = ()
    assert watcher.run(8.0) == []
    assert watcher.run(3.0) == [2]


class RemoteWatcher(Watcher):
    """A watcher whose peers are on other hosts."""

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
        assert 3.0 - 2 * STEP < watcher.seconds_to_report(*peers) < 3.0 + 4 * STEP


def test_detector_silent_host_is_reported_although_another_host_is_silent_too() -> None:
    watcher = RemoteWatcher(1, 2, deadline=3.0)
    watcher.run(1.0)
    began = watcher.now
    watcher.silent = {1}
    watcher.run(2.9)
    watcher.silent = {1, 2}
    assert watcher.run(60.0) == [1]
    assert watcher.now - began < 3.0 + REMOTE_CONFIRM_SECONDS + 3 * STEP


def test_detector_that_often_ticks_late_still_reports_a_rank_on_another_host() -> None:
    """A late tick extends deadlines between hosts by its delay, and by no more."""
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
    assert not own.lately(now), "before the first tick there is nothing to be late for"
    for _ in range(3):
        own.tick(now)
        own.expect_tick(now + POLL_SECONDS)
        now += POLL_SECONDS + STALL_SECONDS
        assert not own.lately(now - EPSILON)
    now += EPSILON
    assert own.lately(now), "even before the late tick"
    own.tick(now)
    own.expect_tick(now + POLL_SECONDS)
    assert own.lately(now)
    own.tick(now + POLL_SECONDS)
    own.expect_tick(now + 2 * RECENT_SECONDS)
    assert own.lately(now + RECENT_SECONDS - EPSILON)
    assert not own.lately(now + RECENT_SECONDS)
