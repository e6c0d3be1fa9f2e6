"""Tests that the verifier rejects wrong schedules and reports where and why."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest

from gradwire.collectives import (
    ROOTED,
    Copy,
    Finish,
    Fold,
    From,
    InvalidSchedule,
    Program,
    Recv,
    Schedule,
    Send,
    Slice,
    build,
    verify,
)
from gradwire.collectives.schedule import Phase
from gradwire.errors import GradwireError
from support.schedule_mutations import mutants, with_program, with_programs
from support.schedule_table import CELLS, schedules

IN, OUT, ACC = Slice("in", 0), Slice("out", 0), Slice("acc", 0)


def survivors(schedule: Schedule, sample: int | None = None) -> list[str]:
    """Return descriptions of the mutations that the verifier did not detect."""
    candidates = list(mutants(schedule))
    if sample is not None:
        candidates = random.Random(schedule.size).sample(candidates, min(sample, len(candidates)))
    return [what for what, mutant in candidates if not rejects(mutant)]


def rejects(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except InvalidSchedule:
        return True
    return False


@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_verify_rejects_every_small_mutation(collective: str, algorithm: str) -> None:
    for size in (1, 2, 3, 4):
        for schedule in schedules(collective, algorithm, size, roots=1 if size == 4 else 2):
            assert survivors(schedule) == []


@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_verify_rejects_mutations_of_larger_schedules(collective: str, algorithm: str) -> None:
    for size in (6, 9):
        for schedule in schedules(collective, algorithm, size, roots=2):
            assert survivors(schedule, sample=80) == []


@pytest.mark.parametrize(("collective", "algorithm"), [cell for cell in CELLS if cell[0] in ROOTED])
def test_verify_rejects_a_schedule_for_another_root(collective: str, algorithm: str) -> None:
    schedule = build(collective, algorithm, 4, root=1)
    for root in (0, 2, 3):
        assert rejects(replace(schedule, root=root))


def test_verify_rejects_a_schedule_of_another_collective() -> None:
    assert rejects(replace(build("all_gather", "ring", 3), collective="reduce_scatter"))
    assert rejects(replace(build("reduce", "star", 3, root=0), collective="all_reduce", root=None))
    assert rejects(replace(build("gather", "star", 3, root=0), collective="all_gather", root=None))


def pair(collective: str, first: Program, second: Program, *, segments: int = 1, separate: bool = False) -> Schedule:
    """A handmade schedule of two ranks."""
    programs = [first, second]
    phase = Phase(range(2), segments, len(first), programs.__getitem__, separate)
    return Schedule(collective, "handmade", 2, 0 if collective in ROOTED else None, phase)


def reason(schedule: Schedule) -> str:
    with pytest.raises(InvalidSchedule) as caught:
        verify(schedule)
    return caught.value.reason


def swap_inputs(*, partial: bool = False) -> tuple[Program, Program]:
    """Both ranks send their input and fold: an all-reduce without the finish."""
    return (
        ((Send(IN, (1,)), Fold(ACC, (IN, From(1, partial)))),),
        ((Send(IN, (0,)), Fold(ACC, (From(0, partial), IN))),),
    )


END: Program = ((Finish(OUT, ACC),),)


def test_verify_accepts_a_handmade_all_reduce() -> None:
    first, second = swap_inputs()
    assert verify(pair("all_reduce", first + END, second + END, separate=True)) == {0: (0, 1)}


def test_verify_error_names_rank_round_and_reason_and_survives_pickling() -> None:
    schedule = build("all_reduce", "ring", 3)
    program = schedule.program(1)
    with pytest.raises(InvalidSchedule) as caught:
        verify(with_program(schedule, 1, ((program[0][1],), *program[1:])))
    error: InvalidSchedule = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, GradwireError)
    assert isinstance(error, ValueError)
    assert (error.rank, error.round_number, error.operation) == (2, 0, "acc[0] = ←1 + in[0]")
    assert error.reason == "rank 1 does not send it in this round"
    assert str(error) == (
        "all_reduce by ring with 3 ranks: rank 2, round 0, acc[0] = ←1 + in[0]: rank 1 does not send it in this round"
    )


def test_verify_sending_a_slice_that_is_folded_into_needs_a_separate_acc() -> None:
    first, second = swap_inputs()
    assert "writes segment 0 in the same round" in reason(pair("all_reduce", first + END, second + END))


def test_verify_rejects_ranks_that_fold_in_different_orders() -> None:
    first, _ = swap_inputs()
    second: Program = ((Send(IN, (0,)), Fold(ACC, (IN, From(0, False)))),)
    assert "another order" in reason(pair("all_reduce", first + END, second + END, separate=True))


def test_verify_rejects_messages_whose_types_disagree() -> None:
    first, second = swap_inputs(partial=True)
    assert "another type" in reason(pair("all_reduce", first + END, second + END, separate=True))


def test_verify_rejects_folding_or_finishing_a_finished_result() -> None:
    first, second = swap_inputs()
    send_result: Program = ((Send(OUT, (1,)),), ())
    fold: Program = ((Fold(ACC, (From(0, False),)),), ((Finish(OUT, ACC),)))
    schedule = pair("all_reduce", first + END + send_result, second + END + fold, separate=True)
    assert reason(schedule) == "it folds a finished result"


def test_verify_rejects_finishing_an_incomplete_result() -> None:
    fold_own: Program = ((Fold(ACC, (IN,)),), *END)
    assert reason(pair("all_reduce", fold_own, fold_own)) == "the input of rank 1 is missing"


def test_verify_rejects_an_input_that_counts_twice() -> None:
    twice: Program = ((Fold(ACC, (IN, IN)),), *END)
    assert reason(pair("all_reduce", twice, twice)) == "it folds the input of rank 0 twice"


def test_verify_rejects_reading_an_overlaid_buffer_after_it_was_overwritten() -> None:
    first: Program = ((Fold(ACC, (IN, From(1, False))),), (Send(IN, (1,)),), *END)
    second: Program = ((Send(IN, (0,)),), (Fold(ACC, (From(0, False), IN)),), *END)
    assert reason(pair("all_reduce", first, second)) == "in[0] may have been overwritten"
    assert verify(pair("all_reduce", first, second, separate=True)) == {0: (0, 1)}


def test_verify_copy_beside_readers_of_its_source_is_accepted_and_reading_its_target_is_not() -> None:
    recv: Program = ((Recv(OUT, 0),),)
    assert verify(pair("broadcast", ((Copy(OUT, IN), Send(IN, (1,))),), recv)) == {0: 0}
    assert "in the same round" in reason(pair("broadcast", ((Copy(OUT, IN), Send(OUT, (1,))),), recv))


def test_verify_rejects_redundant_or_unused_work() -> None:
    recv: Program = ((Recv(OUT, 0),), (Recv(OUT, 0),))
    send: Program = ((Copy(OUT, IN), Send(IN, (1,))), (Send(IN, (1,)),))
    assert reason(pair("broadcast", send, recv)) == "out[0] already holds this value"
    unused: Program = ((Recv(OUT, 0),), (Recv(ACC, 0),))
    assert reason(pair("broadcast", send, unused)) == "acc[0] is never read"


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (Send(IN, (0,)), "rank 0 is not another rank"),
        (Send(IN, (2,)), "rank 2 is not another rank"),
        (Send(IN, ()), "it has no receivers or no terms"),
        (Send(Slice("in", 1), (1,)), "in[1] is not within the 1 segments"),
        (Send(Slice("in", 0, 0), (1,)), "in[0:0] is not within the 1 segments"),
        (Send(IN, (1,)), "rank 1 does not receive it in this round"),
        (Recv(OUT, 1), "rank 1 does not send it in this round"),
        (Recv(IN, 1), "it must not write inputs"),
        (Fold(ACC, (IN,)), "broadcast does not reduce"),
        (Finish(OUT, ACC), "broadcast does not reduce"),
        (Copy(OUT, ACC), "acc[0] was never written"),
    ],
    ids=str,
)
def test_verify_rejects_single_wrong_operations(op: Send | Recv | Fold | Finish | Copy, why: str) -> None:
    assert reason(pair("broadcast", ((op,),), ((),))) == why


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (Fold(OUT, (IN,)), "a fold must write acc"),
        (Fold(ACC, ()), "it has no receivers or no terms"),
        (Finish(OUT, IN), "a finish must read acc and write out"),
        (Copy(ACC, IN), "a copy must not change the type"),
        (Copy(OUT, Slice("in", 1)), "in[1] and out[0] are not the same segments"),
        (Copy(Slice("out", 1), Slice("in", 1)), "rank 0 has no output out[1]"),
    ],
    ids=str,
)
def test_verify_rejects_single_wrong_operations_of_a_reduction(op: Fold | Finish | Copy, why: str) -> None:
    assert reason(pair("reduce_scatter", ((op,),), ((),), segments=2)) == why


def test_verify_rejects_sending_a_slice_that_was_never_written() -> None:
    assert reason(pair("broadcast", ((Send(OUT, (1,)),),), ((Recv(OUT, 0),),))) == "out[0] was never written"


def test_verify_rejects_ranks_with_different_numbers_of_rounds() -> None:
    schedule = build("broadcast", "star", 2)
    programs = [schedule.program(0), (*schedule.program(1), ())]
    assert reason(with_programs(schedule, programs)) == "it has 2 rounds, but rank 0 has 1"


def test_verify_names_a_rank_that_ends_without_its_result() -> None:
    with pytest.raises(InvalidSchedule, match=r"rank 1: it ends without out\[0\]") as caught:
        verify(pair("broadcast", ((Copy(OUT, IN),),), ((),)))
    assert caught.value.rank == 1
    assert caught.value.operation is None
