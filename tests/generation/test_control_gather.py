"""The control gather: all ranks exchange values in numbered rounds, and a rank that is missing or differs is named."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

import gradwire as gw
from gradwire.errors import Aborted, Closed, CollectiveMismatch, InvalidSize, PeerLost, Timeout
from gradwire.generation.waiting import OperationWait
from gradwire.group.internals import parts_of
from gradwire.wire import MAX_CONTROL
from support.ranks import eventually, run_group, run_ranks

LONG = 30.0


def gather(group: gw.Group, value: Any, operation: str = "init", timeout: float = LONG) -> list[Any]:
    return parts_of(group).generation.control_gather.gather(value, operation, timeout)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_control_gather_returns_the_values_of_all_ranks_in_each_round(size: int) -> None:
    def body(group: gw.Group) -> list[list[Any]]:
        return [gather(group, [number, group.rank, None, {"x": "ü"}]) for number in range(20)]

    expected = [[[number, rank, None, {"x": "ü"}] for rank in range(size)] for number in range(20)]
    assert run_group(size, body) == [expected] * size


def test_control_gather_counts_no_call_and_no_bytes_of_the_group() -> None:
    def body(group: gw.Group) -> tuple[int, int]:
        gather(group, group.rank)
        return parts_of(group).runner.calls.sequence, group.bytes_sent

    assert run_group(3, body) == [(0, 0)] * 3


def test_control_gather_after_a_rank_left_raises_peer_lost() -> None:
    def body(group: gw.Group) -> None:
        assert gather(group, group.rank) == [0, 1, 2]
        if group.rank == 1:
            group.close()
            return
        with pytest.raises(PeerLost) as caught:
            gather(group, None)
        assert caught.value.culprit == 1

    run_group(3, body)


def test_control_gather_uses_values_that_a_rank_sent_before_its_thread_ended() -> None:
    groups = gw.local_group(3)
    ended = threading.Event()

    def dies(group: gw.Group) -> None:
        group.barrier()  # records which thread acts for this rank
        assert gather(group, "last value")[2] == 2

    def body(group: gw.Group) -> None:
        group.barrier()
        assert ended.wait(LONG) if group.rank == 0 else True
        assert gather(group, group.rank)[1] == "last value"
        with pytest.raises(PeerLost) as caught:
            gather(group, group.rank)
        assert caught.value.culprit == 1

    thread = threading.Thread(target=dies, args=(groups[1],))
    thread.start()
    ended.set()
    run_ranks([groups[0], groups[2]], body)
    thread.join(LONG)
    for group in groups:
        group.close()


def test_control_gather_without_a_rank_times_out_and_names_it() -> None:
    over = threading.Event()

    def body(group: gw.Group) -> None:
        if group.rank == 2:
            assert over.wait(LONG)
            return
        with pytest.raises(Timeout, match="init") as caught:
            gather(group, None, timeout=0.6)
        assert caught.value.culprit == 2
        over.set()

    run_group(3, body)


def test_control_gather_of_different_operations_raises_mismatch() -> None:
    def body(group: gw.Group) -> None:
        with pytest.raises(CollectiveMismatch, match="settling"):
            gather(group, None, "settling" if group.rank else "init")

    run_group(2, body)


def test_control_gather_is_ended_by_an_abort() -> None:
    def body(group: gw.Group) -> None:
        if group.rank == 0:
            group.abort("enough")
        with pytest.raises(Aborted, match="enough"):
            gather(group, None)

    run_group(2, body)


def test_control_gather_of_a_too_large_value_is_refused_before_sending() -> None:
    def body(group: gw.Group) -> list[Any]:
        with pytest.raises(InvalidSize, match="settling"):
            gather(group, "x" * MAX_CONTROL, "settling")
        return gather(group, group.rank, "settling")

    assert run_group(2, body) == [[0, 1]] * 2


@pytest.mark.parametrize("numbers", [[0], [2], [-1], [1, 1], [1 << 70]])
def test_control_gather_message_with_a_wrong_round_raises_value_error(numbers: list[int]) -> None:
    with gw.local_group(2)[0] as group:
        control = parts_of(group).generation.control
        *first, last = [json.dumps({"t": "tell", "n": number, "o": "init", "v": None}).encode() for number in numbers]
        for word in first:
            control.receive(1, word, 0.0)
        with pytest.raises(ValueError, match="unexpected value of round"):
            control.receive(1, last, 0.0)


@pytest.mark.parametrize("message", [{}, {"n": 1, "v": 2}, {"n": "1", "o": "", "v": 2}, {"n": 1, "o": 3, "v": 2}])
def test_control_gather_message_with_a_bad_field_raises_value_error(message: dict[str, Any]) -> None:
    with gw.local_group(2)[0] as group, pytest.raises(ValueError, match="malformed"):
        parts_of(group).generation.control.receive(1, json.dumps({"t": "tell", **message}).encode(), 0.0)


def test_control_gather_interrupted_while_waiting_raises_aborted_on_later_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ctrl_c(*_: object) -> None:
        raise KeyboardInterrupt

    def body(group: gw.Group) -> None:
        control = parts_of(group).generation.control
        if group.rank == 1:
            assert eventually(lambda: not control.intact)
        with pytest.raises(KeyboardInterrupt if group.rank == 0 else Aborted):
            gather(group, None)
        assert not control.intact

    monkeypatch.setattr(OperationWait, "poll", ctrl_c)  # only rank 0 waits
    run_group(2, body)


def test_control_gather_interrupted_before_sending_raises_aborted_on_waiting_ranks() -> None:
    def body(group: gw.Group) -> None:
        control = parts_of(group).generation.control

        def ctrl_c(*_: object) -> None:
            raise KeyboardInterrupt

        if group.rank == 0:
            control.share = ctrl_c  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt if group.rank == 0 else Aborted):
            gather(group, None)
        assert not control.intact

    run_group(2, body)


def test_control_gather_of_a_closed_group_raises_closed() -> None:
    group = gw.local_group(2)[0]
    group.close()
    with pytest.raises(Closed):
        gather(group, None)
