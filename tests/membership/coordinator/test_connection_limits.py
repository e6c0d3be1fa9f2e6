"""Tests of the limits of connections, without sockets and without a clock."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gradwire.membership.coordinator.connection_limits import ConnectionLimits, Limits, Reason, source_of

FEW = Limits(
    proven=4,
    unproven=2,
    unauthenticated=5,
    unauthenticated_per_source=3,
    seconds_to_prove=5.0,
    seconds_to_prove_when_full=1.0,
    seconds_between_replacements=0.125,
    seconds_to_wait=10.0,
    seconds_between_proofs=30.0,
)


def arrive(state: ConnectionLimits, connections: str, source: str, now: float) -> None:
    for connection in connections:
        state.arrived(int(connection), source, now)


def test_connection_within_the_limits_is_opened_at_once() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "1", "a", 0.0)
    decisions = state.decide(0.0)
    assert (decisions.opened, decisions.closed, state.due()) == ([1], [], 5.0)


def test_connection_that_proves_nothing_is_closed_in_time() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "1", "a", 0.0)
    state.decide(0.0)
    assert state.decide(4.9).closed == []
    assert state.decide(5.0).closed == [(1, Reason.TOO_SLOW)]
    assert state.due() is None


def test_proven_connection_without_further_proofs_is_closed() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "1", "a", 0.0)
    state.decide(0.0)
    state.proved(1, 4.0)
    state.proved(1, 20.0)
    assert (state.decide(49.9).closed, state.due()) == ([], 50.0)
    assert state.decide(50.0).closed == [(1, Reason.IDLE)]


def test_connections_beyond_the_limit_of_unproven_ones_wait() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "123", "a", 0.0)
    assert len(state.decide(0.0).opened) == 2
    assert state.decide(0.1).opened == []
    state.proved(3, 0.2)
    assert state.decide(0.2).opened == [1]


def test_unproven_connections_are_parked_sooner_while_others_wait() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "12", "a", 0.0)
    assert state.decide(0.0).opened == [2, 1]
    arrive(state, "3", "b", 0.5)
    assert (state.decide(0.5).opened, state.due()) == ([], 1.0)
    decisions = state.decide(1.0)
    assert (decisions.opened, decisions.parked, decisions.closed) == ([3], [2], [])
    state.proved(1, 1.0)
    state.proved(3, 1.0)
    assert state.due() == 6.0
    assert state.decide(6.0).closed == [(2, Reason.CROWDED)]


def test_waiting_connections_are_opened_newest_first_and_each_source_in_turn() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "123", "a", 0.0)
    arrive(state, "45", "b", 0.0)
    assert state.decide(0.0).opened == [3, 5]
    state.ended(3)
    state.ended(5)
    assert state.decide(0.1).opened == [2, 4]


def test_unproven_connections_are_parked_one_at_a_time() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "12", "a", 0.0)
    assert state.decide(0.0).opened == [2, 1]
    arrive(state, "34", "b", 0.0)
    assert state.decide(1.0).parked == [2]
    assert (state.decide(1.1).parked, state.due()) == ([], 1.125)
    assert state.decide(1.125).parked == [1]


def test_parked_connection_does_not_become_proven() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "12", "a", 0.0)
    state.decide(0.0)
    arrive(state, "3", "b", 0.0)
    assert state.decide(1.0).parked == [2]
    state.proved(2, 1.1)
    state.ended(1)
    state.ended(3)
    assert state.decide(6.0).closed == [(2, Reason.CROWDED)]


def test_waiting_connection_is_closed_in_time() -> None:
    state = ConnectionLimits(Limits(unproven=0, seconds_to_wait=10.0))
    arrive(state, "1", "a", 0.0)
    assert state.decide(9.9).opened == []
    assert state.decide(10.0).closed == [(1, Reason.CROWDED)]


def test_too_many_unauthenticated_connections_of_a_source_close_its_oldest() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "1", "b", 0.0)
    arrive(state, "234", "a", 0.0)
    state.decide(0.0)
    arrive(state, "5", "a", 0.1)
    assert state.decide(0.1).closed == [(2, Reason.CROWDED)]


def test_too_many_unauthenticated_connections_close_the_oldest_of_the_largest_source() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "1", "b", 0.0)
    arrive(state, "23", "a", 0.0)
    arrive(state, "4", "c", 0.0)
    arrive(state, "5", "d", 0.0)
    state.decide(0.0)
    arrive(state, "6", "e", 0.1)
    assert state.decide(0.1).closed == [(2, Reason.CROWDED)]


def test_proven_connections_do_not_count_as_unauthenticated() -> None:
    state = ConnectionLimits(FEW)
    for connection in "123":
        arrive(state, connection, "a", 0.0)
        state.decide(0.0)
        state.proved(int(connection), 0.0)
    arrive(state, "4567", "a", 0.1)
    assert state.decide(0.1).closed == [(4, Reason.CROWDED)]


def test_too_many_proven_connections_close_the_one_with_the_oldest_proof() -> None:
    state = ConnectionLimits(FEW)
    for connection in "1234":
        arrive(state, connection, "a", 0.0)
        state.decide(0.0)
        state.proved(int(connection), 0.0)
    state.proved(1, 2.0)
    arrive(state, "56", "b", 3.0)
    assert state.decide(3.0).closed == []
    state.proved(5, 3.1)
    assert state.decide(3.1).closed == [(2, Reason.IDLE)]


def test_unauthenticated_connections_do_not_replace_proven_ones() -> None:
    state = ConnectionLimits(FEW)
    for connection in "1234":
        arrive(state, connection, "a", 0.0)
        state.decide(0.0)
        state.proved(int(connection), 0.0)
    for number in range(10, 100):
        state.arrived(number, "a", number / 10)
        assert not {closed for closed, _ in state.decide(number / 10).closed} & {1, 2, 3, 4}


def test_proof_of_a_connection_that_was_closed_changes_nothing() -> None:
    state = ConnectionLimits(FEW)
    arrive(state, "1", "a", 0.0)
    state.decide(0.0)
    state.ended(1)
    state.proved(1, 0.1)
    assert state.due() is None


@given(st.lists(st.tuples(st.sampled_from(["arrive", "prove", "end", "pass time"]), st.integers(0, 7)), max_size=60))
def test_limits_hold_after_any_history(history: list[tuple[str, int]]) -> None:
    state = ConnectionLimits(FEW)
    source: dict[int, str] = {}  # of open connections
    passed_on: dict[int, float] = {}
    proven: dict[int, float] = {}
    now = 0.0
    for number, (event, choice) in enumerate(history):
        chosen = sorted(passed_on)[choice % len(passed_on)] if passed_on else None
        if event == "arrive":
            source[number] = "abc"[choice % 3]
            state.arrived(number, source[number], now)
        elif event == "pass time":
            now += choice / 2
        elif event == "prove" and chosen is not None:
            proven[chosen] = now
            state.proved(chosen, now)
        elif chosen is not None:
            state.ended(chosen)
            for table in (source, passed_on, proven):
                table.pop(chosen, None)
        decisions = state.decide(now)
        passed_on |= dict.fromkeys(decisions.opened, now)
        for connection in decisions.parked:
            assert connection not in proven
            del passed_on[connection]
        for connection, _ in decisions.closed:
            del source[connection]
            passed_on.pop(connection, None)
            last = proven.pop(connection, None)
            assert last is None or now - last >= 30.0 or len(proven) == 4, "closed although neither idle nor replaced"
        unauthenticated = Counter(source[connection] for connection in source if connection not in proven)
        unproven = passed_on.keys() - proven.keys()
        assert unauthenticated.total() <= 5
        assert max(unauthenticated.values(), default=0) <= 3
        assert len(unproven) <= 2
        assert len(proven) <= 4
        assert all(now - passed_on[connection] < 5.0 for connection in unproven)
        due = state.due()
        assert (due is None) == (not source)
        assert due is None or due > now


def test_source_of_addresses_of_one_network_is_the_same() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:2") != source_of("2001:db8:0:1::1")
    assert source_of("10.0.0.1") == source_of("::ffff:10.0.0.1") != source_of("10.0.0.2")
