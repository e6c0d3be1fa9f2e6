"""A rank that does not make a call: the other ranks log it, and after the timeout raise an error that names it."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import gradwire as gw
from gradwire.generation import waiting
from gradwire.group.internals import parts_of
from gradwire.host import native_core
from gradwire.liveness.control_messages import Position
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture
from support.in_process import groups_fixture as groups_fixture
from support.processes import Here, StartJob, place
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import run_ranks

needs_core = pytest.mark.skipif(not native_core.available(), reason="without it, beats need the interpreter")


def early_call(group: gw.Group) -> None:
    group.all_gather_values("hello")  # the last call


@pytest.mark.parametrize("called", [True, False], ids=["behind", "never called"])
def test_timeout_names_the_missing_rank_and_its_last_call(groups: list[gw.Group], called: bool) -> None:
    late = len(groups) - 1
    everybody_else_is_done, together = threading.Barrier(len(groups)), threading.Barrier(late)

    def play(group: gw.Group) -> str:
        if called:
            early_call(group)
        if group.rank == late:
            everybody_else_is_done.wait()
        else:
            together.wait()
        began = time.monotonic()
        with pytest.raises(gw.Timeout) as caught:
            group.all_reduce(np.ones(3), timeout=0.6)
        took = time.monotonic() - began
        if group.rank != late:
            assert took > 0.3
            everybody_else_is_done.wait()
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, gw.Broken)
        assert (caught.value.culprit, caught.value.operation) == (late, "all_reduce")
        assert (caught.value.generation, caught.value.seconds) == (1, 0.6)
        with pytest.raises(gw.Timeout, match="did not finish"):
            group.barrier()
        return str(caught.value)

    said = set(run_ranks(groups, play))
    last = rf"all_gather_values\(\) #2 at {place(early_call, '# the last call')}" if called else "none"
    number = 3 if called else 1
    for text in said:
        expected = (
            rf"all_reduce #{number} did not finish within its timeout of 0.6 s: "
            rf"rank {late} is alive but stuck outside of any gradwire call, its last call was {last}"
        )
        assert re.fullmatch(expected, text), text


def test_timeout_of_one_rank_ends_the_call_on_all_ranks(groups: list[gw.Group]) -> None:
    """Ranks with longer timeouts raise the same error, at the same time."""
    late = len(groups) - 1

    def play(group: gw.Group) -> None:
        if group.rank != late:
            with pytest.raises(gw.Timeout, match=r"did not finish within its timeout of 0.6 s") as caught:
                group.barrier(timeout=0.6 if group.rank == 0 else 60)
            assert caught.value.culprit == late

    run_ranks(groups, play)


def wait_for_the_position_of_rank_1(group: gw.Group) -> None:
    """Return when this rank knows the last call of rank 1."""
    generation, runner = parts_of(group)
    while generation.control.last_known_call(runner.calls, 1) is None:
        time.sleep(0.01)


def waits_for_rank_1(here: Here, how: str, seconds: float) -> None:
    waiting.SLOW_SECONDS = 0.2
    group = gw.init()
    group.barrier()  # the last call
    try:
        if group.rank != 1:
            if how == "in C":
                wait_for_the_position_of_rank_1(group)
                group.send(np.ones(1), dst=1)
                group.recv(np.empty(1), src=1)
            group.all_reduce(np.ones(3), timeout=seconds)
        elif how == "sleeping":
            time.sleep(60)
        else:
            for peer in (0, 2):
                group.recv(np.empty(1), src=peer)
            for peer in (0, 2):
                group.send(np.ones(1), dst=peer)
            ctypes.PyDLL(None).usleep(int(1e6 * 5 * seconds))  # PyDLL keeps the GIL during the call
            group.barrier()
    except gw.GradwireError as error:
        here.send_error(error)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sleeping", r"stuck outside of any gradwire call, its last call was barrier\(\) #1 at {last}"),
        pytest.param(
            "in C",
            r"stuck: its Python interpreter does not run \(a C extension may hold the GIL\); "
            r"its last call was barrier\(\) #1",
            marks=needs_core,
        ),
    ],
)
def test_timeout_says_how_a_living_process_is_stuck(job: StartJob, how: str, said: str) -> None:
    expected = "rank 1 is alive but " + said.format(last=place(waits_for_rank_1, "# the last call"))
    with job(waits_for_rank_1, 3, how, 0.6) as ranks:
        for rank in (ranks[0], ranks[2]):
            report = rank.receive()
            assert (report["error"], report["culprit"]) == ("GroupTimeout", 1), report
            assert re.fullmatch(
                rf"all_reduce #2 did not finish within its timeout of 0.6 s: {expected}", report["text"]
            ), report["text"]
        where = place(waits_for_rank_1, "timeout=seconds")
        logged = rf"rank 0 has waited \d+ s during all_reduce #2, {where}: {expected}"
        assert re.search(logged, ranks[0].output()), ranks[0].output()


# -- long waits are logged --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "logs"),
    [
        ({}, True),  # no other rank answers
        ({1: Position(0, 7, 6, ""), 3: Position(0, 7, 6, "")}, False),  # rank 1 waits in call 7 too
        ({1: Position(0, 9, 6, ""), 3: Position(0, 7, 6, "")}, False),  # the same, with more calls in its stream
        ({1: Position(0, 6, 6, ""), 3: Position(0, 7, 6, "")}, True),  # rank 1 is late
        ({1: Position(0, 7, 7, ""), 3: Position(0, 7, 6, "")}, True),  # rank 1 has finished the call
        ({3: Position(0, 7, 6, "")}, True),  # rank 1 does not answer
    ],
)
def test_long_wait_is_logged_by_the_lowest_rank_that_waits(others: dict[int, Position], logs: bool) -> None:
    assert waiting.is_lowest_waiting(2, 7, others) is logs


@pytest.fixture
def short_slow_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SLOW_SECONDS", 0.1)


@pytest.mark.usefixtures("short_slow_wait")
def test_long_wait_in_a_collective_logs_the_late_rank_and_its_last_call(
    groups: list[gw.Group], captured: CapturedLog
) -> None:
    late = len(groups) - 1
    called = place(early_call, "# the last call")
    said = (
        rf"rank 0 has waited \d+ s during all_reduce #3, test_failures_timeout.py:\d+: "
        rf"rank {late} is alive but stuck outside of any gradwire call, "
        rf"its last call was all_gather_values\(\) #2 at {called}"
    )

    def play(group: gw.Group) -> object:
        early_call(group)
        if group.rank == late:
            captured.wait_for(said, times=2)  # it is logged again later
        return group.all_reduce(1)

    assert run_ranks(groups, play) == [len(groups)] * len(groups)


@pytest.mark.usefixtures("short_slow_wait")
def test_long_wait_for_the_lowest_rank_is_logged_by_the_next_one(groups: list[gw.Group], captured: CapturedLog) -> None:
    said = r"rank 1 has waited \d+ s during all_reduce #1, .*: rank 0 is alive but stuck outside of any gradwire call"

    def play(group: gw.Group) -> object:
        if group.rank == 0:
            captured.wait_for(said, times=2)
        return group.all_reduce(1)

    assert run_ranks(groups, play) == [len(groups)] * len(groups)


@pytest.mark.usefixtures("short_slow_wait")
def test_long_waits_in_two_subgroups_are_logged_in_each(groups: list[gw.Group], captured: CapturedLog) -> None:
    if len(groups) < 3:
        pytest.skip("needs two subgroups")
    said = [rf"rank {rank} has waited \d+ s during all_reduce #1, .*: rank 1 is alive but stuck" for rank in (0, 2)]

    def play(group: gw.Group) -> object:
        low = group.subgroup([0, 1]) if group.rank < 2 else None
        high = group.subgroup([1, 2]) if 1 <= group.rank <= 2 else None
        if group.rank == 1:
            for text in said:
                captured.wait_for(text)
        return [part.all_reduce(1) for part in (low, high) if part is not None]

    assert run_ranks(groups, play)[:3] == [[2], [2, 2], [2]]


@pytest.mark.usefixtures("short_slow_wait")
@pytest.mark.parametrize(
    ("wait", "answer", "said"),
    [
        (
            lambda group: group.recv(np.zeros(2), src=1, tag=4),
            lambda group: group.send(np.zeros(2), dst=0, tag=4),
            "for a message from rank 1 with tag 4",
        ),
        (
            lambda group: group.recv(np.zeros(2)),
            lambda group: group.send(np.zeros(2), dst=0),
            "for a message from any rank with tag 0",
        ),
        (
            lambda group: group.send(np.zeros(1 << 20), dst=1),
            lambda group: group.recv(np.zeros(1 << 20), src=0),
            "in send to rank 1, which has not called recv",
        ),
    ],
    ids=["recv", "recv from anyone", "large send"],
)
def test_long_wait_in_send_or_recv_logs_the_last_call_of_the_peer(
    groups: list[gw.Group],
    captured: CapturedLog,
    wait: Callable[[gw.Group], object],
    answer: Callable[[gw.Group], object],
    said: str,
) -> None:
    last = rf"rank 1's last call was all_gather_values\(\) #2 at {place(early_call, '# the last call')}"

    def play(group: gw.Group) -> None:
        early_call(group)
        if group.rank == 0:
            wait(group)
        elif group.rank == 1:
            captured.wait_for(rf"rank 0 has waited \d+ s {said}; {last}(; rank 2's .*)?")
            answer(group)

    run_ranks(groups, play)
