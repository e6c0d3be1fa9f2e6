"""Streams and works: order of execution, callbacks, and what is freed when a group is closed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.topology import Topology
from support.crews import Crew, crew_of, sizes
from support.in_process import SOON, end_progress
from support.in_process import every_pair_fixture as every_pair_fixture
from support.ranks import eventually, run_group, run_ranks


@pytest.fixture(scope="module", params=sizes(2, 3), ids=lambda p: f"{p[0]}-{p[1]}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    transport, size = request.param
    with crew_of(transport, Topology.single(size)) as crew:
        yield crew


def progress_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gradwire-progress"]


# -- order -------------------------------------------------------------------------------------------------------------


def test_stream_collectives_of_three_streams_run_in_program_order(crew: Crew) -> None:
    """Each collective doubles the result of the one before it, on the same or on another stream."""

    def program(group: gw.Group) -> None:
        streams = [group.stream() for _ in range(3)]
        x = np.ones(1000)
        works = [streams[turn % 3].all_reduce(x, "mean" if turn % 2 else "sum") for turn in range(50)]
        gathered = streams[1].all_gather(np.array(group.rank))
        for stream in streams:
            stream.synchronize(SOON)
        assert all(work.done for work in works)
        assert all(work.result is x for work in works)
        assert set(x) == {float(group.size**25)}
        assert gathered.result.tolist() == list(range(group.size))

    crew.run(program)


def test_group_call_waits_for_works_that_were_queued_before(crew: Crew) -> None:
    def program(group: gw.Group) -> None:
        stream, other = group.stream(), group.stream()
        x = np.ones(300_000)
        for turn in range(5):
            first = stream.all_reduce(x)
            second = other.all_reduce(x, "mean")
            assert group.all_reduce(x) is x
            assert first.done
            assert second.done
            assert set(x) == {float(group.size ** (2 * turn + 2))}

    crew.run(program)


def test_work_shows_its_result_and_state(crew: Crew) -> None:
    def program(group: gw.Group) -> None:
        stream = group.stream()
        work = stream.all_gather(np.array([group.rank]))
        assert work.wait(SOON).tolist() == work.result.tolist() == list(range(group.size))
        assert repr(work) == "<gradwire.Work all_gather, done>"
        assert repr(stream).startswith("<gradwire.Stream of <gradwire.Group rank")
        assert stream.barrier().wait() is None
        stream.synchronize()
        stream.synchronize()

    crew.run(program)


def test_world_and_subgroup_calls_do_not_wait_for_each_other(crew: Crew) -> None:
    """One thread calls the world, another one a subgroup of the same ranks, in an order that differs between ranks."""

    def program(group: gw.Group) -> None:
        side = group.subgroup(range(group.size))
        entered = threading.Event()
        answers: list[Any] = []

        def beside() -> None:
            entered.wait(SOON)
            answers.extend(side.all_reduce(1) for _ in range(20))

        thread = threading.Thread(target=beside)
        thread.start()
        if group.rank == 0:  # it calls the world's barrier only after the subgroup's calls, which must not wait for it
            entered.set()
            thread.join(SOON)
            group.barrier(timeout=SOON)
        else:
            waiting = group.stream().barrier(timeout=SOON)
            entered.set()
            waiting.wait()
            thread.join(SOON)
        assert answers == [group.size] * 20

    crew.run(program)


def test_overlapping_subgroups_run_at_the_same_time() -> None:
    with crew_of("tcp", Topology.single(3)) as crew:

        def program(group: gw.Group) -> None:
            pairs = [group.subgroup(ranks) for ranks in ((0, 1), (0, 2), (1, 2)) if group.rank in ranks]
            sums: list[list[int]] = [[], []]

            def use(index: int) -> None:
                sums[index] = [pairs[index].all_reduce(1) for _ in range(50)]

            threads = [threading.Thread(target=use, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SOON)
            assert sums == [[2] * 50] * 2

        crew.run(program)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_ends_pending_works_with_closed(pair: list[gw.Group]) -> None:
    one, _ = pair
    stream = one.stream()
    works = [stream.all_reduce(np.ones(2)) for _ in range(3)]
    assert not works[0].done
    one.close()
    for work in works:
        with pytest.raises(gw.Closed):
            work.wait(SOON)
    with pytest.raises(gw.Closed):
        stream.barrier()
    with pytest.raises(gw.Closed):
        one.stream().barrier()


def test_close_ends_the_progress_threads_of_all_subgroups(pair: list[gw.Group]) -> None:
    before = set(progress_threads())

    def program(group: gw.Group) -> None:
        group.stream().barrier().wait()
        side = group.subgroup([0, 1])
        side.stream().barrier().wait()
        side.subgroup([group.rank]).stream().barrier().wait()

    run_ranks(pair, program)
    assert len(set(progress_threads()) - before) == 6
    for group in pair:
        group.close()
    for thread in set(progress_threads()) - before:
        thread.join(SOON)
        assert not thread.is_alive()


def test_stream_without_references_is_freed_after_its_works_ran(pair: list[gw.Group]) -> None:
    """The works of a stream without references still run, and their arrays are freed after that."""

    def program(group: gw.Group) -> bool:
        x = np.ones(10)
        held = weakref.ref(x)
        stream = group.stream()
        gone = weakref.ref(stream)
        stream.all_reduce(x)
        del stream, x
        group.barrier()

        def are_gone() -> bool:
            gc.collect()
            return gone() is None and held() is None

        return eventually(are_gone)

    assert run_ranks(pair, program) == [True] * 2


def test_stream_drops_works_that_succeeded() -> None:
    with gw.init() as group:
        stream = group.stream()
        works: weakref.WeakSet[gw.Work] = weakref.WeakSet()
        for _ in range(1000):
            works.add(work := stream.barrier())
            work.wait()
        assert len(works) < 100


def test_thread_that_used_the_group_and_ended_is_no_lost_rank() -> None:
    """The thread that used the group last may end. The rank is alive as long as one of its threads is."""
    ready = threading.Event()

    def program(group: gw.Group) -> int:
        if group.rank == 1:
            group.barrier()
            side = threading.Thread(target=lambda: group.subgroup([1]).barrier())
            side.start()
            side.join(SOON)
            assert not ready.wait(1.0)  # longer than a rank without threads would count as alive
        else:
            group.barrier()
        return int(group.all_reduce(1))

    assert run_group(2, program) == [2, 2]


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_callback_is_called_once_on_success_and_on_failure(
    pair: list[gw.Group], caplog: pytest.LogCaptureFixture
) -> None:
    results: list[object] = []

    def note(work: gw.Work) -> None:
        results.append(work.acknowledge_error() or work.result)

    stream = pair[0].stream()
    work = stream.all_reduce(1)
    works = [work]
    work.add_done_callback(note)
    work.add_done_callback(lambda work: 1 / 0)
    assert pair[1].all_reduce(1) == 2
    stream.synchronize(SOON)
    works.append(stream.barrier(timeout=0.05))
    works[1].add_done_callback(note)
    with pytest.raises(gw.Timeout) as caught:
        works[1].wait()
    end_progress(pair[0])
    assert results == [2, caught.value]
    work.add_done_callback(note)  # at once
    assert results == [2, caught.value, 2]
    assert "a done-callback of all_reduce raised an exception" in caplog.text


def test_callback_may_call_the_group_and_wait(crew: Crew) -> None:
    """Another progress thread takes over. Otherwise the callback would wait for its own thread."""
    added = threading.Barrier(crew.size)

    def program(group: gw.Group) -> list[int]:
        stream, results = group.stream(), []
        ended = threading.Event()

        def callback(work: gw.Work) -> None:
            results.append(work.result)
            results.append(stream.all_reduce(10).wait(SOON))
            results.append(group.all_reduce(100))
            ended.set()

        if group.rank:
            added.wait(SOON)  # rank 0 adds its callback before the work is done
        stream.all_reduce(1).add_done_callback(callback)
        if not group.rank:
            added.wait(SOON)
        assert ended.wait(SOON)
        results.append(stream.all_reduce(1000).wait(SOON))
        return results

    assert crew.run(program) == [[crew.size * 10**power for power in range(4)]] * crew.size


def test_wait_runs_works_that_no_thread_has_started(pair: list[gw.Group]) -> None:
    """The progress thread is blocked in a callback, so only the waiting thread can run the work."""
    added = threading.Event()

    def program(group: gw.Group) -> list[int]:
        if group.rank:
            assert added.wait(SOON)
            return [group.all_reduce(number) for number in range(4)]
        stream, busy, free = group.stream(), threading.Event(), threading.Event()
        first = stream.all_reduce(0)

        def block(work: gw.Work) -> None:
            busy.set()
            assert free.wait(SOON)

        first.add_done_callback(block)
        added.set()
        assert busy.wait(SOON)
        works = [stream.all_reduce(number) for number in (1, 2, 3)]
        works[2].wait()
        free.set()
        return [work.result for work in (first, *works)]

    assert run_ranks(pair, program) == [[0, 2, 4, 6]] * 2
