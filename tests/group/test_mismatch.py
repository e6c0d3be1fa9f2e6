"""CollectiveMismatch: ranks that make different calls all raise it, with every rank's call and source line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import GroupInternals
from support.in_process import groups_fixture as groups_fixture
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import eventually, run_ranks

WAITS = {
    "gradwire.liveness.control_protocol.BEHIND_SECONDS": 5.0,
    "gradwire.liveness.verdict.CALLS_SECONDS": 10.0,
    "gradwire.group.group.COMPARE_SECONDS": 20.0,
}
Call = Callable[[gw.Group], Any]


def ones(count: int = 4, dtype: str = "float32") -> Any:
    return np.ones(count, dtype)


# The call of most ranks, the call of the odd rank, and how the error shows the odd call.
DIFFERENCES: dict[str, tuple[Call, Call, str]] = {
    "operation": (
        lambda group: group.all_reduce(ones()),
        lambda group: group.broadcast(ones()),
        "broadcast(float32[4], root=0)",
    ),
    "barrier": (lambda group: group.barrier(), lambda group: group.all_reduce(1), "all_reduce(int64[1], op='sum')"),
    "count": (
        lambda group: group.all_reduce(ones()),
        lambda group: group.all_reduce(ones(5)),
        "all_reduce(float32[5], op='sum')",
    ),
    "large count": (
        lambda group: group.all_reduce(ones(1 << 20)),
        lambda group: group.all_reduce(ones(1 << 19)),
        "all_reduce(float32[524288], op='sum')",
    ),
    "dtype": (
        lambda group: group.all_reduce(ones()),
        lambda group: group.all_reduce(ones(4, "int32")),
        "all_reduce(int32[4], op='sum')",
    ),
    "reduce op": (
        lambda group: group.all_reduce(ones()),
        lambda group: group.all_reduce(ones(), op="max"),
        "all_reduce(float32[4], op='max')",
    ),
    "root": (
        lambda group: group.reduce(ones(), root=0),
        lambda group: group.reduce(ones(), root=1),
        "reduce(float32[4], op='sum', root=1)",
    ),
    "algorithm": (
        lambda group: group.all_reduce(ones(), algorithm="ring"),
        lambda group: group.all_reduce(ones(), algorithm="star"),
        "all_reduce(float32[4], op='sum', algorithm='star')",
    ),
    "two roots": (
        lambda group: group.broadcast(ones(), root=0),
        lambda group: group.broadcast(ones(), root=1),
        "broadcast(float32[4], root=1)",
    ),
    "trailing shape": (
        lambda group: group.all_gather(np.ones((2, 3))),
        lambda group: group.all_gather(np.ones((2, 4))),
        "all_gather(float64[?, 4])",
    ),
    "gathered dtype": (
        lambda group: group.gather(np.ones((2, 3))),
        lambda group: group.gather(np.ones((2, 3), "int8")),
        "gather(int8[?, 3], root=0)",
    ),
    "value": (
        lambda group: group.broadcast_value({"epoch": 1}, root=0),
        lambda group: group.all_gather_values({"epoch": 1}),
        "all_gather_values()",
    ),
}


def line(call: Call) -> str:
    return f"{Path(__file__).name}:{call.__code__.co_firstlineno}"


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for the calls of all ranks, so that errors show all of them on a busy machine too."""
    lengthen_waits(monkeypatch)


def lengthen_waits(patch: pytest.MonkeyPatch) -> None:
    for name, seconds in WAITS.items():
        patch.setattr(name, seconds)


def mismatch_of(group: gw.Group, call: Call) -> gw.CollectiveMismatch:
    """Return the mismatch that a call or the one after it raises. A rank that only sends learns of it later."""
    with pytest.raises(gw.CollectiveMismatch) as caught:
        call(group)
        assert eventually(lambda: GroupInternals(group).is_broken)
        group.barrier()
    return caught.value


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_mismatch_on_any_argument_shows_the_call_of_every_rank_on_all_ranks(
    groups: list[gw.Group], difference: str
) -> None:
    usual, odd, shown = DIFFERENCES[difference]
    run_ranks(groups, lambda group: group.barrier())
    errors = run_ranks(groups, lambda group: mismatch_of(group, odd if group.rank == 1 else usual))
    assert len({str(error) for error in errors}) == 1
    text = str(errors[0])
    assert re.match(r"ranks disagree on call #2\b", text)
    assert f"\n  rank 1: {shown} at {line(odd)}" in text
    for rank in {0, 2} & set(range(len(groups))):
        assert re.search(rf"\n  rank {rank}: .* at {line(usual)}", text), text
    for error in errors:
        assert error.culprit == (1 if len(groups) == 3 else None)
        assert error.generation == 1


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("after", ["idle", "all_reduce", "recv", "send"])
def test_broadcast_with_two_roots_raises_mismatch_whatever_the_ranks_do_next(
    groups: list[gw.Group], after: str
) -> None:
    def play(group: gw.Group) -> gw.CollectiveMismatch:
        with pytest.raises(gw.CollectiveMismatch, match=r"rank 1: broadcast\(float32\[4\], root=1\)") as caught:
            group.broadcast(ones(), root=0 if group.rank == 0 else 1)
            if after == "all_reduce":
                group.all_reduce(ones())
            elif after == "recv":
                group.recv(ones(), src=(group.rank + 1) % group.size)
            elif after == "send":
                group.send(ones(1 << 20), dst=(group.rank + 1) % group.size)
            assert eventually(lambda: GroupInternals(group).is_broken)
            group.barrier()
        return caught.value

    errors = run_ranks(groups, play)
    assert {error.culprit for error in errors} == {0 if len(groups) == 3 else None}


@pytest.mark.usefixtures("long_waits")
def test_mismatch_of_call_order_names_the_first_call_that_differs(groups: list[gw.Group]) -> None:
    def play(group: gw.Group) -> gw.CollectiveMismatch:
        def calls(group: gw.Group) -> None:
            first, second = ("max", "min") if group.rank == 1 else ("min", "max")
            group.all_reduce(ones(), op="sum")
            group.reduce(ones(), op=first)
            group.reduce(ones(), op=second)
            group.barrier()

        return mismatch_of(group, calls)

    for error in run_ranks(groups, play):
        assert str(error).startswith("ranks disagree on call #2\n")
        assert "rank 1: reduce(float32[4], op='max', root=0)" in str(error)


def test_mismatch_by_a_skipped_call_shows_the_later_call_of_that_rank(groups: list[gw.Group]) -> None:
    def play(group: gw.Group) -> gw.CollectiveMismatch:
        def calls(group: gw.Group) -> None:
            if group.rank != 0:
                group.all_reduce(ones())
            group.barrier()
            group.barrier()

        return mismatch_of(group, calls)

    for error in run_ranks(groups, play):
        assert error.culprit == (0 if len(groups) == 3 else None)
        assert str(error).startswith("ranks disagree on call #1\n  rank 0: barrier() at ")


# -- maps and counts --------------------------------------------------------------------------------------------------


def arrays(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: np.zeros(shape, "float32") for name, shape in shapes.items()}


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize(
    ("usual", "odd", "said"),
    [
        (
            lambda: arrays(weight=(2,), bias=(1,)),
            lambda: arrays(weight=(2,), offset=(1,)),
            "'bias': float32[1] is in the map of rank 0, not of rank 1",
        ),
        (
            lambda: arrays(weight=(2, 3), bias=(1,)),
            lambda: arrays(weight=(3, 2), bias=(1,)),
            "'weight': float32[2, 3] is in the map of rank 0, not of rank 1",
        ),
        (
            lambda: arrays(a=(1,), b=(1,)),
            lambda: arrays(a=(1,), b=(1,), extra=(5,)),
            "'extra': float32[5] is in the map of rank 1, not of rank 0",
        ),
        (
            lambda: arrays(a=(1,)),
            lambda: {"a": np.zeros(1, "float64")},
            "'a': float32[1] is in the map of rank 0, not of rank 1",
        ),
    ],
    ids=["name", "shape", "one more", "dtype"],
)
def test_all_reduce_named_with_different_maps_names_the_array_that_differs(
    groups: list[gw.Group], usual: Callable[[], Any], odd: Callable[[], Any], said: str
) -> None:
    def play(group: gw.Group) -> gw.CollectiveMismatch:
        return mismatch_of(group, lambda group: group.all_reduce_named((odd if group.rank == 1 else usual)()))

    for error in run_ranks(groups, play):
        assert str(error).startswith(f"ranks disagree on call #1: {said}\n  rank 0: all_reduce_named("), str(error)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda group: group.scatter(np.ones(6) if group.rank == 0 else None, counts=splits(group, 6)),
            r"rank 1 expects counts=\[\d, .*\], rank 0 splits by \[\d, .*\]",
        ),
        (
            lambda group: group.all_to_all(
                np.ones(6), send_counts=splits(group, 6), recv_counts=[1 if group.rank == 1 else n for n in got(group)]
            ),
            r"rank 1 expects recv_counts=\[1, 1.*\], the others send it \[\d, .*\]",
        ),
    ],
    ids=["scatter", "all_to_all"],
)
def test_mismatch_of_counts_shows_expected_and_actual_counts(groups: list[gw.Group], call: Call, said: str) -> None:
    for error in run_ranks(groups, lambda group: mismatch_of(group, call)):
        assert re.match(rf"ranks disagree on call #\d: {said}\n  rank 0: ", str(error)), str(error)


def splits(group: gw.Group, rows: int) -> list[int]:
    """Return counts that differ on rank 1."""
    parts = [rows // group.size] * group.size
    if group.rank == 1:
        parts[0] += 1
        parts[1] -= 1
    return parts


def got(group: gw.Group) -> list[int]:
    """Return the number of rows that a rank receives from each rank, given `splits`."""
    usual = 6 // group.size
    return [usual + (group.rank == 0) - (group.rank == 1) if rank == 1 else usual for rank in range(group.size)]


def test_calls_of_two_groups_in_different_order_raise_no_mismatch() -> None:
    """The world and a subgroup have separate orders, so their calls may be interleaved differently on each rank."""
    groups = gw.local_group(3)

    def play(group: gw.Group) -> list[int]:
        sums = []
        if group.rank < 2:
            inner = group.subgroup([0, 1])
            if group.rank == 0:
                sums.append(int(inner.all_reduce(1)))
                sums.append(int(group.all_reduce(1)))
            else:
                work = inner.stream().all_reduce(np.ones(1, np.int64))
                sums.append(int(group.all_reduce(1)))
                sums.append(int(work.wait()[0]))
        else:
            sums.append(int(group.all_reduce(1)))
        return sorted(sums)

    assert run_ranks(groups, play) == [[2, 3], [2, 3], [3]]
    for group in groups:
        group.close()


def test_mismatch_in_a_subgroup_breaks_all_ranks_and_shows_only_its_members() -> None:
    groups = gw.local_group(4)

    def play(group: gw.Group) -> str:
        def call(group: gw.Group) -> None:
            if group.rank != 2:
                group.subgroup([0, 1, 3]).broadcast(ones(group.rank + 1), root=0)

        return str(mismatch_of(group, call))

    run_ranks([groups[rank] for rank in (0, 1, 3)], lambda group: group.subgroup([0, 1, 3]).barrier())

    for text in run_ranks(groups, play):
        assert re.findall(r"  rank (\d):", text) == ["0", "1", "3"]
    for group in groups:
        group.close()


# -- between processes ------------------------------------------------------------------------------------------------


def disagrees(here: Here, difference: str) -> None:
    lengthen_waits(pytest.MonkeyPatch())  # until the end of this process
    group = gw.init()
    group.barrier()
    usual, odd, _ = DIFFERENCES[difference]
    try:
        (odd if group.rank == 1 else usual)(group)
        assert eventually(lambda: GroupInternals(group).is_broken)
        group.barrier()
    except gw.GradwireError as error:
        here.send_error(error)


@pytest.mark.parametrize("difference", ["operation", "large count", "two roots", "trailing shape"])
def test_mismatch_between_processes_names_the_odd_rank_and_its_line(job: StartJob, difference: str) -> None:
    usual, odd, shown = DIFFERENCES[difference]
    with job(disagrees, 3, difference) as ranks:
        for rank in ranks:
            report = rank.receive()
            assert (report["error"], report["culprit"]) == ("CollectiveMismatch", 1), report
            assert f"\n  rank 1: {shown} at {line(odd)}" in report["text"]
            assert f" at {line(usual)}\n" in report["text"]


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("n", [2, 3])
def test_broadcast_with_two_roots_raises_mismatch_when_the_with_block_ends(n: int) -> None:
    def leave_at_once(group: gw.Group) -> str:
        try:
            with group:
                group.broadcast(np.ones(3), root=group.rank % 2)
        except gw.CollectiveMismatch as error:
            return str(error)
        return "no error"

    for text in run_ranks(gw.local_group(n), leave_at_once):
        assert "root=0" in text
        assert "root=1" in text
        assert "test_mismatch.py" in text


def test_with_block_ends_without_the_other_rank_and_without_an_error() -> None:
    stays, leaves = gw.local_group(2)
    with leaves:
        pass
    stays.close()
