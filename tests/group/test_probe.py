"""probe, and recv without a buffer: the receiver learns dtype and shape from the message, on every transport."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import DTYPES, parse_dtype
from gradwire.wire import MAX_EAGER
from support.in_process import every_pair_fixture as every_pair_fixture
from support.ranks import run_ranks

SHAPES = ((), (0,), (3,), (2, 3), (0, 5), (4, 0, 7), (1,) * 32, (MAX_EAGER // 2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recv_without_a_buffer_returns_the_array_of_the_sender(pair: list[gw.Group], dtype: str) -> None:
    storage = parse_dtype(dtype).storage

    def values(shape: tuple[int, ...]) -> Any:
        return np.random.default_rng(1).integers(0, 2, shape).astype(storage)

    def play(group: gw.Group) -> None:
        for shape in SHAPES:
            if group.rank == 0:
                group.send(values(shape), dst=1)
            else:
                array, sender = group.recv()
                assert (array.dtype, array.shape, sender) == (storage, shape, 0)
                assert array.tobytes() == values(shape).tobytes()
                assert array.flags.writeable
                assert array.flags.owndata

    run_ranks(pair, play)


def test_recv_without_a_buffer_of_a_strided_array_has_its_shape(pair: list[gw.Group]) -> None:
    x = np.arange(24.0).reshape(4, 6)[::-1, ::2].T
    pair[0].send(x, dst=1)
    assert np.array_equal(pair[1].recv()[0], x)


def test_recv_with_a_buffer_of_another_dtype_gets_the_bytes(pair: list[gw.Group]) -> None:
    pair[0].send(np.arange(6.0).reshape(2, 3), dst=1)
    x = np.zeros(6, np.int64)
    assert pair[1].recv(x) == 0
    assert x.view(np.float64).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [5, 1_000_000])
def test_probe_describes_the_message_and_leaves_it(pair: list[gw.Group], count: int) -> None:
    work = pair[0].isend(np.ones((count, 2), np.float32), dst=1, tag=7)
    message = pair[1].probe(tag=7)
    assert message == gw.Message(0, 7, 8 * count, np.dtype(np.float32), (count, 2))
    assert pair[1].probe(src=0, tag=7) == message
    x = np.zeros(message.shape, message.dtype)
    assert pair[1].recv(x, message.source, message.tag) == 0
    assert x.all()
    work.wait()
    with pytest.raises(gw.Timeout):
        pair[1].probe(tag=7, timeout=0.02)


def test_probe_of_several_messages_finds_the_one_that_recv_gets(pair: list[gw.Group]) -> None:
    works = [pair[0].isend(np.zeros(count), dst=1) for count in (3, 100_000, 5)]
    for count in (3, 100_000, 5):
        assert pair[1].probe().shape == (count,)
        assert pair[1].recv()[0].shape == (count,)
    for work in works:
        work.wait()


def test_probe_without_a_message_times_out_and_leaves_the_group_usable(pair: list[gw.Group]) -> None:
    pair[0].send(np.zeros(1), dst=1, tag=1)
    with pytest.raises(
        gw.Timeout, match=r"no message from any rank with tag 0 arrived in 0\.02 s; the probe can"
    ) as caught:
        pair[1].probe(timeout=0.02)
    assert (caught.value.operation, caught.value.culprit) == ("probe", None)
    run_ranks(pair, lambda group: group.barrier())
    assert pair[1].probe(tag=1).nbytes == 8


def test_probe_returns_when_a_message_arrives(pair: list[gw.Group]) -> None:
    found: list[gw.Message] = []
    thread = threading.Thread(target=lambda: found.append(pair[1].probe(src=0)))
    thread.start()
    pair[0].send(np.zeros(2, np.int16), dst=1)
    thread.join()
    assert found == [gw.Message(0, 0, 4, np.dtype(np.int16), (2,))]


def test_probe_of_a_rank_that_left_raises_peer_lost(pair: list[gw.Group]) -> None:
    pair[0].send(np.zeros(1), dst=1)
    assert pair[1].probe().source == 0
    pair[0].close()
    assert pair[1].recv()[1] == 0  # it was sent before the rank left
    with pytest.raises(gw.PeerLost, match="left the job during probe"):
        pair[1].probe()


def test_probe_with_invalid_arguments_raises_at_once(pair: list[gw.Group]) -> None:
    for bad in (1, 2, -1, "0"):
        with pytest.raises(gw.InvalidRank):
            pair[1].probe(src=bad)  # type: ignore[arg-type]
    with pytest.raises(gw.InvalidSize):
        pair[1].probe(tag=-1)
    with pytest.raises(gw.InvalidSize):
        pair[1].probe(timeout=0)


def test_probe_and_recv_without_a_buffer_in_a_group_of_one_rank_raise_invalid_rank() -> None:
    with gw.init() as group:
        for call in (group.probe, group.recv, lambda: group.irecv(np.zeros(1))):
            with pytest.raises(gw.InvalidRank, match="only one rank"):
                call()


def test_recv_without_a_buffer_that_timed_out_can_be_repeated(pair: list[gw.Group]) -> None:
    with pytest.raises(gw.Timeout, match="the recv can be repeated"):
        pair[1].recv(timeout=0.02)
    work = pair[0].isend(np.arange(100_000), dst=1)
    array, _ = pair[1].recv()
    assert np.array_equal(array, np.arange(100_000))
    work.wait()


@pytest.mark.parametrize("value", [{"epoch": 3}, [1, 2], (1,), "text", 3, None], ids=str)
def test_send_of_a_plain_value_points_to_the_calls_for_values(pair: list[gw.Group], value: Any) -> None:
    for call in (pair[0].send, pair[0].isend):
        with pytest.raises(gw.ArrayError, match="broadcast_value and all_gather_values take plain values"):
            call(value, dst=1)
