"""Errors of queued calls: raised by wait and synchronize, logged if nothing waits for them; timeouts of waits."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import queue_on
from gradwire.operations import Declined, Operation
from support.in_process import SOON, end_progress
from support.in_process import every_pair_fixture as every_pair_fixture
from support.ranks import eventually, run_ranks


def ends(work: gw.Work) -> bool:
    """Wait for the end of a work, without raising its error."""
    return eventually(lambda: work.done)


def break_behind(groups: list[gw.Group], make: Any) -> Any:
    """Queue a call on rank 0 by `make`, abort the group on rank 1, and return what `make` returned."""
    work = make(groups[0])
    groups[1].abort("rank 1 had enough")
    return work


def test_wait_for_a_failed_work_raises_its_error_each_time(pair: list[gw.Group]) -> None:
    work = break_behind(pair, lambda group: group.stream().all_reduce(np.ones(2)))
    for _ in range(2):
        with pytest.raises(gw.Aborted, match="rank 1 had enough") as caught:
            work.wait(SOON)
        assert caught.value.culprit == 1
    with pytest.raises(gw.Aborted):
        work.result
    assert work.done
    assert repr(work) == "<gradwire.Work all_reduce, failed>"


def test_synchronize_raises_the_error_of_a_failed_work_once(pair: list[gw.Group]) -> None:
    stream = pair[0].stream()
    for _ in range(3):
        stream.all_reduce(np.ones(2))
    pair[1].abort("rank 1 had enough")
    with pytest.raises(gw.Aborted, match="rank 1 had enough"):
        stream.synchronize(SOON)
    stream.synchronize(SOON)  # the error was raised already


def test_work_error_without_a_wait_is_logged_once(pair: list[gw.Group], caplog: pytest.LogCaptureFixture) -> None:
    stream = pair[0].stream()
    work = [stream.all_reduce(np.ones(2)) for _ in range(3)][-1]
    pair[1].abort("rank 1 had enough")
    assert ends(work)
    with caplog.at_level(logging.ERROR, "gradwire"):
        del stream, work
        end_progress(pair[0])
    lines = [record.getMessage() for record in caplog.records if "never waited" in record.getMessage()]
    assert len(lines) == 1
    assert "all_reduce failed, and the program never waited for its result" in lines[0]
    assert "rank 1 had enough" in lines[0]


def test_work_error_raised_by_a_wait_is_not_logged(pair: list[gw.Group], caplog: pytest.LogCaptureFixture) -> None:
    stream = pair[0].stream()
    works = [stream.all_reduce(np.ones(2)) for _ in range(3)]
    pair[1].abort("rank 1 had enough")
    with caplog.at_level(logging.ERROR, "gradwire"):
        with pytest.raises(gw.Aborted):
            works[0].wait(SOON)
        del works
        with pytest.raises(gw.Aborted):
            stream.synchronize(SOON)
        del stream
        end_progress(pair[0])
    assert "never waited" not in caplog.text


def test_wait_that_times_out_leaves_works_running(pair: list[gw.Group]) -> None:
    one, two = pair
    stream = one.stream()
    x = np.ones(2)
    works = [stream.all_reduce(x), stream.all_reduce(x)]
    with pytest.raises(gw.Timeout, match=r"all_reduce was not done in 0\.01 s; it keeps running") as caught:
        works[0].wait(0.01)
    assert (caught.value.culprit, caught.value.seconds, caught.value.operation) == (None, 0.01, "all_reduce")
    with pytest.raises(gw.Timeout, match=r"2 of 2 works were not done in 0\.01 s; they keep running"):
        stream.synchronize(0.01)
    for _ in works:
        two.all_reduce(np.ones(2))
    stream.synchronize(SOON)
    assert works[1].wait(SOON) is x
    assert run_ranks(pair, lambda group: group.all_reduce(1)) == [2, 2]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "soon", True])
def test_wait_with_a_timeout_that_is_not_positive_raises_invalid_size(timeout: Any) -> None:
    with gw.init() as group:
        stream = group.stream()
        work = stream.barrier()
        with pytest.raises(gw.InvalidSize, match="timeout is"):
            work.wait(timeout)
        with pytest.raises(gw.InvalidSize, match="timeout is"):
            stream.synchronize(timeout)
        work.wait(float("inf"))


def test_wait_without_a_timeout_ends_by_the_timeout_of_the_collective(pair: list[gw.Group]) -> None:
    stream = pair[0].stream()
    work = stream.all_reduce(np.ones(2), timeout=0.05)
    with pytest.raises(gw.Timeout) as caught:
        work.wait()
    assert caught.value.culprit == 1
    with pytest.raises(gw.Timeout):
        pair[1].barrier()


def test_synchronize_that_times_out_raises_an_earlier_error_first(pair: list[gw.Group]) -> None:
    """A `synchronize` that times out raises an error that it has found, and keeps the works that are not done."""
    stream = pair[0].stream()
    proceed = threading.Event()
    declined = Declined(gw.ArrayError("there is nothing to send"))
    failed = queue_on(stream, Operation("all_reduce", lambda exchange: declined))
    late = queue_on(stream, Operation("barrier", lambda exchange: proceed.wait(SOON)))
    assert ends(failed)
    with pytest.raises(gw.ArrayError, match="nothing to send"):
        stream.synchronize(0.01)
    with pytest.raises(gw.Timeout, match="1 of 1 works"):
        stream.synchronize(0.01)
    proceed.set()
    assert late.wait(SOON)


def test_synchronize_from_two_threads_waits_in_both(pair: list[gw.Group]) -> None:
    """If two threads synchronize one stream, both wait."""
    stream = pair[0].stream()
    work = stream.barrier()
    seen: list[bool] = []

    def wait() -> None:
        stream.synchronize(SOON)
        seen.append(work.done)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    pair[1].barrier()
    for thread in threads:
        thread.join(SOON)
    assert seen == [True, True]


def test_work_error_after_a_declined_call_is_logged(pair: list[gw.Group], caplog: pytest.LogCaptureFixture) -> None:
    """A declined call leaves the group usable, so the next error is the first of its chain, and is logged."""

    def program(group: gw.Group) -> None:
        with pytest.raises(gw.ArrayError):
            group.stream().scatter(None, root=0).wait(SOON)

    run_ranks(pair, program)
    work = pair[0].stream().barrier()
    pair[1].abort("rank 1 had enough")
    assert ends(work)
    with caplog.at_level(logging.ERROR, "gradwire"):
        del work
        end_progress(pair[0])
    assert "barrier failed, and the program never waited for its result" in caplog.text
