"""The control protocol of several ranks, connected without links, threads or a clock; and the Control around it."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import Broken
from gradwire.liveness.call_log import MAX_CALLS, Call, CallDescription, CallLog, call_site
from gradwire.liveness.control import Control
from gradwire.liveness.control_messages import (
    CallsReport,
    FindingReport,
    GatherValue,
    Goodbye,
    Message,
    Position,
    PositionQuery,
    Progress,
    VerdictReport,
    decode,
    encode,
)
from gradwire.liveness.control_protocol import (
    ANNOUNCE_SECONDS,
    BEHIND_SECONDS,
    AskPositions,
    Break,
    Called,
    ControlProtocol,
    Event,
    Found,
    Leaving,
    Linked,
    Lost,
    Missed,
    Received,
    Send,
    Tick,
    Unwatched,
    Watched,
)
from gradwire.liveness.verdict import DECISION_SECONDS, Finding

WORLD = 1
DUE = DECISION_SECONDS + 0.001


def names(size: int) -> list[str]:
    return [f"rank {rank} (host h{rank}, pid {rank})" for rank in range(size)]


class Ranks:
    """Protocols whose messages wait in a queue until they are delivered. Messages to dead ranks are lost."""

    def __init__(self, size: int) -> None:
        self.now = 1000.0
        self.sent: deque[tuple[int, int, bytes]] = deque()
        self.broke = [0] * size
        self.dead: set[int] = set()
        self.controls = [ControlProtocol(rank, names(size), 5) for rank in range(size)]
        self.logs = [CallLog(WORLD, range(size)) for _ in range(size)]
        for rank, log in enumerate(self.logs):
            self.handle(rank, Watched(log))

    def handle(self, rank: int, event: Event) -> None:
        """Pass an event to a rank's protocol, and carry out its instructions."""
        for instruction in self.controls[rank].handle(event, self.now):
            match instruction:
                case Send(peers, message):
                    self.sent.extend((rank, peer, encode(message)) for peer in peers)
                case Break():
                    self.broke[rank] += 1

    def receive(self, rank: int, source: int, payload: bytes) -> None:
        message = decode(payload, len(self.controls))
        if message is not None:
            self.handle(rank, Received(source, message))

    def deliver(self, *, to: set[int] | None = None) -> None:
        kept: deque[tuple[int, int, bytes]] = deque()
        while self.sent:
            source, target, payload = self.sent.popleft()
            if target in self.dead:
                continue
            if to is not None and target not in to:
                kept.append((source, target, payload))
                continue
            self.receive(target, source, payload)
        self.sent = kept

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for rank in range(len(self.controls)):
            if rank not in self.dead:
                self.handle(rank, Tick())

    def kill(self, rank: int, seen_by: set[int] | None = None) -> None:
        self.dead.add(rank)
        for other in range(len(self.controls)):
            if other not in self.dead and (seen_by is None or other in seen_by):
                self.handle(other, Lost(rank))

    def errors(self) -> dict[int, Broken]:
        living = [rank for rank in range(len(self.controls)) if rank not in self.dead]
        assert all(self.controls[rank].decided for rank in living), "not all ranks have decided"
        return {rank: self.controls[rank].error("barrier", "") for rank in living}

    def call(self, rank: int, what: str) -> None:
        meaning = CallDescription(what, f"{what}()", hash(what) & 0xFFFFFFFF)
        self.logs[rank].record(meaning, call_site())


def test_control_loss_seen_by_one_rank_is_peer_lost_on_all() -> None:
    ranks = Ranks(4)
    ranks.kill(2, seen_by={0})
    ranks.deliver()
    assert ranks.broke[0] >= 1
    assert not any(ranks.controls[rank].intact for rank in (0, 1, 3))
    ranks.pass_time(DUE)
    for error in ranks.errors().values():
        assert (type(error).__name__, error.culprit, error.generation) == ("PeerLost", 2, 5)
        assert str(error) == "rank 2 (host h2, pid 2) closed its link"


def test_control_two_losses_in_one_window_all_ranks_name_the_lower() -> None:
    ranks = Ranks(4)
    ranks.kill(3, seen_by={0})
    ranks.now += DECISION_SECONDS / 2
    ranks.kill(1, seen_by={2})
    ranks.deliver()
    ranks.pass_time(DUE)
    assert {error.culprit for error in ranks.errors().values()} == {1}


def test_control_survivor_that_decides_and_ends_first_is_not_named() -> None:
    """Rank 1 is slow. Before it decides on the loss, rank 0 raises and ends without a goodbye."""
    ranks = Ranks(4)
    ranks.kill(2, seen_by={0})
    ranks.deliver(to={3})
    ranks.now += DUE
    ranks.handle(0, Tick())  # rank 0 decides, raises, and calls os._exit
    ranks.deliver()  # a link delivers everything that was sent before its end
    ranks.kill(0)
    ranks.deliver()
    ranks.pass_time(DUE)
    assert {error.culprit for error in ranks.errors().values()} == {2}


def test_control_link_that_ends_after_a_goodbye_is_no_loss() -> None:
    ranks = Ranks(3)
    ranks.handle(1, Leaving())
    ranks.deliver()
    ranks.kill(1)
    assert ranks.controls[0].intact
    assert ranks.controls[2].intact
    assert ranks.controls[0].has_left(1)


def test_control_rank_needed_after_its_goodbye_is_peer_lost_on_all() -> None:
    ranks = Ranks(3)
    ranks.handle(1, Leaving())
    ranks.deliver()
    ranks.kill(1)
    ranks.handle(2, Missed(1))
    ranks.handle(2, Missed(0))  # no effect: rank 0 has not left
    ranks.deliver()
    ranks.pass_time(DUE)
    assert {(error.culprit, str(error)) for error in ranks.errors().values()} == {
        (1, "rank 1 (host h1, pid 1) left the job")
    }


def test_control_abort_takes_precedence_over_the_loss_of_its_sender() -> None:
    ranks = Ranks(3)
    ranks.handle(1, Found(Finding("aborted", "KeyError: 'x'", 1)))
    ranks.deliver()
    ranks.kill(1)
    ranks.deliver()
    ranks.pass_time(DUE)
    for error in ranks.errors().values():
        assert (type(error).__name__, str(error)) == ("Aborted", "rank 1 (host h1, pid 1) gave up: KeyError: 'x'")


def test_control_rank_declared_lost_raises_aborted_and_reports_no_other() -> None:
    """Rank 0 declared rank 2 lost and closed its link. Rank 2 must not report rank 0 as lost to rank 1."""
    ranks = Ranks(3)
    ranks.handle(0, Lost(2, "sent invalid data"))
    ranks.deliver(to={2})
    ranks.handle(2, Lost(0))
    ranks.deliver()
    ranks.pass_time(DUE)
    errors = ranks.errors()
    assert {errors[rank].culprit for rank in (0, 1)} == {2}
    assert type(errors[1]).__name__ == "PeerLost"
    assert (type(errors[2]).__name__, errors[2].culprit) == ("Aborted", 2)


def test_control_link_made_after_a_loss_receives_the_finding() -> None:
    ranks = Ranks(3)
    ranks.handle(0, Lost(1))
    ranks.sent.clear()  # no link to rank 2 was open yet
    ranks.handle(0, Linked(2))
    ranks.deliver()
    assert not ranks.controls[2].intact


# -- chains -----------------------------------------------------------------------------------------------------------


def make_calls(ranks: Ranks, *whats: str) -> None:
    for rank, what in enumerate(whats):
        if what:
            ranks.call(rank, what)


def test_control_calls_that_differ_are_found_without_collective_messages() -> None:
    ranks = Ranks(3)
    make_calls(ranks, "barrier", "barrier", "barrier")
    ranks.pass_time(0.1)
    ranks.deliver()
    assert all(control.intact for control in ranks.controls)
    make_calls(ranks, "all_reduce", "broadcast", "broadcast")
    ranks.pass_time(ANNOUNCE_SECONDS)
    ranks.deliver()
    errors = ranks.errors()
    assert {type(error).__name__ for error in errors.values()} == {"CollectiveMismatch"}
    assert {error.culprit for error in errors.values()} == {0}
    assert len({str(error) for error in errors.values()}) == 1
    assert "rank 0: all_reduce() at test_control.py:" in str(errors[2])


def test_control_ranks_in_constant_calls_announce_progress_twice_a_second() -> None:
    ranks, sent = Ranks(2), 0
    for _ in range(100):
        make_calls(ranks, "barrier", "barrier")
        ranks.pass_time(0.1)
        sent += len(ranks.sent)
        ranks.deliver()
    assert all(control.intact for control in ranks.controls)
    assert 2 * 19 <= sent <= 2 * 21  # messages of two ranks in 10 s


def test_control_compares_calls_when_the_slower_rank_makes_them() -> None:
    ranks = Ranks(2)
    for _ in range(5):
        ranks.call(0, "barrier")
    ranks.pass_time(0.1)
    ranks.deliver()
    for _ in range(4):
        ranks.call(1, "barrier")
    ranks.pass_time(0.1)
    ranks.deliver()
    assert all(control.intact for control in ranks.controls)
    ranks.call(1, "all_reduce")
    ranks.pass_time(0.1)
    ranks.deliver()
    assert not any(control.intact for control in ranks.controls)


def test_control_does_not_compare_calls_that_the_log_dropped() -> None:
    ranks = Ranks(2)
    for _ in range(MAX_CALLS + 10):
        ranks.call(0, "barrier")
    ranks.call(1, "all_reduce")
    ranks.pass_time(0.1)
    ranks.deliver()
    assert all(control.intact for control in ranks.controls), "found only at the next call that both logs have"


def test_control_mismatch_waits_for_a_rank_that_has_not_made_the_call() -> None:
    ranks = Ranks(3)
    make_calls(ranks, "all_reduce", "broadcast", "")
    ranks.pass_time(0.05)
    ranks.deliver()
    assert not ranks.controls[0].decided, "rank 2 may still make the call"
    ranks.call(2, "broadcast")
    ranks.handle(2, Called())
    ranks.deliver()
    assert {error.culprit for error in ranks.errors().values()} == {0}


def test_control_mismatch_shows_the_last_call_of_a_rank_that_is_behind() -> None:
    ranks = Ranks(3)
    make_calls(ranks, "barrier", "barrier", "barrier")
    make_calls(ranks, "all_reduce", "broadcast", "")
    ranks.pass_time(0.05)
    ranks.deliver()
    ranks.pass_time(BEHIND_SECONDS + 0.01)
    ranks.deliver()
    for error in ranks.errors().values():
        assert "rank 2: has not reached this call; its last call was barrier() at test_control.py:" in str(error)


def test_control_does_not_compare_calls_of_closed_groups() -> None:
    ranks = Ranks(2)
    ranks.handle(0, Unwatched(ranks.logs[0]))
    assert ranks.controls[0].watches(WORLD) is None
    make_calls(ranks, "all_reduce", "broadcast")
    ranks.pass_time(0.1)
    ranks.deliver()
    assert ranks.controls[0].intact


# -- questions --------------------------------------------------------------------------------------------------------


def test_position_query_is_answered_with_the_last_call() -> None:
    ranks = Ranks(3)
    make_calls(ranks, "barrier", "barrier", "")
    ranks.handle(0, AskPositions(ranks.logs[0]))
    assert [ranks.controls[0].position(WORLD, peer) for peer in (1, 2)] == [None, None]
    ranks.deliver()
    one, two = (ranks.controls[0].position(WORLD, peer) for peer in (1, 2))
    assert one is not None
    assert two is not None
    assert (one.sequence, two.sequence) == (1, 0)
    assert one.last.startswith("barrier() #1 at test_control.py:")
    assert two.last == "none"


# -- messages ---------------------------------------------------------------------------------------------------------

CALL = Call(3, 0xEF, "barrier()", "train.py:3", ("w: float32[4]",))


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (
            FindingReport(Finding("lost", "died", 2)),
            (
                '{"t":"finding","finding":{"kind":"lost","reason":"died","culprit":2,"seconds":null,"operation":null,'
                '"group":0,"sequence":0}}'
            ),
        ),
        (
            VerdictReport(Finding("timeout", "late", None, 0.5, "barrier")),
            (
                '{"t":"verdict","finding":{"kind":"timeout","reason":"late","culprit":null,"seconds":0.5,'
                '"operation":"barrier","group":0,"sequence":0}}'
            ),
        ),
        (
            CallsReport(WORLD, (0, 2), (CALL,)),
            (
                '{"t":"calls","g":1,"among":[0,2],"calls":[{"sequence":3,"fingerprint":239,"what":"barrier()",'
                '"site":"train.py:3","items":["w: float32[4]"]}]}'
            ),
        ),
        (Goodbye(), '{"t":"bye"}'),
        (Progress(WORLD, 7, 99), '{"t":"at","g":1,"s":7,"c":99}'),
        (PositionQuery(WORLD), '{"t":"where","g":1}'),
        (Position(WORLD, 7, 6, "barrier() #7"), '{"t":"here","g":1,"s":7,"f":6,"last":"barrier() #7"}'),
        (GatherValue(4, "init", [1, None]), '{"t":"tell","n":4,"o":"init","v":[1,null]}'),
    ],
    ids=lambda case: type(case).__name__ if not isinstance(case, str) else "",
)
def test_message_has_the_bytes_of_the_wire_format_and_is_read_back(message: Message, payload: str) -> None:
    assert encode(message) == payload.encode()
    assert decode(payload.encode(), 3) == message


def test_message_of_a_later_version_is_ignored() -> None:
    assert decode(b'{"t":"of a later version"}', 3) is None


# -- Control: threads that wait ---------------------------------------------------------------------------------------


def control_of_rank_0(post: Callable[[int, bytes], None] = lambda peer, payload: None) -> Control:
    return Control(0, names(2), 5, post, lambda: None)


def test_control_positions_returns_the_answers_that_arrive_in_time() -> None:
    asked: list[bytes] = []

    def answer(peer: int, payload: bytes) -> None:
        asked.append(payload)
        control.receive(peer, encode(Position(WORLD, 2, 1, "barrier() #2")), 0.0)

    control, log = control_of_rank_0(answer), CallLog(WORLD, range(2))
    control.watch(log)
    assert control.positions(log, 60.0) == {1: Position(WORLD, 2, 1, "barrier() #2")}
    assert asked == [encode(PositionQuery(WORLD))]


def test_control_without_answers_returns_no_positions() -> None:
    control, log = control_of_rank_0(), CallLog(WORLD, range(2))
    control.watch(log)
    assert control.positions(log, 0.01) == {}


def test_await_verdict_without_another_thread_decides_itself() -> None:
    control = control_of_rank_0()
    control.report(Finding("aborted", "no", 0), time.monotonic())
    assert control.await_verdict(60.0)


# -- what peers may send ----------------------------------------------------------------------------------------------


@given(st.binary(max_size=200) | st.text(max_size=60).map(str.encode))
def test_control_random_bytes_are_refused_or_ignored(words: bytes) -> None:
    ranks = Ranks(2)
    try:
        ranks.receive(0, 1, words)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return
    assert ranks.controls[0].intact


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("finding", "calls", "among", "g", "s", "c", "f", "last", "kind", "reason", "culprit", "group", "sequence")


@given(
    st.sampled_from(["finding", "verdict", "calls", "bye", "at", "where", "here"]),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6),
)
def test_control_known_messages_with_random_fields_are_refused_or_understood(
    kind: str, fields: dict[str, object]
) -> None:
    ranks = Ranks(2)
    ranks.call(0, "barrier")
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, AttributeError):
        ranks.receive(0, 1, json.dumps({**fields, "t": kind}).encode())
    ranks.pass_time(1.0)  # accepted messages must not cause an error later
    ranks.pass_time(1.0)
    if not ranks.controls[0].intact:
        assert ranks.controls[0].decided
        assert isinstance(ranks.controls[0].error(None, ""), Broken)


@pytest.mark.parametrize("size", [2, 5])
def test_control_leaving_sends_a_goodbye_to_every_other_rank(size: int) -> None:
    ranks = Ranks(size)
    ranks.handle(0, Leaving())
    assert [(source, target) for source, target, _ in ranks.sent] == [(0, rank) for rank in range(1, size)]
