"""Ranks that end normally, or after another rank failed: none of them is reported as the cause by mistake."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

import gradwire as gw
from support.processes import Here, StartJob, place
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import run_ranks


def leave(how: str, group: gw.Group) -> None:
    if how == "close":
        group.close()
    elif how == "exit code":
        sys.exit(3)


def one_leaves_early(here: Here, how: str) -> None:
    group = gw.init()
    group.barrier()
    if group.rank == 1:
        group.send(np.full(3, 7.0), dst=0)
        leave(how, group)
        return
    here.receive()  # the test sends this after rank 1 has ended
    other = 2 - group.rank
    y = np.zeros(4)
    group.sendrecv(np.full(4, float(group.rank)), y, dst=other, src=other)
    pair = group.subgroup([0, 2])
    here.send(received=y.tolist(), sum=pair.all_reduce(1 + group.rank))
    here.receive()
    if group.rank == 0:
        last_words = np.zeros(3)
        group.recv(last_words, src=1)
        here.send(last_words=last_words.tolist())


@pytest.mark.parametrize("how", ["return", "exit code", "close"])
def test_rank_that_ends_is_not_lost_for_calls_that_do_not_need_it(job: StartJob, how: str) -> None:
    with job(one_leaves_early, 3, how) as ranks:
        assert ranks[1].ended() == (3 if how == "exit code" else 0)
        for rank in (ranks[0], ranks[2]):
            rank.send()
        for rank in (ranks[0], ranks[2]):
            assert rank.receive() == {"received": [2.0 - rank.number] * 4, "sum": 4}
        for rank in (ranks[0], ranks[2]):
            rank.send()
        assert ranks[0].receive() == {"last_words": [7.0, 7.0, 7.0]}
        assert [rank.ended() for rank in (ranks[0], ranks[2])] == [0, 0]
        assert "rror" not in ranks[0].output() + ranks[2].output()


def needs_one_that_left(here: Here, what: str) -> None:
    group = gw.init()
    group.barrier()
    if group.rank == 1:
        return
    here.receive()
    try:
        if what == "all_reduce":
            group.all_reduce(np.ones(3))  # needs rank 1
        elif what == "recv":
            group.recv(np.zeros(3), src=1)
        elif what == "small send":
            group.send(np.zeros(3), dst=1)
            group.recv(np.zeros(3), src=1)
        elif what == "large send":
            group.send(np.zeros(1 << 20), dst=1)
        elif what == "subgroup":
            group.subgroup([1, 2] if group.rank == 2 else [0, 1]).barrier()
    except gw.GradwireError as error:
        here.send_error(error)


@pytest.mark.parametrize("what", ["all_reduce", "recv", "small send", "large send", "subgroup"])
def test_call_that_needs_a_rank_that_left_raises_peer_lost(job: StartJob, what: str) -> None:
    with job(needs_one_that_left, 3, what) as ranks:
        assert ranks[1].ended() == 0
        for rank in (ranks[0], ranks[2]):
            rank.send()
        said = ""
        for rank in (ranks[0], ranks[2]):
            lost = rank.receive()
            said += f"{lost['text']}\n"
            assert (lost["error"], lost["culprit"], lost["generation"]) == ("PeerLost", 1, 1), lost
            assert f"(host {os.uname().nodename}, pid {ranks[1].pid}) left the job" in lost["text"]
        if what == "all_reduce":  # at least the first rank that raised was in the call
            assert f" left the job during all_reduce #2, {place(needs_one_that_left, '# needs')}\n" in said


def ends_after_an_error(here: Here, how: str) -> None:
    group = gw.init()
    group.barrier()
    here.send(ready=True)
    if group.rank == 3:
        here.receive()  # idle until the other ranks have raised and ended
    try:
        while True:
            group.barrier()
    except gw.GradwireError as error:
        if group.rank in (0, 1) and how == "os._exit":
            os._exit(1)
        if group.rank in (0, 1) and how == "raise":
            raise
        here.send_error(error)
        here.receive()


@pytest.mark.parametrize("how", ["return", "raise", "os._exit"])
def test_survivors_that_end_after_a_loss_are_not_named_as_its_culprit(job: StartJob, how: str) -> None:
    """Rank 4 is killed, and ranks 0 and 1 end with the error. Ranks 2 and 3 name neither, though 3 calls much later."""
    with job(ends_after_an_error, 5, how) as ranks:
        for rank in ranks:
            assert rank.receive()["ready"]
        ranks[4].signal()
        if how == "return":
            for rank in ranks[:2]:
                assert rank.receive()["culprit"] == 4
                rank.send()
        assert [rank.ended() for rank in ranks[:2]] == [0 if how == "return" else 1] * 2
        lost = ranks[2].receive()
        assert (lost["error"], lost["culprit"]) == ("PeerLost", 4), lost
        ranks[3].send()
        lost = ranks[3].receive()
        assert (lost["error"], lost["culprit"]) == ("PeerLost", 4), lost


# -- the same in one process ------------------------------------------------------------------------------------------


def test_close_can_be_repeated_and_ends_every_later_call() -> None:
    one, two = gw.loopback_pair()
    one.close()
    one.close()
    for call in (
        one.barrier,
        lambda: one.send(np.zeros(1), 1),
        lambda: one.recv(np.zeros(1), 1),
        lambda: one.subgroup([0, 1]),
        lambda: one.stream().barrier(),
    ):
        with pytest.raises(gw.Closed):
            call()
    with pytest.raises(gw.PeerLost, match=r"rank 0 .* left the job") as lost:
        two.barrier()
    assert (lost.value.culprit, lost.value.operation, lost.value.generation) == (0, "barrier", 1)
    assert isinstance(lost.value, ConnectionError)
    two.close()


def test_rank_whose_thread_ends_without_close_is_lost() -> None:
    """No kernel closes the links of an in-process rank."""
    groups = gw.local_group(3)

    def play(group: gw.Group) -> None:
        group.barrier()
        if group.rank == 1:
            return
        with pytest.raises(gw.PeerLost, match=r"rank 1 \(a thread of this process\) ended its thread") as lost:
            group.barrier()
        assert lost.value.culprit == 1

    run_ranks(groups, play)
    for group in groups:
        group.close()
