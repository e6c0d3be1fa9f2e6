"""Held-back works: with shared memory and no spare core, the thread that waits for a queued work executes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import gradwire as gw
from gradwire.group import runner
from gradwire.group.internals import GroupInternals, parts_of
from gradwire.operations import Operation
from support.crews import TRANSPORTS
from support.in_process import SOON
from support.ranks import closing, eventually, run_ranks

pytestmark = pytest.mark.skipif("shm" not in TRANSPORTS, reason="without the core there is no shared memory")
PROGRESS = "gradwire-progress"


def ranks(transport: str, cores: float = 0.0) -> list[gw.Group]:
    """Return two ranks after their first call, because before it they do not know whether they share memory."""
    groups = TRANSPORTS[transport](gw.Topology.single(2))
    for group in groups:
        parts_of(group).generation.transport.cores = cores
    run_ranks(groups, lambda group: group.barrier())
    return groups


@pytest.fixture
def held_back_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold back works for longer than a test takes."""
    monkeypatch.setattr(runner, "MAX_HOLD_SECONDS", 100 * SOON)


@pytest.fixture
def pair(held_back_for_long: None) -> Iterator[list[gw.Group]]:
    with closing(ranks("shm")) as groups:
        yield groups


def threads_of(*works: gw.Work) -> list[str]:
    """Return a list that gets the name of the thread of each work that is done."""
    names: list[str] = []
    for work in works:
        work.add_done_callback(lambda _: names.append(threading.current_thread().name))
    return names


def test_wait_runs_held_back_works_that_were_queued_before(pair: list[gw.Group]) -> None:
    def program(group: gw.Group) -> list[int]:
        stream = group.stream()
        works = [stream.all_reduce(number) for number in range(3)]
        names = threads_of(*works)
        results = [works[2].wait(), works[0].result, works[1].result]
        assert names == [threading.current_thread().name] * 3
        return results

    assert run_ranks(pair, program) == [[4, 0, 2]] * 2


def test_group_call_starts_held_back_works_on_the_progress_thread(pair: list[gw.Group]) -> None:
    def program(group: gw.Group) -> np.ndarray:
        stream, x = group.stream(), np.ones(300_000)
        names = threads_of(stream.all_reduce(x), stream.all_reduce(x))
        group.all_reduce(x)
        assert eventually(lambda: names == [PROGRESS] * 2)
        return x

    assert all(set(x) == {8.0} for x in run_ranks(pair, program))


def test_callback_of_a_held_back_work_may_take_a_lock_and_call_the_group(pair: list[gw.Group]) -> None:
    """The lock is held by the calling thread; the callback runs on another one."""

    def program(group: gw.Group) -> list[int]:
        lock, results, ended = threading.Lock(), [], threading.Event()

        def call(work: gw.Work) -> None:
            with lock:
                results.append(group.all_reduce(10))
            ended.set()

        with lock:
            group.stream().all_reduce(1).add_done_callback(call)
            results.append(group.all_reduce(100))
        assert ended.wait(SOON)
        return results

    assert run_ranks(pair, program) == [[200, 20]] * 2


def test_callbacks_of_several_held_back_works_may_call_the_group(pair: list[gw.Group]) -> None:
    def program(group: gw.Group) -> list[int]:
        stream, results = group.stream(), []
        works = [stream.all_reduce(number) for number in range(3)]
        for work in works:
            work.add_done_callback(lambda _: results.append(group.all_reduce(10)))
        works[-1].wait()
        assert eventually(lambda: len(results) == 3)
        return results

    assert run_ranks(pair, program) == [[20] * 3] * 2


def test_synchronize_runs_held_back_works(pair: list[gw.Group]) -> None:
    def program(group: gw.Group) -> list[int]:
        stream = group.stream()
        works = [stream.all_reduce(number) for number in range(3)]
        stream.synchronize()
        return [work.result for work in works]

    assert run_ranks(pair, program) == [[0, 2, 4]] * 2


@pytest.mark.parametrize("wait", ["wait", "synchronize"])
def test_wait_with_a_timeout_leaves_the_work_to_the_progress_thread(pair: list[gw.Group], wait: str) -> None:
    def program(group: gw.Group) -> int:
        stream = group.stream()
        work = stream.all_reduce(1)
        names = threads_of(work)
        (work.wait if wait == "wait" else stream.synchronize)(SOON)
        assert eventually(lambda: names == [PROGRESS])
        return int(work.result)

    assert run_ranks(pair, program) == [2, 2]


def test_wait_while_another_thread_runs_an_earlier_work_completes(pair: list[gw.Group]) -> None:
    """Another thread runs the first of three works, and this thread waits for the last one."""
    one, two = pair
    stream, made = one.stream(), GroupInternals(one).calls_made
    works = [stream.all_reduce(number) for number in range(3)]
    first = threading.Thread(target=works[0].wait)
    first.start()
    assert eventually(lambda: GroupInternals(one).calls_made == made + 1)
    last = threading.Thread(target=works[2].wait)
    last.start()
    assert [two.all_reduce(number) for number in range(3)] == [0, 2, 4]
    for thread in (first, last):
        thread.join(SOON)
    assert [work.result for work in works] == [0, 2, 4]


def test_close_ends_held_back_works_with_closed(pair: list[gw.Group]) -> None:
    work = pair[0].stream().all_reduce(1)
    pair[0].close()
    assert eventually(lambda: work.done)
    with pytest.raises(gw.Closed):
        work.wait()


def test_wait_interrupted_during_an_earlier_work_raises_keyboard_interrupt(pair: list[gw.Group]) -> None:
    """Ctrl-C while a thread runs an earlier work must also be raised on that thread."""

    def interrupted(exchange: object) -> None:
        raise KeyboardInterrupt

    GroupInternals(pair[0]).queue(Operation("all_reduce", interrupted), SOON)
    with pytest.raises(KeyboardInterrupt):
        pair[0].stream().all_reduce(1).wait()


def test_held_back_works_start_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_HOLD_SECONDS", 0.01)
    with closing(ranks("shm")) as pair:
        works = [group.stream().all_reduce(1) for group in pair]
        assert eventually(lambda: all(work.done for work in works))


@pytest.mark.parametrize(("transport", "cores"), [("shm", 2.0), ("tcp", 0.0), ("local", 0.0)])
def test_works_with_a_spare_core_or_without_shm_start_at_once(
    held_back_for_long: None, transport: str, cores: float
) -> None:
    """Works start at once with a spare core, and over links, which need time but no core."""
    with closing(ranks(transport, cores)) as pair:
        works = [group.stream().all_reduce(1) for group in pair]
        assert eventually(lambda: all(work.done for work in works))
