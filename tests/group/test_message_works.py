"""isend and irecv: messages that are sent and received while the program continues, on every transport."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import parts_of
from gradwire.wire import MAX_EAGER
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture
from support.in_process import every_pair_fixture as every_pair_fixture
from support.ranks import eventually, run_ranks

LARGE = 4 << 20  # bytes: more than the buffers of any socket
SIZES = (0, 8, MAX_EAGER, MAX_EAGER + 8, LARGE)


def numbers(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 62, nbytes // 8)


def test_isend_in_both_directions_of_any_size_arrives_whole(pair: list[gw.Group]) -> None:
    def play(group: gw.Group) -> None:
        other = 1 - group.rank
        sent = [group.isend(numbers(nbytes, group.rank), other, tag) for tag, nbytes in enumerate(SIZES)]
        group.send(np.array([group.rank]), other, tag=99)  # a send progresses while the long messages wait
        assert group.recv(tag=99)[0].tolist() == [other]
        buffers = [np.zeros(nbytes // 8, np.int64) for nbytes in SIZES]
        received = [group.irecv(x, other, tag) for tag, x in enumerate(buffers)]
        assert [work.wait() for work in received] == [other] * len(SIZES)
        assert all(np.array_equal(x, numbers(nbytes, other)) for x, nbytes in zip(buffers, SIZES, strict=True))
        assert [work.result for work in sent] == [None] * len(SIZES)
        assert all(work.done for work in (*sent, *received))

    run_ranks(pair, play)


def test_send_and_isend_of_one_tag_arrive_in_order(pair: list[gw.Group]) -> None:
    def play(group: gw.Group) -> None:
        sizes = (8, LARGE, 16, 24, LARGE + 8, 8)
        if group.rank == 0:
            works = [group.isend(numbers(nbytes, turn), dst=1) for turn, nbytes in enumerate(sizes)]
            group.send(numbers(80), dst=1)
            group.send(numbers(LARGE, 7), dst=1)
            for work in works:
                work.wait()
        else:
            for turn, nbytes in enumerate(sizes):
                array, sender = group.recv()
                assert np.array_equal(array, numbers(nbytes, turn))
                assert sender == 0
            assert np.array_equal(group.recv()[0], numbers(80))
            assert np.array_equal(group.recv()[0], numbers(LARGE, 7))

    run_ranks(pair, play)


def test_irecv_calls_get_messages_in_the_order_of_the_calls(pair: list[gw.Group]) -> None:
    buffers = np.zeros((5, 3), np.int64)
    works = [pair[1].irecv(row) for row in buffers]
    for number in range(5):
        pair[0].send(np.full(3, number), dst=1)
    assert [work.wait() for work in reversed(works)] == [0] * 5
    assert buffers[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("nbytes", [80, LARGE])
def test_irecv_into_a_strided_array_writes_its_elements_before_it_is_done(pair: list[gw.Group], nbytes: int) -> None:
    wide = np.zeros((nbytes // 8, 2), np.int64)
    work = pair[1].irecv(wide[:, 1])
    sent = pair[0].isend(numbers(nbytes), dst=1)
    assert eventually(lambda: work.done)
    assert np.array_equal(wide[:, 1], numbers(nbytes))
    assert not wide[:, 0].any()
    sent.wait()


@pytest.mark.parametrize("nbytes", [80, LARGE])
def test_wait_that_timed_out_leaves_the_message_pending(pair: list[gw.Group], nbytes: int) -> None:
    x = np.zeros(nbytes // 8, np.int64)
    receiving = pair[1].irecv(x, src=0, tag=3)
    for _ in range(2):
        with pytest.raises(gw.Timeout, match=r"irecv from rank 0 with tag 3 was not done in 0\.02 s; it") as caught:
            receiving.wait(timeout=0.02)
        assert (caught.value.operation, caught.value.peer, caught.value.culprit) == ("irecv", 0, None)
    assert not receiving.done
    run_ranks(pair, lambda group: group.barrier())
    sending = pair[0].isend(numbers(nbytes), dst=1, tag=3)
    assert receiving.wait(timeout=60) == 0
    assert np.array_equal(x, numbers(nbytes))
    sending.wait(timeout=60)


def test_isend_that_no_recv_matches_stays_pending_after_a_timeout(pair: list[gw.Group]) -> None:
    work = pair[0].isend(numbers(LARGE), dst=1)
    with pytest.raises(gw.Timeout, match=r"isend to rank 1 with tag 0 was not done in 0\.02 s; it stays pending"):
        work.wait(timeout=0.02)
    assert not work.done
    run_ranks(pair, lambda group: group.barrier())
    assert np.array_equal(pair[1].recv()[0], numbers(LARGE))
    assert work.wait() is None


def test_irecv_of_another_size_fails_and_keeps_the_message(pair: list[gw.Group]) -> None:
    work = pair[1].irecv(np.zeros(3))
    pair[0].send(np.ones(4), dst=1)
    for _ in range(2):
        with pytest.raises(gw.SizeMismatch, match="rank 0 sent 32 bytes with tag 0, the buffer has 24"):
            work.wait()
    assert pair[1].recv()[0].tolist() == [1.0] * 4


@pytest.mark.parametrize("bad", [-1, 0, 2, "1", 1.0])
def test_isend_to_an_invalid_rank_raises_at_once(pair: list[gw.Group], bad: Any) -> None:
    with pytest.raises(gw.InvalidRank):
        pair[0].isend(np.zeros(1), dst=bad)
    with pytest.raises(gw.InvalidRank):
        pair[0].irecv(np.zeros(1), src=bad)


def test_irecv_with_invalid_arguments_raises_at_once_and_posts_nothing(pair: list[gw.Group]) -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    calls: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: pair[0].irecv(fixed), gw.ArrayError),
        (lambda: pair[0].irecv(None), gw.ArrayError),
        (lambda: pair[0].isend({"a": 1}, dst=1), gw.ArrayError),
        (lambda: pair[0].isend(np.zeros(1), dst=1, tag=-1), gw.InvalidSize),
        (lambda: pair[0].irecv(np.zeros(1), tag=1 << 62), gw.InvalidSize),
        (lambda: pair[0].irecv(np.zeros(1)).wait(timeout=0), gw.InvalidSize),
    ]
    for call, kind in calls[:-1]:
        with pytest.raises(kind):
            call()
    assert parts_of(pair[0]).generation.mailbox.waiting == 0
    with pytest.raises(gw.InvalidSize):
        calls[-1][0]()


def test_closing_the_group_fails_pending_works_with_closed(pair: list[gw.Group], captured: CapturedLog) -> None:
    sending, receiving = pair[0].isend(numbers(LARGE), dst=1), pair[0].irecv(np.zeros(3))
    dropped = [pair[0].irecv(np.zeros(3))]
    pair[0].close()
    assert dropped.pop().done
    for work in (sending, receiving):
        for _ in range(2):
            with pytest.raises(gw.Closed):
                work.wait()
        assert work.done
        assert repr(work) == f"<gradwire.Work {work.operation}, failed>"
    for call in (lambda: pair[0].isend(np.zeros(1), 1), lambda: pair[0].irecv(np.zeros(1)), pair[0].probe):
        with pytest.raises(gw.Closed):
            call()
    gc.collect()
    assert not captured.lines  # the program closed the group, so it needs no notice about the works that it dropped


def test_closing_a_subgroup_fails_its_pending_works_and_not_those_of_the_group(pair: list[gw.Group]) -> None:
    subgroups = run_ranks(pair, lambda group: group.subgroup([0, 1]))
    inside, outside = subgroups[1].irecv(np.zeros(3)), pair[1].irecv(np.zeros(3))
    subgroups[1].close()
    with pytest.raises(gw.Closed):
        inside.wait()
    pair[0].send(np.ones(3), dst=1)
    assert outside.wait() == 0


def test_abort_fails_pending_works_and_later_data_does_not_reach_x(pair: list[gw.Group]) -> None:
    x = np.zeros(LARGE // 8, np.int64)
    works = [pair[1].irecv(x, src=0), pair[1].isend(numbers(LARGE), dst=0)]
    pair[0].abort("the loss is not a number")
    for work in works:
        with pytest.raises(gw.Aborted, match="the loss is not a number") as caught:
            work.wait()
        assert caught.value.culprit == 0
    assert not x.any()


def test_irecv_from_a_rank_that_left_raises_peer_lost(pair: list[gw.Group]) -> None:
    kept, missing = pair[1].irecv(np.zeros(3), tag=1), pair[1].irecv(np.zeros(3), tag=2)
    pair[0].send(np.ones(3), dst=1, tag=1)
    assert kept.wait() == 0
    pair[0].close()
    with pytest.raises(gw.PeerLost, match="left the job during irecv") as caught:
        missing.wait()
    assert caught.value.culprit == 0


def test_done_callbacks_run_without_a_wait_and_may_wait_for_other_messages(pair: list[gw.Group]) -> None:
    """The callback waits for a message to the same rank, which the thread that delivers messages has to send."""
    later, seen = pair[0].isend(numbers(LARGE, 1), dst=1, tag=2), threading.Event()
    results: list[Any] = []

    def after(work: gw.Work) -> None:
        later.wait()
        results.append(work.result)
        if len(results) == 2:
            seen.set()

    pair[0].isend(numbers(LARGE), dst=1, tag=1).add_done_callback(after)
    y = np.zeros(3)
    pair[0].irecv(y).add_done_callback(after)
    pair[1].send(np.ones(3), dst=0)
    pair[1].recv(tag=1)
    pair[1].recv(tag=2)
    assert seen.wait(60)
    assert sorted(map(str, results)) == ["1", "None"]
    assert y.tolist() == [1.0] * 3


def test_failed_work_that_no_thread_waits_for_is_logged(pair: list[gw.Group], captured: CapturedLog) -> None:
    def fail() -> None:
        work = pair[1].irecv(np.zeros(3))
        pair[0].send(np.ones(4), dst=1)
        assert eventually(lambda: work.done)

    fail()
    gc.collect()
    captured.wait_for("irecv failed, and the program never waited for its result: .*the buffer has 24")


def test_several_threads_wait_for_one_work(pair: list[gw.Group]) -> None:
    work, found = pair[1].irecv(np.zeros(3)), []
    threads = [threading.Thread(target=lambda: found.append(work.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    pair[0].send(np.ones(3), dst=1)
    for thread in threads:
        thread.join()
    assert found == [0] * 4
