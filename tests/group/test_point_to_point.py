"""send, recv, sendrecv and copy: messages arrive whole and in order, also after calls that timed out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import parts_of
from gradwire.wire import MAX_EAGER
from support.in_process import SOON, Clock
from support.in_process import message_clock_fixture as message_clock_fixture
from support.in_process import pair_fixture as pair_fixture
from support.ranks import closing, eventually, run_ranks

LARGE = 4 << 20  # bytes: more than the buffers of any socket


@pytest.fixture
def trio() -> Iterator[list[gw.Group]]:
    with closing(gw.local_group(3)) as groups:
        yield groups


def in_background(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def open_message_links(pair: list[gw.Group]) -> None:
    """Open the message links, so that dialling does not count towards the timeout of the first call."""
    for sender, receiver in ((0, 1), (1, 0)):
        pair[sender].send(np.zeros(1, np.uint8), dst=receiver)
        pair[receiver].recv(np.zeros(1, np.uint8), src=sender)


def pattern(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 8, MAX_EAGER, MAX_EAGER + 1, LARGE])
def test_send_of_any_size_arrives_whole(pair: list[gw.Group], nbytes: int) -> None:
    def play(group: gw.Group) -> None:
        if group.rank == 0:
            group.send(pattern(nbytes), dst=1)
            group.send(pattern(nbytes, 1), dst=1)
        else:
            x = np.zeros(nbytes, np.uint8)
            for seed in (0, 1):
                assert group.recv(x, src=0) == 0
                assert np.array_equal(x, pattern(nbytes, seed))

    run_ranks(pair, play)


def test_recv_of_tags_in_any_order_keeps_the_order_within_each_tag(pair: list[gw.Group]) -> None:
    for tag in (1, 2, 3):
        for number in (1, 2):
            pair[0].send(np.array([tag, number]), dst=1, tag=tag)
    large = in_background(lambda: pair[0].send(np.full(LARGE, 9, np.uint8), dst=1, tag=2))
    got, x = [], np.zeros(2, int)
    for tag in (3, 1, 1, 3, 2, 2):
        pair[1].recv(x, src=0, tag=tag)
        got.append(x.tolist())
    assert got == [[3, 1], [1, 1], [1, 2], [3, 2], [2, 1], [2, 2]]
    y = np.zeros(LARGE, np.uint8)
    pair[1].recv(y, tag=2)
    assert y.min() == 9
    large.join()


def test_recv_from_any_rank_returns_messages_in_order_of_arrival(trio: list[gw.Group]) -> None:
    x = np.zeros(1, int)
    order: list[int] = []
    mailbox = parts_of(trio[0]).generation.mailbox

    def kept() -> int:
        return mailbox.unmatched_bytes(1) + mailbox.unmatched_bytes(2)

    def one_more_than(before: int) -> bool:
        return eventually(lambda: kept() > before)

    for rank in (2, 1, 1, 2):
        before = kept()
        trio[rank].send(np.array([rank]), dst=0, tag=5)
        assert one_more_than(before)
        order.append(rank)
    assert [trio[0].recv(x, tag=5) for _ in range(4)] == order
    with pytest.raises(gw.Timeout, match="no message from any rank with tag 5") as caught:
        trio[0].recv(x, tag=5, timeout=0.05)
    assert (caught.value.culprit, caught.value.peer, caught.value.seconds) == (None, None, 0.05)


@pytest.mark.parametrize("bad", [-1, 2, 7, "1", None])
def test_send_and_recv_with_an_invalid_rank_raise_invalid_rank(pair: list[gw.Group], bad: Any) -> None:
    with pytest.raises(gw.InvalidRank):
        pair[0].send(np.zeros(1), dst=bad)
    if bad is not None:
        with pytest.raises(gw.InvalidRank):
            pair[0].recv(np.zeros(1), src=bad)


def test_send_and_recv_with_its_own_rank_are_refused_and_copy_works(pair: list[gw.Group]) -> None:
    for call in (
        lambda: pair[0].send(np.zeros(1), dst=0),
        lambda: pair[0].recv(np.zeros(1), src=0),
        lambda: pair[0].sendrecv(np.zeros(1), np.zeros(1), dst=0, src=0),
    ):
        with pytest.raises(gw.InvalidRank, match="rank 0 is this rank itself"):
            call()
    x, y = np.arange(4.0), np.zeros(4)
    pair[0].copy(x, y, src=0, dst=0)
    assert y.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("nbytes", [16, LARGE])
def test_recv_into_a_buffer_of_another_size_keeps_the_message(pair: list[gw.Group], nbytes: int) -> None:
    sender = in_background(lambda: pair[0].send(pattern(nbytes), dst=1))
    for wrong in (nbytes - 1, nbytes + 1, 0):
        message = f"rank 0 sent {nbytes} bytes with tag 0, the buffer has {wrong}"
        with pytest.raises(gw.SizeMismatch, match=message) as caught:
            pair[1].recv(np.zeros(wrong, np.uint8), src=0)
        assert (caught.value.expected, caught.value.got, caught.value.peer) == (wrong, nbytes, 0)
    x = np.zeros(nbytes, np.uint8)
    pair[1].recv(x, src=0)
    assert np.array_equal(x, pattern(nbytes))
    sender.join()


# -- time-outs leave everything in its place --------------------------------------------------------------------------


def test_recv_that_timed_out_can_be_repeated(pair: list[gw.Group]) -> None:
    x = np.zeros(3)
    for _ in range(3):
        with pytest.raises(
            gw.Timeout, match=r"no message from rank 0 with tag 0 arrived in 0.02 s; .* repeated"
        ) as caught:
            pair[1].recv(x, src=0, timeout=0.02)
        assert (caught.value.culprit, caught.value.peer) == (None, 0)
    pair[0].send(np.arange(3.0), dst=1)
    assert pair[1].recv(x, src=0) == 0
    assert x.tolist() == [0, 1, 2]
    run_ranks(pair, lambda group: group.barrier())


def test_send_without_a_recv_times_out_and_leaves_the_group_usable(pair: list[gw.Group]) -> None:
    open_message_links(pair)
    for _ in range(2):
        with pytest.raises(gw.Timeout, match=r"waited 0.05 s for a recv there.*use sendrecv") as caught:
            pair[0].send(pattern(LARGE), dst=1, timeout=0.05)
        assert (caught.value.culprit, caught.value.peer, caught.value.operation) == (None, 1, "send")
    # The offers were withdrawn: the next message is the next one sent.
    sender = in_background(lambda: pair[0].send(pattern(LARGE, 3), dst=1))
    x = np.zeros(LARGE, np.uint8)
    pair[1].recv(x, src=0)
    assert np.array_equal(x, pattern(LARGE, 3))
    sender.join()
    with pytest.raises(gw.Timeout):
        pair[1].recv(x, src=0, timeout=0.05)
    run_ranks(pair, lambda group: group.barrier())


def test_send_in_both_directions_times_out_where_sendrecv_succeeds(pair: list[gw.Group]) -> None:
    def play(group: gw.Group) -> None:
        with pytest.raises(gw.Timeout, match="use sendrecv"):
            group.send(pattern(LARGE), dst=1 - group.rank, timeout=0.2)
        group.barrier()
        x = np.zeros(LARGE, np.uint8)
        group.sendrecv(pattern(LARGE, group.rank), x, dst=1 - group.rank, src=1 - group.rank)
        assert np.array_equal(x, pattern(LARGE, 1 - group.rank))

    open_message_links(pair)
    run_ranks(pair, play)


def test_sendrecv_that_timed_out_withdraws_its_recv(pair: list[gw.Group]) -> None:
    open_message_links(pair)
    y = np.zeros(2)
    with pytest.raises(gw.Timeout, match="sendrecv"):
        pair[0].sendrecv(pattern(LARGE), y, dst=1, src=1, timeout=0.05)
    pair[1].send(np.ones(2), dst=0)
    x = np.zeros(2)
    pair[0].recv(x, src=1)
    assert (x.tolist(), y.tolist()) == ([1, 1], [0, 0])


def test_small_sends_in_both_directions_do_not_wait_for_each_other(pair: list[gw.Group]) -> None:
    def play(group: gw.Group) -> list[int]:
        other = 1 - group.rank
        for number in range(1000):
            group.send(np.array([number]), dst=other)
        x, got = np.zeros(1, int), []
        for _ in range(1000):
            group.recv(x, src=other)
            got.append(int(x[0]))
        return got

    assert run_ranks(pair, play) == [list(range(1000))] * 2


def test_unreceived_messages_are_bounded_and_none_is_lost(
    pair: list[gw.Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver stops reading at its limit, and the sender then waits. A timeout of the sender loses no message."""
    from gradwire.generation import mailbox
    from gradwire.transports.frames import Outbox

    open_message_links(pair)
    monkeypatch.setattr(mailbox, "MAX_UNMATCHED_BYTES", 1 << 20)
    monkeypatch.setattr(Outbox, "MAX_WAITING", 1 << 20)
    block, sent = np.zeros(MAX_EAGER, np.uint8), 0
    with pytest.raises(gw.Timeout, match="rank 1 does not read its messages"):
        while sent < 2000:
            block[:8].view(np.int64)[0] = sent
            pair[0].send(block, dst=1, timeout=0.2)
            sent += 1
    assert sent < 1000, "far more messages were accepted than the limit allows"
    assert parts_of(pair[1]).generation.mailbox.unmatched_bytes(0) < 2 << 20
    for number in range(sent):  # reading resumes as soon as there is room
        pair[1].recv(block, src=0)
        assert block[:8].view(np.int64)[0] == number


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_messages_arrive_in_order(pair: list[gw.Group], count: int) -> None:

    def play(group: gw.Group) -> bool:
        x = np.zeros(1, np.int64)
        if group.rank == 0:
            for number in range(count):
                x[0] = number
                group.send(x, dst=1)
            return True
        for number in range(count):
            group.recv(x, src=0)
            if x[0] != number:
                return False
        return True

    assert run_ranks(pair, play) == [True, True]


def test_recv_time_does_not_grow_with_the_number_of_waiting_messages(pair: list[gw.Group]) -> None:
    """The time to find a message must not depend on how many are waiting."""
    x = np.zeros(1, np.int64)
    for number in range(20_000):
        x[0] = number
        pair[0].send(x, dst=1, tag=number % 7)
    began = time.process_time()  # CPU time does not depend on how busy the machine is
    for number in reversed(range(20_000)):
        pair[1].recv(x, src=0, tag=number % 7)
    assert time.process_time() - began < 8


# -- shapes and threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [8, 64 << 20])
def test_sendrecv_around_a_ring_returns_each_array_to_its_rank(nbytes: int) -> None:
    groups = gw.local_group(3) if nbytes == 8 else list(gw.loopback_pair())

    def play(group: gw.Group) -> bool:
        x = np.full(nbytes // 8, group.rank, np.int64)
        y = np.empty_like(x)
        for _ in range(group.size):
            group.sendrecv(x, y, dst=(group.rank + 1) % group.size, src=(group.rank - 1) % group.size)
            x, y = y, x
        return bool((x == group.rank).all())

    assert all(run_ranks(groups, play, timeout=60))
    for group in groups:
        group.close()


@pytest.mark.parametrize("rows", [3, 1000])
def test_copy_between_strided_arrays_copies_every_element(trio: list[gw.Group], rows: int) -> None:
    source = np.arange(rows * 600.0).reshape(rows, 600)

    def play(group: gw.Group) -> Any:
        x = source[::-1, ::3] if group.rank == 2 else None
        y = np.zeros((200, rows), order="F").T[:, ::-1] if group.rank == 0 else None
        if group.rank != 1:
            group.copy(x, y, src=2, dst=0)
        return y

    assert np.array_equal(run_ranks(trio, play)[0], source[::-1, ::3])


def test_recv_into_a_strided_array_writes_only_its_elements(pair: list[gw.Group]) -> None:
    y = np.zeros((4, 6))
    pair[0].send(np.arange(8.0), dst=1)
    pair[1].recv(y[:, 1:5:2], src=0)
    assert y[:, 1].tolist() == [0, 2, 4, 6]
    assert y[:, 3].tolist() == [1, 3, 5, 7]
    assert y[:, ::2].sum() == 0


@pytest.mark.parametrize("nbytes", [8, LARGE])
def test_threads_of_one_rank_send_and_receive_at_the_same_time(pair: list[gw.Group], nbytes: int) -> None:
    def play(group: gw.Group) -> list[bool]:
        other = 1 - group.rank
        fine: list[bool] = []

        def exchange(tag: int) -> None:
            for turn in range(5):
                x = np.zeros(nbytes, np.uint8)
                if (tag + group.rank) % 2:
                    group.send(pattern(nbytes, tag * 100 + turn), dst=other, tag=tag)
                else:
                    group.recv(x, src=other, tag=tag)
                    fine.append(np.array_equal(x, pattern(nbytes, tag * 100 + turn)))

        threads = [in_background(lambda tag=tag: exchange(tag)) for tag in range(4)]  # type: ignore[misc]
        group.barrier()  # collectives have links of their own
        for thread in threads:
            thread.join()
        return fine

    assert run_ranks(pair, play) == [[True] * 10] * 2


def test_recv_that_does_not_fit_hides_no_message_from_a_recv_that_fits(pair: list[gw.Group]) -> None:
    """Two requests wait for the message. The one that does not fit must not hide the message from the other."""
    outcomes: list[object] = []

    def receive(count: int) -> None:
        try:
            pair[1].recv(np.zeros(count, np.uint8), src=0)
            outcomes.append(count)
        except gw.SizeMismatch as error:
            outcomes.append(type(error))

    requests = parts_of(pair[1]).generation.mailbox
    small = in_background(lambda: receive(3))
    assert eventually(lambda: requests.waiting == 1)
    right = in_background(lambda: receive(5))
    assert eventually(lambda: requests.waiting == 2)
    pair[0].send(np.zeros(5, np.uint8), dst=1)
    small.join()
    right.join()
    assert sorted(map(str, outcomes)) == ["5", str(gw.SizeMismatch)]


def test_copy_into_another_dtype_is_refused_and_keeps_the_message() -> None:
    one, two = gw.loopback_pair()
    with one, two:
        one.copy(np.arange(6), None, src=0, dst=1)
        with pytest.raises(gw.ArrayError, match="rank 0 copies int64, but y is float64"):
            two.copy(None, np.zeros(6), src=0, dst=1)
        y = np.zeros(6, np.int64)
        two.copy(None, y, src=0, dst=1)
        assert y.tolist() == [0, 1, 2, 3, 4, 5]
        one.copy(np.arange(6), None, src=0, dst=1)
        with pytest.raises(gw.SizeMismatch, match="rank 0 copies 48 bytes, the buffer has 32") as caught:
            two.copy(None, np.zeros(4, np.int64), src=0, dst=1)
        assert caught.value.operation == "copy"


def test_sendrecv_after_a_slow_send_has_only_the_remaining_time_for_its_recv(message_clock: Clock) -> None:
    one, two = gw.loopback_pair()
    with one, two:
        open_message_links([one, two])
        errors: list[BaseException] = []

        def sendrecv() -> None:
            try:
                one.sendrecv(np.zeros(LARGE, np.uint8), np.zeros(3), dst=1, src=1, timeout=2.0)
            except gw.Timeout as error:
                errors.append(error)

        message_clock.stop()
        waiting = in_background(sendrecv)
        with pytest.raises(gw.SizeMismatch):
            two.recv(np.zeros(1), src=0)  # received in order, so the long message is offered by now
        message_clock.advance(1.5)
        two.recv(np.zeros(LARGE, np.uint8), src=0)
        message_clock.advance(1.0)
        waiting.join(SOON)
        assert [type(error) for error in errors] == [gw.Timeout]
        message_clock.resume()
