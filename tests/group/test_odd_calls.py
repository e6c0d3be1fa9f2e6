"""Refused calls, unusual arguments, callbacks and forks: the group remains usable afterwards."""

from __future__ import annotations

import os
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import GroupInternals
from support.crews import crew_of
from support.ranks import eventually, run_ranks


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_all_gather_with_an_unusable_out_is_refused_before_anything_is_sent(transport: str) -> None:
    def run(group: gw.Group) -> list[list[int]]:
        x = np.array([group.rank + 7])
        found = [group.all_gather(x).tolist() for _ in range(3)]  # the third call takes the fast path
        if group.rank == 0:
            whole, fixed = np.zeros(2, np.int64), np.zeros(2, np.int64)
            fixed.flags.writeable = False
            for mine, out, why in (
                (x, np.empty(2, np.float32), "float32"),
                (whole[:1], whole, "out overlaps x"),
                (x, fixed, "read-only"),
            ):
                with pytest.raises(gw.ArrayError, match=why):
                    group.all_gather(mine, out=out)
        return [*found, group.all_gather(x).tolist()]

    with crew_of(transport, gw.Topology.single(2)) as crew:
        assert crew.run(run) == [[[7, 8]] * 4] * 2


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_all_gather_into_an_out_of_another_length_fails_on_that_rank_alone(transport: str, length: int) -> None:
    """The length of the result is known only during the exchange, which the other ranks must be able to finish."""

    def run(group: gw.Group) -> list[list[int]]:
        x = np.array([group.rank + 7])
        found = [group.all_gather(x).tolist() for _ in range(3)]
        out = np.zeros(length if group.rank == 0 else 2, np.int64)
        if group.rank == 0:
            with pytest.raises(gw.ArrayError, match=rf"out is int64\[{length}\], but the result is int64\[2\]"):
                group.all_gather(x, out=out)
            assert not out.any()
        else:
            found.append(group.all_gather(x, out=out).tolist())
        return [*found, group.all_gather(x).tolist()]

    with crew_of(transport, gw.Topology.single(2)) as crew:
        assert crew.run(run) == [[[7, 8]] * 4, [[7, 8]] * 5]


def test_callback_waits_for_a_later_work_while_the_main_thread_is_in_a_call() -> None:
    queued = threading.Event()
    later: list[gw.Work] = []
    found: list[float] = []

    def callback(_: gw.Work) -> None:
        queued.wait(30)
        found.append(later[0].wait())

    def run(group: gw.Group) -> None:
        if group.rank == 1:
            group.all_reduce(1.0)
            queued.wait(30)
            group.barrier()
            group.all_reduce(2.0)
            return
        stream = group.stream()
        stream.all_reduce(1.0).add_done_callback(callback)

        def add() -> None:
            if eventually(lambda: GroupInternals(group).calls_made == 2):  # the main thread is in its barrier
                later.append(stream.all_reduce(2.0))
                queued.set()

        adding = threading.Thread(target=add)
        adding.start()
        group.barrier()
        adding.join(30)
        assert eventually(lambda: bool(found))

    run_ranks(gw.local_group(2), run)
    assert found == [4.0]


def leave(_: gw.Work) -> None:
    raise SystemExit


def test_callback_that_raises_system_exit_stops_no_later_work() -> None:
    def run(group: gw.Group) -> float:
        stream = group.stream()
        stream.all_reduce(1.0).add_done_callback(leave)
        return float(stream.all_reduce(2.0).wait(timeout=30))

    assert run_ranks(gw.local_group(2), run) == [4.0] * 2


@pytest.mark.parametrize("timeout", [Fraction(1, 100), 10**400], ids=["short", "long"])
def test_wait_accepts_any_positive_number_as_timeout(timeout: Any) -> None:
    one, two = gw.local_group(2)
    with one, two:
        work = one.stream().barrier()
        if timeout < 1:
            with pytest.raises(gw.Timeout, match=r"0\.01 s"):
                work.wait(timeout)
        two.barrier()
        work.wait(timeout if timeout > 1 else None)


@pytest.mark.parametrize("strided", [False, True])
def test_all_reduce_of_a_read_only_view_may_write_to_the_same_memory(strided: bool) -> None:
    def run(group: gw.Group) -> list[float]:
        memory = np.arange(6.0)
        out = memory[::2] if strided else memory[:3]
        x = out.view()
        x.flags.writeable = False
        group.all_reduce(x, out=out)
        group.reduce(x, root=0, out=out if group.rank == 0 else None)
        return [float(value) for value in out]

    zero, one = run_ranks(gw.local_group(2), run)
    assert zero == [2 * value for value in one]


def test_recv_in_a_group_of_one_raises_invalid_rank() -> None:
    with gw.init() as group, pytest.raises(gw.InvalidRank):
        group.recv(np.zeros(1))


def test_recover_called_again_returns_the_present_group() -> None:
    def run(group: gw.Group) -> int:
        present = group.recover()
        with present:
            assert group.recover() is present
            return int(present.all_reduce(1))

    assert run_ranks(gw.local_group(2), run) == [2, 2]


def test_large_message_arrives_at_a_rank_whose_own_sends_exceed_the_limit() -> None:
    one, two = gw.loopback_pair()
    with one, two:
        small, y = np.ones(1 << 16, np.uint8), np.zeros(1 << 17)
        for _ in range(1040):  # more than `two` stores without a recv
            one.send(small, 1, tag=5)
        asked = threading.Thread(target=lambda: one.recv(y, 1, tag=9))
        asked.start()
        two.send(np.ones(1 << 17), 0, tag=9, timeout=60)
        asked.join(60)
        assert y.all()


def test_isend_and_irecv_in_a_forked_child_raise_closed_and_end_in_the_parent() -> None:
    one, two = gw.local_group(2)
    with one, two:
        works = [two.irecv(np.zeros(3)), one.isend(np.zeros(100_000), dst=1, tag=1)]
        pid = os.fork()
        if pid == 0:
            closed = 0
            for work in works:
                try:
                    assert not work.done
                    work.wait()
                except gw.Closed:
                    closed += 1
            os._exit(0 if closed == len(works) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        one.send(np.ones(3), dst=1)
        assert two.recv(tag=1)[0].size == 100_000
        assert [work.wait() for work in works] == [0, None]


def test_wait_in_a_forked_child_raises_closed() -> None:
    one, two = gw.local_group(2)
    with one, two:
        work = one.stream().all_reduce(1)
        pid = os.fork()
        if pid == 0:
            try:
                work.wait()
            except gw.Closed:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        two.all_reduce(1)
        assert work.wait() == 2
