"""Tests the proofs of the claims of schedules: true claims are accepted, and each rule rejects false ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.collectives import (
    Copy,
    Finish,
    Fold,
    From,
    InvalidSchedule,
    Operation,
    Program,
    Recv,
    Schedule,
    Send,
    Slice,
    build,
    prove_once,
    verify,
)
from gradwire.collectives.claims import objections
from gradwire.collectives.schedule import Phase
from gradwire.collectives.verify import PROVED_RANKS
from gradwire.group import plan_cache
from support.ranks import run_ranks
from support.schedule_mutations import claiming, with_program
from support.schedule_table import CELLS

IN, OUT, ACC = Slice("in", 0), Slice("out", 0), Slice("acc", 0)


@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_schedules_claim_only_what_the_native_executor_uses(collective: str, algorithm: str) -> None:
    schedule = build(collective, algorithm, 3)
    assert schedule.one_shot == ((collective, algorithm) == ("all_reduce", "oneshot"))
    assert schedule.mirrored == ((collective, algorithm) == ("all_reduce", "direct"))


def handmade(programs: list[Program], collective: str = "all_reduce", **claims: bool) -> Schedule:
    phase = Phase(range(len(programs)), 1, len(programs[0]), programs.__getitem__, **claims)
    return Schedule(collective, "handmade", len(programs), None, phase)


def reasons(schedule: Schedule) -> list[str]:
    return [objection.reason for objection in objections(schedule)]


# -- one shot ----------------------------------------------------------------------------------------------------------


def shot(rank: int, size: int = 3) -> tuple[Send, Fold]:
    others = tuple(other for other in range(size) if other != rank)
    return Send(IN, others), Fold(ACC, tuple(IN if r == rank else From(r, False) for r in range(size)))


def one_shot_with(*, last: Program) -> Schedule:
    """A one-shot schedule of three ranks, in which the last rank has the program `last`."""
    right: list[Program] = [(shot(rank), (Finish(OUT, ACC),)) for rank in range(2)]
    return handmade([*right, last], one_shot=True)


def test_one_shot_that_sends_all_and_folds_in_rank_order_is_proved() -> None:
    assert reasons(one_shot_with(last=(shot(2), (Finish(OUT, ACC),)))) == []


@pytest.mark.parametrize(
    "ops",
    [
        (Send(IN, (0,)),),
        (Send(ACC, (0, 1)),),
        (Fold(ACC, (From(1, False), From(0, False), IN)),),
        (Fold(ACC, (From(0, False), IN)),),
        (Fold(ACC, (From(0, False), From(1, False), ACC)),),
        (Recv(OUT, 0),),
        (Copy(OUT, IN),),
    ],
    ids=lambda ops: str(ops[0]),
)
def test_one_shot_with_an_operation_that_does_not_fit_is_refused(ops: tuple[Operation, ...]) -> None:
    (found,) = objections(one_shot_with(last=(ops, (Finish(OUT, ACC),))))
    assert (found.rank, found.round_number, found.operation) == (2, 0, ops[0])
    assert "claims to be one shot" in found.reason


def test_one_shot_with_a_second_exchange_is_refused() -> None:
    send = shot(2)[0]
    assert len(reasons(one_shot_with(last=((), (send,))))) == 1


def test_one_shot_of_several_segments_or_another_collective_is_refused() -> None:
    assert "only an all-reduce of one segment" in reasons(claiming(build("all_reduce", "direct", 2), one_shot=True))[0]
    assert "only an all-reduce of one segment" in reasons(claiming(build("broadcast", "star", 2), one_shot=True))[0]


# -- mirrored ----------------------------------------------------------------------------------------------------------


def mirrored(*rounds: tuple[Operation, ...], others: tuple[tuple[Operation, ...], ...] | None = None) -> Schedule:
    """A schedule of three ranks: rank 0 has these rounds, rank 1 has `others`, and rank 2 does nothing."""
    idle = ((),) * len(rounds)
    return handmade([rounds, others or idle, idle], mirrored=True)


@pytest.mark.parametrize(
    "rounds",
    [
        ((Recv(OUT, 1),),),
        ((Send(IN, (1,)),), (Recv(OUT, 1),)),
        ((Fold(ACC, (IN, From(1, False))),), (Finish(OUT, ACC),), (Send(OUT, (1, 2)),)),
        ((Recv(OUT, 1),), (Send(OUT, (2,)),)),
        ((Copy(OUT, IN), Send(IN, (1,))),),
    ],
    ids=["received", "sent and received back", "folded and sent", "received and sent", "copied and sent"],
)
def test_mirrored_where_the_sender_of_a_part_reads_it_last_is_proved(rounds: tuple[Any, ...]) -> None:
    assert reasons(mirrored(*rounds)) == []


@pytest.mark.parametrize(
    ("rounds", "why"),
    [
        (((Send(IN, (1,)),), (Recv(OUT, 2),)), "rank 2 is not the only rank that had to read segment 0"),
        (((Send(IN, (1, 2)),), (Recv(OUT, 1),)), "rank 1 is not the only rank that had to read segment 0"),
        (((Send(IN, (1,)),), (Send(IN, (2,)),), (Recv(OUT, 1),)), "rank 1 is not the only rank"),
        (((Fold(ACC, (IN,)),), (Recv(OUT, 1),)), "rank 1 is not the only rank that had to read segment 0"),
        (((Recv(OUT, 1),), (Recv(OUT, 2),)), "rank 2 is not the only rank that had to read segment 0"),
        (((Send(IN, (1,)),), (Fold(ACC, (IN,)),)), "ranks that segment 0 was sent to may still read it"),
        (((Send(OUT, (1,)),), (Finish(OUT, ACC),)), "ranks that segment 0 was sent to may still read it"),
        (((Send(IN, (1,)),), (Copy(OUT, IN),)), "ranks that segment 0 was sent to may still read it"),
        (((Send(ACC, (1,)),),), "a partial result is sent, which may be in the memory of the result"),
        (((Recv(ACC, 1),),), "it receives a message that is not a part of the result"),
    ],
    ids=str,
)
def test_mirrored_where_a_segment_may_still_be_read_is_refused(rounds: tuple[Any, ...], why: str) -> None:
    (reason,) = reasons(mirrored(*rounds))
    assert reason.startswith(f"it claims to be mirrored, but {why}")


def test_mirrored_where_a_part_of_the_result_is_folded_is_refused() -> None:
    schedule = mirrored((Fold(ACC, (IN, From(1, False))),), others=((Send(OUT, (0,)),),))
    why = "it folds a message of rank 1 that may be a part of the result"
    assert reasons(schedule) == [f"it claims to be mirrored, but {why}"]


def test_mirrored_where_ranks_have_different_results_is_refused() -> None:
    found = reasons(claiming(build("reduce_scatter", "direct", 2), mirrored=True))
    assert found == ["it claims to be mirrored, but does not end with all segments"] * 2


def test_mirrored_with_a_separate_acc_is_refused() -> None:
    assert "it claims to be mirrored, but needs a separate acc" in reasons(
        claiming(build("all_reduce", "oneshot", 2), mirrored=True)
    )


# -- before a schedule is used -----------------------------------------------------------------------------------------


def test_verify_false_claim_names_rank_round_and_reason() -> None:
    with pytest.raises(InvalidSchedule) as caught:
        verify(claiming(build("all_reduce", "ring", 4), mirrored=True))
    assert (caught.value.rank, caught.value.round_number) == (0, 1)
    assert "a partial result is sent" in caught.value.reason


@pytest.mark.parametrize("size", [2, PROVED_RANKS + 1])
def test_prove_once_refuses_a_false_claim_at_any_size(size: int) -> None:
    with pytest.raises(InvalidSchedule, match="claims to be one shot"):
        prove_once(claiming(build("all_reduce", "star", size), one_shot=True))


def test_prove_once_refuses_a_schedule_that_is_wrong() -> None:
    schedule = build("all_reduce", "ring", 3)
    with pytest.raises(InvalidSchedule, match="does not send it"):
        prove_once(with_program(schedule, 1, ((),) * schedule.rounds))


def test_group_refuses_a_wrong_schedule_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Schedule:
        schedule = build(*args, **options)
        return with_program(schedule, 0, ((),) * schedule.rounds)

    def call(group: gw.Group) -> list[int]:
        x = np.arange(5)
        with pytest.raises(InvalidSchedule):
            group.all_reduce(x)
        return x.tolist()

    groups = gw.local_group(2)
    monkeypatch.setattr(plan_cache, "build", broken)
    assert run_ranks(groups, call) == [[0, 1, 2, 3, 4]] * 2
