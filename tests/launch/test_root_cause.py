"""Which ending of a job is its root cause, and how it is explained."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from gradwire.launch.fault_injection import BY_CHAOS
from gradwire.launch.root_cause import (
    Ending,
    Report,
    consequences,
    describe,
    explain,
    find,
    from_message,
    or_early_exit,
    to_message,
)


def report(
    time: float,
    kind: str = "ValueError",
    *,
    message: str = "boom",
    broken: bool = False,
    culprit: int | None = None,
) -> Report:
    is_lost = kind == "gradwire.errors.PeerLost"
    return Report(time, kind, message, f"Traceback …\n{kind}: {message}\n", "train.py:7", broken, is_lost, culprit)


def lost(time: float, culprit: int | None, message: str = "boom") -> Report:
    return report(time, "gradwire.errors.PeerLost", message=message, broken=True, culprit=culprit)


def ending(
    rank: int, status: int = 1, *, time: float = 100.0, stop_sent: float | None = None, said: Report | None = None
) -> Ending:
    return Ending(rank, 400 + rank, status, time, stop_sent, said)


def root(*endings: Ending) -> int | None:
    found = find(endings)
    return None if found is None else found.number


def test_root_cause_without_a_failure_is_none() -> None:
    assert root(ending(0, 0), ending(1, 0)) is None


def test_root_cause_is_the_first_failure_even_if_its_process_ended_later() -> None:
    assert root(ending(0, time=5, said=report(3)), ending(1, time=9, said=report(2))) == 1


def test_root_cause_is_not_an_error_of_a_broken_group() -> None:
    assert root(ending(0, time=1, said=lost(1, 2)), ending(1, said=lost(2, 2)), ending(2, -9, time=3)) == 2
    assert root(ending(0, time=1, said=lost(1, 1)), ending(1, time=4, said=report(4))) == 1


def test_root_cause_among_group_errors_is_the_named_rank_or_the_earliest() -> None:
    assert root(ending(0, said=lost(1, 1)), ending(1, said=lost(2, 1)), ending(2, said=lost(3, 1))) == 1
    assert root(ending(0, said=lost(2, 2)), ending(1, said=lost(1, 2)), ending(2, 0)) == 1


def test_root_cause_is_not_a_worker_that_was_stopped() -> None:
    assert (
        root(ending(0, -15, stop_sent=50), ending(1, said=report(40)), ending(2, 1, stop_sent=50, said=report(51))) == 1
    )
    assert root(ending(0, -15, stop_sent=50), ending(1, -2, stop_sent=50, said=report(51, "KeyboardInterrupt"))) is None


def test_root_cause_may_have_failed_before_it_was_stopped() -> None:
    stuck = ending(0, -15, stop_sent=50, said=report(40))
    assert find([stuck]) is stuck
    assert stuck.exit_code == 1


def test_root_cause_stuck_rank_is_named_by_the_waiting_ranks() -> None:
    timeout = report(10, "gradwire.errors.Timeout", message="rank 1 has not arrived", broken=True, culprit=1)
    assert root(ending(0, said=timeout), ending(1, -15, stop_sent=13)) == 0


@pytest.mark.parametrize(
    ("one", "text", "code"),
    [
        (ending(1, 3), "rank 1 (pid 401) exited with code 3", 3),
        (ending(1, -11), "rank 1 (pid 401) was killed by SIGSEGV (signal 11)", 139),
        (ending(1, -signal.SIGRTMIN - 3), f"rank 1 (pid 401) was killed by signal {signal.SIGRTMIN + 3}", 165),
        (ending(1, -15, stop_sent=1), "rank 1 (pid 401) was stopped", 143),
        (ending(1, said=report(1)), "rank 1 (pid 401) raised ValueError: boom", 1),
        (ending(1, said=report(1, message="")), "rank 1 (pid 401) raised ValueError", 1),
        (ending(1, said=report(1, message="a\nb")), "rank 1 (pid 401) raised ValueError: a", 1),
        (ending(1, said=lost(1, 0)), "rank 1 (pid 401) raised PeerLost: boom", 1),
        (
            ending(1, 3, said=report(1, "SystemExit", message="3")),
            "rank 1 (pid 401) left by sys.exit(3) at train.py:7",
            3,
        ),
        (
            ending(1, said=report(1, "SystemExit", message="no data")),
            "rank 1 (pid 401) gave up at train.py:7: no data",
            1,
        ),
    ],
)
def test_fate_describes_an_ending_in_one_line(one: Ending, text: str, code: int) -> None:
    assert describe(one) == text
    assert one.exit_code == code


def test_consequences_of_ranks_that_failed_alike_are_one_line() -> None:
    cause = ending(1, said=report(1))
    others = [ending(0, said=lost(2, 1)), ending(2, 0), ending(3, said=lost(3, 1)), ending(4, -15, stop_sent=2)]
    lines = consequences([others[0], cause, *others[1:]], cause)
    assert lines == ["ranks 0, 3 raised PeerLost: boom", "rank 4 was stopped"]
    assert consequences([ending(2, -15, stop_sent=2), ending(3, -15, stop_sent=2)], cause) == [
        "ranks 2, 3 were stopped"
    ]


def test_consequences_with_the_traceback_of_the_root_cause_are_the_same_error() -> None:
    for said in (report(1), report(1, "gradwire.errors.CollectiveMismatch", broken=True, culprit=2)):
        endings = [ending(rank, said=said) for rank in range(6)]
        assert consequences(endings, endings[2]) == ["ranks 0, 1, 3-5: same error as rank 2"]


def test_consequences_of_a_broken_group_are_one_line_even_if_they_differ() -> None:
    aborted = report(2, "gradwire.errors.Aborted", broken=True, culprit=2)
    endings = [
        ending(0, said=lost(2, 2, "during barrier")),
        ending(1, said=lost(2, 2, "during send")),
        ending(2, said=report(1)),
        ending(3, said=aborted),
    ]
    assert consequences(endings, endings[2]) == [
        "ranks 0, 1, 3 failed in consequence; rank 0 raised PeerLost: during barrier"
    ]


def test_root_cause_is_a_rank_that_exited_with_0_while_others_needed_it() -> None:
    early, waiting = ending(1, 0), ending(0, said=lost(1, 1))
    found = or_early_exit(find([waiting, early]), [waiting, early])
    assert found is not None
    assert describe(found) == "rank 1 (pid 401) exited with code 0 while other ranks still needed it"
    by_exit = ending(1, 0, said=report(1, "SystemExit", message="0"))
    found = or_early_exit(waiting, [waiting, by_exit])
    assert found is not None
    assert describe(found) == "rank 1 (pid 401) left by sys.exit(0) at train.py:7 while other ranks still needed it"


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        (ending(0, said=lost(1, 1)), ending(1, 3)),  # it has failed itself
        (ending(0, said=lost(1, 1)), ending(1, 0, stop_sent=0.5)),  # the supervisor has stopped it
        (ending(0, said=report(1, "gradwire.errors.Timeout", broken=True, culprit=1)), ending(1, 0)),  # it was stuck
        (replace(ending(0, said=lost(1, 1)), noun="worker"), replace(ending(1, 0), noun="worker")),  # ranks change
        (ending(0, said=report(1)), ending(1, 0)),
    ],
)
def test_root_cause_is_not_another_rank_that_ended(failure: Ending, named: Ending) -> None:
    assert or_early_exit(failure, [failure, named]) is failure


def test_explain_without_the_message_ends_with_the_frames() -> None:
    said = replace(report(1, message="two\nlines"), traceback="Traceback …\n  File x\nValueError: two\nlines\n")
    assert explain(ending(1, said=said), [], with_message=False) == (
        "rank 1 (pid 401) raised ValueError: two\nTraceback …\n  File x"
    )


def test_explain_sigkill_hints_at_memory() -> None:
    text = "rank 0 (pid 400) was killed by SIGKILL (signal 9), which the kernel also sends when memory runs out"
    assert describe(ending(0, -9)) == text


def test_explain_names_a_kill_on_purpose() -> None:
    assert describe(replace(ending(0, -9), kill_reason=BY_CHAOS)) == "rank 0 (pid 400) was killed by chaos"


def test_explain_ends_with_the_traceback_or_the_last_lines() -> None:
    assert explain(ending(1, said=report(1)), ["noise"]).endswith("Traceback …\nValueError: boom")
    assert explain(ending(1, -11), ["one", "two"]).endswith("Its last output:\none\ntwo")
    assert explain(ending(1, 2, said=report(1, "SystemExit", message="2")), ["usage: …"]).endswith("usage: …")
    assert explain(ending(1, 2), []) == "rank 1 (pid 401) exited with code 2"


def test_report_of_a_member_of_another_run_counts_as_a_loss() -> None:
    assert report(1.0, "gradwire.errors.Refused").refused
    assert not report(1.0, "gradwire.errors.OtherRun").refused, "another worker could join"


@pytest.mark.parametrize(
    "one",
    [ending(3, -9), ending(3, stop_sent=99.5), ending(3, said=lost(99.0, 2)), ending(3, 0)],
    ids=["killed", "stopped", "raised", "well"],
)
def test_ending_of_another_host_arrives_with_times_of_this_host(one: Ending) -> None:
    message = json.loads(json.dumps(to_message(one, now=101.0)))
    received = from_message(message, "host-b", now=5001.0)
    assert received.failure_time == one.failure_time + 4900
    assert (received.host, received.stopped) == ("host-b", one.stopped)
    back = from_message(message, "", now=101.0)
    assert back == one


def test_ending_of_another_host_is_described_with_it() -> None:
    assert describe(replace(ending(3, 7), host="host-b")) == "rank 3 (host host-b, pid 403) exited with code 7"


@pytest.mark.parametrize("field", ["number", "pid", "status", "time", "stop_sent", "report", "kill_reason"])
def test_ending_of_another_host_with_a_wrong_field_is_refused(field: str) -> None:
    message = to_message(ending(3, said=report(99.0)), now=101.0)
    for wrong in ({**message, field: ["wrong"]}, {name: value for name, value in message.items() if name != field}):
        with pytest.raises(ValueError, match="malformed"):
            from_message(wrong, "host-b", now=0.0)
