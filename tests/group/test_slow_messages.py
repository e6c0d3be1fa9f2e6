"""The notice about a message that waits for long: it names a cycle of blocking sends, or the peer's last call."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gradwire as gw
from gradwire.generation import waiting
from gradwire.wire import MAX_EAGER
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture
from support.in_process import pair_fixture as pair_fixture
from support.ranks import closing, run_ranks

LONG = np.zeros(MAX_EAGER + 1, np.uint8)
CYCLE = "this is a cycle of blocking sends; use sendrecv, or isend and then recv"


@pytest.fixture(autouse=True)
def short_slow_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SLOW_SECONDS", 0.1)


def receive_after(group: gw.Group, src: int, captured: CapturedLog, *notices: str) -> threading.Thread:
    """Receive a long message on another thread, as soon as these lines were logged."""

    def receive() -> None:
        for notice in notices:
            captured.wait_for(notice)
        group.recv(src=src)

    thread = threading.Thread(target=receive)
    thread.start()
    return thread


def test_two_ranks_that_send_long_messages_first_are_told_that_it_is_a_cycle(
    pair: list[gw.Group], captured: CapturedLog
) -> None:
    notices = [
        rf"rank {rank} has waited \d+ s in send to rank {1 - rank}, which has not called recv; "
        rf"rank {1 - rank} waits in a send to this rank: {CYCLE}"
        for rank in (0, 1)
    ]

    def play(group: gw.Group) -> None:
        group.barrier()
        receiver = receive_after(group, 1 - group.rank, captured, *notices)
        group.send(LONG, dst=1 - group.rank)
        receiver.join()

    run_ranks(pair, play)
    assert not captured.count("barrier")


def test_three_ranks_that_send_in_a_ring_are_told_which_rank_waits_for_them(captured: CapturedLog) -> None:
    notices = [
        rf"rank {rank} has waited .* to rank {(rank + 1) % 3}, which has not called recv; ranks that wait in a send to "
        rf"this rank: {(rank - 1) % 3}; if this is a cycle of blocking sends, use sendrecv"
        for rank in range(3)
    ]

    def play(group: gw.Group) -> None:
        receiver = receive_after(group, (group.rank - 1) % 3, captured, *notices)
        group.send(LONG, dst=(group.rank + 1) % 3)
        receiver.join()

    with closing(gw.local_group(3)) as groups:
        run_ranks(groups, play)


def test_send_to_a_rank_with_a_pending_isend_is_not_called_a_cycle(pair: list[gw.Group], captured: CapturedLog) -> None:
    run_ranks(pair, lambda group: group.barrier())
    work = pair[1].isend(LONG, dst=0)
    pair[0].probe()
    receiver = receive_after(pair[1], 0, captured, r"rank 0 has waited .* rank 1's last call was barrier\(\) #1")
    pair[0].send(LONG, dst=1)
    receiver.join()
    pair[0].recv()
    work.wait()
    assert not captured.count("cycle")


def test_long_wait_for_isend_and_irecv_is_logged(pair: list[gw.Group], captured: CapturedLog) -> None:
    sending, receiving = pair[0].isend(LONG, dst=1), pair[0].irecv(np.zeros(3), src=1, tag=4)
    receiver = receive_after(pair[1], 0, captured, r"rank 0 has waited \d+ s for isend to rank 1, which")
    sending.wait()
    receiver.join()

    def answer() -> None:
        captured.wait_for(r"rank 0 has waited \d+ s for a message from rank 1 with tag 4; rank 1's last call was")
        pair[1].send(np.zeros(3), dst=0, tag=4)

    answering = threading.Thread(target=answer)
    answering.start()
    assert receiving.wait() == 1
    answering.join()
