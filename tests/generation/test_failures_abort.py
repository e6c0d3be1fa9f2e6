"""A rank that aborts, raises, gets Ctrl-C or closes: the other ranks receive the reason."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import parts_of
from support.in_process import groups_fixture as groups_fixture
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import run_ranks


def gives_up(here: Here, how: str) -> None:
    group = gw.init()
    group.barrier()
    here.send(ready=True)
    if group.rank != 1:
        try:
            group.barrier()
        except gw.GradwireError as error:
            here.send_error(error)
        return
    here.receive()
    if how == "uncaught":
        raise ValueError("the loss is not a number")
    if how == "with":
        with group:
            raise ValueError("the loss is not a number")
    if how == "abort":
        group.abort("the loss is not a number")
        group.abort("said twice")
        try:
            group.barrier()
        except gw.GradwireError as error:
            here.send_error(error)


@pytest.mark.parametrize("how", ["uncaught", "with", "abort"])
def test_abort_or_exception_in_a_process_gives_other_ranks_the_reason(job: StartJob, how: str) -> None:
    with job(gives_up, 3, how) as ranks:
        for rank in ranks:
            assert rank.receive()["ready"]
        ranks[1].send()
        for rank in ranks if how == "abort" else (ranks[0], ranks[2]):
            report = rank.receive()
            assert (report["error"], report["culprit"], report["operation"]) == ("Aborted", 1, "barrier"), report
            prefix = "" if how == "abort" else "ValueError: "
            assert report["text"].startswith("rank 1 (host ")
            assert report["text"].endswith(f"pid {ranks[1].pid}) gave up: {prefix}the loss is not a number")
        assert ranks[1].ended() == (0 if how == "abort" else 1)
        assert [rank.ended() for rank in (ranks[0], ranks[2])] == [0, 0]


def is_interrupted(here: Here, what: str) -> None:
    group = gw.init()
    if group.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    group.barrier()
    if group.rank == 2:
        here.receive()
    else:
        here.send_when_waiting()
    try:
        if what == "collective" or group.rank == 2:
            group.all_reduce(np.ones(3))  # rank 2 may have all data it needs, and notice the abort at its next call
            group.barrier()
        elif what == "large send":
            group.send(np.ones(1 << 20), dst=1 - group.rank)
        else:
            stream = group.stream()
            stream.all_reduce(np.ones(3))
            group.barrier()  # waits until the queued work is done
    except KeyboardInterrupt:
        here.send(error="KeyboardInterrupt")
        if what == "large send":
            raise
        try:
            group.barrier()
        except gw.GradwireError as error:
            here.send_error(error)
    except gw.GradwireError as error:
        here.send_error(error)


@pytest.mark.parametrize("what", ["collective", "stream", "large send"])
def test_ctrl_c_on_one_rank_raises_aborted_on_all(job: StartJob, what: str) -> None:
    with job(is_interrupted, 3, what) as ranks:
        for rank in ranks[:2]:
            assert rank.receive()["waiting"]
        ranks[0].signal(signal.SIGINT)
        assert ranks[0].receive() == {"error": "KeyboardInterrupt"}
        ranks[2].send()
        for rank in ranks[1:] if what == "large send" else ranks:
            report = rank.receive()
            assert (report["error"], report["culprit"]) == ("Aborted", 0), report
            why = "KeyboardInterrupt" if what == "large send" else "interrupted (Ctrl-C) during "
            assert why in report["text"]


# -- in one process, over both transports -----------------------------------------------------------------------------


def test_with_block_exception_is_the_reason_of_aborted_on_other_ranks(groups: list[gw.Group]) -> None:
    def play(group: gw.Group) -> None:
        if group.rank == 0:
            with pytest.raises(ZeroDivisionError), group:
                1 / 0
        else:
            with pytest.raises(gw.Aborted, match=r"rank 0 .* gave up: ZeroDivisionError: division by zero") as caught:
                group.all_reduce(np.ones(1 << 20))
            assert (caught.value.culprit, caught.value.operation, caught.value.generation) == (0, "all_reduce", 1)

    run_ranks(groups, play)


def test_with_block_without_an_exception_only_closes_the_group(groups: list[gw.Group]) -> None:
    def play(group: gw.Group) -> int:
        with group:
            total = int(group.all_reduce(1))
        with pytest.raises(gw.Closed):
            group.barrier()
        return total

    assert run_ranks(groups, play) == [len(groups)] * len(groups)


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.all_reduce(np.ones(1 << 20)),
        lambda group: group.recv(np.zeros(2), src=1),
        lambda group: group.recv(np.zeros(2)),
        lambda group: group.send(np.zeros(1 << 20), dst=1),
        lambda group: group.stream().barrier().wait(),
        lambda group: group.subgroup([0, 1]).barrier(),
    ],
    ids=["all_reduce", "recv", "recv from anyone", "large send", "stream", "subgroup"],
)
def test_close_ends_a_waiting_call_of_another_thread_with_closed(
    groups: list[gw.Group], call: Callable[[gw.Group], object]
) -> None:
    caught: list[BaseException] = []
    began = threading.Event()

    def wait() -> None:
        began.set()
        try:
            call(groups[0])
        except gw.GradwireError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    began.wait()
    waiting.join(0.05)  # usually enough to reach the wait; the outcome must be the same in any case
    groups[0].close()
    waiting.join()
    assert [type(error) for error in caught] == [gw.Closed]
    for other in groups[1:]:
        assert parts_of(other).generation.control.intact, "the other rank must not break"


def test_close_of_a_subgroup_ends_its_calls_and_the_world_stays_usable(groups: list[gw.Group]) -> None:
    inner = groups[0].subgroup([0, 1])
    other = groups[1].subgroup([0, 1])
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            inner.barrier()
        except gw.GradwireError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    inner.close()
    waiting.join()
    assert [type(error) for error in caught] == [gw.Closed]
    assert run_ranks(groups, lambda group: group.all_reduce(1)) == [len(groups)] * len(groups)
    for call in (inner.barrier, lambda: inner.send(np.zeros(1), 1), lambda: inner.recv(np.zeros(1), 1)):
        with pytest.raises(gw.Closed):
            call()
    other.close()


def test_abort_and_close_repeated_in_any_order_keep_the_first_reason(groups: list[gw.Group]) -> None:
    groups[0].abort("first")
    groups[0].abort("second")
    for group in groups:
        with pytest.raises(gw.Aborted, match="gave up: first"):
            group.barrier()
        group.close()
        group.abort("third")
        group.close()
        with pytest.raises(gw.Closed):
            group.barrier()


def test_abort_of_all_ranks_at_once_names_the_same_culprit_everywhere(groups: list[gw.Group]) -> None:
    for group in groups[::-1]:
        group.abort(f"rank {group.rank} gave up")

    def play(group: gw.Group) -> int | None:
        with pytest.raises(gw.Aborted) as caught:
            group.barrier()
        return caught.value.culprit

    assert len(set(run_ranks(groups, play))) == 1
