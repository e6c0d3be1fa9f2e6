"""The verdict: findings and the time go in, and one decision comes out, the same on every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import Aborted, Broken, CollectiveMismatch, GroupTimeout, PeerLost
from gradwire.liveness.call_log import Call
from gradwire.liveness.verdict import CALLS_SECONDS, DECISION_SECONDS, MAX_FINDINGS, Finding, Verdict

LOST_2 = Finding("lost", "closed its link", 2)
LOST_1 = Finding("lost", "closed its link", 1)
ABORT_3 = Finding("aborted", "ValueError: no", 3)
LATE_0 = Finding("timeout", "barrier #3 did not finish", 0, 5.0, "barrier")
MISMATCH = Finding("mismatch", "ranks called different things", None, None, "barrier", 1, 7)


def verdict(*findings: Finding, size: int = 4, now: float = 100.0) -> Verdict:
    made = Verdict(size, generation=3)
    for finding in findings:
        made.add(finding, now)
    return made


def raised(verdict: Verdict, during: str = "", who: str = "rank x") -> Broken:
    return verdict.error(operation="all_reduce", during=during, who=who)


def test_verdict_without_findings_is_intact_and_undecided() -> None:
    quiet = verdict()
    assert quiet.intact
    assert not quiet.open
    assert quiet.due() is None
    assert not quiet.decide(1e9)


def test_verdict_waits_for_reports_of_other_ranks_up_to_the_window() -> None:
    one = verdict(LOST_2)
    assert not one.intact
    assert one.open
    assert one.due() == 100.0 + DECISION_SECONDS
    assert not one.decide(100.0 + DECISION_SECONDS * 0.9)
    assert one.decide(100.0 + DECISION_SECONDS)
    assert one.decided == LOST_2
    assert not one.open
    assert one.due() is None


def test_verdict_window_opens_with_the_first_finding_and_is_not_prolonged() -> None:
    one = verdict(LOST_2)
    one.add(LOST_1, 100.0 + DECISION_SECONDS * 0.9)
    assert one.decide(100.0 + DECISION_SECONDS)
    assert one.decided == LOST_1


def test_verdict_findings_after_the_decision_change_nothing() -> None:
    one = verdict(LOST_2)
    one.decide(200.0)
    assert not one.add(LOST_1, 200.0)
    assert not one.adopt(LOST_1, 200.0)
    assert one.decided == LOST_2


@pytest.mark.parametrize("order", list(itertools.permutations([LATE_0, LOST_2, LOST_1, ABORT_3])))
def test_verdict_most_severe_finding_wins_and_among_equals_the_lowest_rank(order: tuple[Finding, ...]) -> None:
    for count, expected in ((4, ABORT_3), (3, None)):
        one = verdict(*order[:count])
        one.decide(200.0)
        if expected is None:
            kinds = {finding.kind for finding in order[:count]}
            expected = ABORT_3 if "aborted" in kinds else LOST_1 if LOST_1 in order[:count] else LOST_2
        assert one.decided == expected


@given(st.data())
def test_verdict_is_the_same_on_all_ranks_in_any_order_of_findings(data: st.DataObject) -> None:
    finding = st.builds(
        Finding,
        st.sampled_from(["lost", "aborted", "timeout"]),
        st.sampled_from(["a", "b"]),
        st.none() | st.integers(0, 3),
        group=st.integers(0, 2),
        sequence=st.integers(0, 3),
    )
    heard = data.draw(st.lists(finding, min_size=1, max_size=8))
    one = verdict(*heard)
    other = verdict(*data.draw(st.permutations(heard)))
    assert one.decide(200.0)
    assert other.decide(200.0)
    assert one.decided == other.decided


def test_verdict_repeated_finding_is_new_once() -> None:
    one = verdict()
    assert one.add(LOST_2, 100.0)
    assert not one.add(Finding("lost", "closed its link", 2), 100.0)
    assert one.findings == (LOST_2,)


def test_verdict_number_of_findings_is_bounded() -> None:
    one = verdict(*(Finding("aborted", str(number), 1) for number in range(MAX_FINDINGS + 50)))
    assert len(one.findings) == MAX_FINDINGS
    assert one.decide(200.0)


def test_verdict_undecided_rank_adopts_the_decision_of_others() -> None:
    """Otherwise a slower rank could report a rank that raised and ended as one more loss."""
    slow = verdict(LOST_2)
    assert slow.adopt(LOST_2, 100.01)
    assert slow.decided == LOST_2
    assert not slow.add(Finding("lost", "closed its link", 0), 100.02)
    unaware = verdict()
    assert unaware.adopt(ABORT_3, 100.0)
    assert not unaware.intact
    assert unaware.decided == ABORT_3


def test_verdict_goodbyes_are_remembered_by_their_time() -> None:
    one = verdict()
    one.mark_left(2, 50.0)
    one.mark_left(2, 60.0)
    assert (one.left_at(2), one.left_at(1)) == (50.0, None)
    assert one.intact


# -- disagreement -----------------------------------------------------------------------------------------------------


def call(sequence: int, what: str, line: int = 1, items: tuple[str, ...] = ()) -> Call:
    return Call(sequence, hash((what, items)), what, f"train.py:{line}", items)


def test_verdict_mismatch_waits_for_the_calls_of_all_ranks_and_shows_them() -> None:
    one = verdict(MISMATCH, size=3)
    assert one.due() == 100.0 + CALLS_SECONDS
    same = [call(5, "barrier()"), call(6, "barrier()")]
    for rank in (0, 1):
        one.add_calls(1, (0, 1, 2), rank, [*same, call(7, "all_reduce(float32[4])", 88)])
        assert not one.decide(100.0 + DECISION_SECONDS)
    one.add_calls(1, (0, 1, 2), 2, [*same, call(7, "barrier()", 90)])
    assert one.decide(100.0 + DECISION_SECONDS)
    error = raised(one)
    assert isinstance(error, CollectiveMismatch)
    assert (error.culprit, error.operation, error.generation) == (2, "all_reduce", 3)
    assert str(error) == (
        "ranks disagree on call #7\n"
        "  rank 0: all_reduce(float32[4]) at train.py:88\n"
        "  rank 1: all_reduce(float32[4]) at train.py:88\n"
        "  rank 2: barrier() at train.py:90  <-- differs"
    )


def test_verdict_mismatch_of_many_ranks_shows_equal_calls_in_one_row() -> None:
    ranks = range(16)
    one = verdict(MISMATCH, size=16)
    for rank in ranks:
        odd = {5: [call(7, "barrier()", 90)], 6: [call(6, "barrier()")]}
        one.add_calls(1, ranks, rank, odd.get(rank, [call(7, "all_reduce(float32[4])", 88)]))
    assert one.decide(100.0)
    assert raised(one).culprit == 5
    assert str(raised(one)).splitlines() == [
        "ranks disagree on call #7",
        "  ranks 0-4, 7-15: all_reduce(float32[4]) at train.py:88",
        "  rank 5:          barrier() at train.py:90  <-- differs",
        "  rank 6:          has not reached this call; its last call was barrier() at train.py:1",
    ]


def test_verdict_mismatch_without_a_majority_marks_no_rank() -> None:
    one = verdict(MISMATCH, size=4)
    for rank in range(4):
        one.add_calls(1, range(4), rank, [call(7, "ab"[rank % 2])])
    assert one.decide(100.0)
    assert "<--" not in str(raised(one))
    assert raised(one).culprit is None


def test_verdict_mismatch_names_the_first_difference() -> None:
    one = verdict(MISMATCH, size=2)
    one.add_calls(1, (0, 1), 0, [call(5, "a"), call(6, "b"), call(7, "c")])
    one.add_calls(1, (0, 1), 1, [call(5, "a"), call(6, "x"), call(7, "c")])
    assert one.decide(100.1)
    assert str(raised(one)).startswith("ranks disagree on call #6\n  rank 0: b at ")
    assert raised(one).culprit is None, "with one rank on each side there is no culprit"


def test_verdict_mismatch_waits_a_limited_time_for_a_rank_that_does_not_answer() -> None:
    one = verdict(MISMATCH, size=4)
    one.add_calls(1, (0, 1, 2, 3), 0, [call(7, "a")])
    one.add_calls(1, (0, 1, 2, 3), 1, [call(6, "z")])
    one.add_calls(1, (0, 1, 2, 3), 2, [])
    assert not one.decide(100.0 + CALLS_SECONDS * 0.9)
    assert one.decide(100.0 + CALLS_SECONDS)
    assert str(raised(one)).splitlines()[1:] == [
        "  rank 0: a at train.py:1",
        "  rank 1: has not reached this call; its last call was z at train.py:1",
        "  rank 2: has not called anything in this group",
        "  rank 3: has not reported its calls",
    ]


@pytest.mark.parametrize("gone", ["left", "lost"])
def test_verdict_mismatch_does_not_wait_for_a_lost_rank(gone: str) -> None:
    one = verdict(MISMATCH, size=3)
    one.add_calls(1, (0, 1, 2), 0, [call(7, "a")])
    one.add_calls(1, (0, 1, 2), 1, [call(7, "b")])
    assert not one.decide(100.0)
    if gone == "left":
        one.mark_left(2, 100.0)
    else:
        one.add(LOST_2, 100.0)
    assert one.decide(100.0)
    assert isinstance(raised(one), CollectiveMismatch), "a mismatch takes precedence over a loss"


def test_verdict_disputes_of_two_groups_stay_separate() -> None:
    other = Finding("mismatch", "ranks called different things", None, None, "barrier", 9, 2)
    one = verdict(MISMATCH, other, size=2)
    assert one.dispute() == other, "all ranks must choose the same dispute"
    one.add_calls(1, (0, 1), 0, [call(7, "a")])
    one.add_calls(1, (0, 1), 1, [call(7, "b")])
    assert not one.decide(100.0)
    one.add_calls(9, (0, 1), 0, [call(2, "c")])
    one.add_calls(9, (0, 1), 1, [call(2, "d")])
    assert one.decide(100.0)
    assert str(raised(one)).splitlines() == [
        "ranks disagree on call #2",
        "  rank 0: c at train.py:1",
        "  rank 1: d at train.py:1",
    ]


def test_verdict_equal_calls_that_disagree_show_the_reason() -> None:
    one = verdict(Finding("mismatch", "rank 1 expects 3, rank 0 sends 2", None, None, "scatter", 1, 4), size=2)
    for rank in (0, 1):
        one.add_calls(1, (0, 1), rank, [call(4, "scatter(root=0)")])
    assert one.decide(100.0)
    assert str(raised(one)).startswith("ranks disagree on call #4: rank 1 expects 3, rank 0 sends 2\n  rank 0: ")


def test_verdict_named_tensors_that_differ_are_named() -> None:
    one = verdict(MISMATCH, size=2)
    one.add_calls(1, (0, 1), 0, [call(7, "all_reduce_named(2 arrays)", 1, ("'a': float32[1]", "'b': float32[2]"))])
    one.add_calls(1, (0, 1), 1, [call(7, "all_reduce_named(2 arrays)", 1, ("'a': float32[1]", "'c': float32[2]"))])
    assert one.decide(100.0)
    assert "#7: 'b': float32[2] is in the map of rank 0, not of rank 1\n" in str(raised(one))


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finding", "kind", "text"),
    [
        (LOST_2, PeerLost, "rank 2 (host b, pid 411) closed its link during all_reduce #8, train.py:88"),
        (ABORT_3, Aborted, "rank 2 (host b, pid 411) gave up: ValueError: no"),
        (Finding("aborted", "stop"), Aborted, "stop"),
        (LATE_0, GroupTimeout, "barrier #3 did not finish"),
    ],
)
def test_verdict_errors_are_readable(finding: Finding, kind: type[Broken], text: str) -> None:
    one = verdict(finding)
    one.decide(200.0)
    error = raised(one, during=" during all_reduce #8, train.py:88", who="rank 2 (host b, pid 411)")
    assert type(error) is kind
    assert str(error) == text
    assert (error.culprit, error.operation, error.generation) == (finding.culprit, "all_reduce", 3)
    assert error.seconds == finding.seconds


@given(
    st.dictionaries(
        st.sampled_from(["kind", "reason", "culprit", "seconds", "operation", "group", "sequence", "other"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()),
    )
)
def test_findings_from_peers_are_well_formed_or_refused(fields: dict[str, object]) -> None:
    try:
        finding = Finding.from_wire(fields, 4)
    except (TypeError, ValueError):
        return
    assert finding.kind in ("mismatch", "aborted", "lost", "timeout")
    one = verdict(finding)
    assert one.decide(1e6)
    assert isinstance(raised(one), Broken)


def test_findings_survive_the_wire() -> None:
    for finding in (LOST_2, ABORT_3, LATE_0, MISMATCH):
        assert Finding.from_wire(finding.to_wire(), 4) == finding
