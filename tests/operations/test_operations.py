"""Tests operations: invalid arguments are refused before anything is sent, and edge cases have the right results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import GroupInternals
from gradwire.topology import Topology
from support.crews import TRANSPORTS, Crew, crew_of


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def three(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with crew_of(request.param, Topology.single(3)) as crew:
        yield crew


X = np.zeros(6)
READ_ONLY = np.zeros(18)
READ_ONLY.flags.writeable = False
COUNTS: list[Any] = [[2, 2], [2, 2, 2, 2], [7, -1, 0], [3, 3, 3], [1.5, 2.5, 2], "222", 6, [[2], [2], [2]], [None] * 3]

NONSENSE: dict[str, tuple[Callable[[gw.Group], Any], type[Exception], str]] = {
    "mean of integers": (lambda g: g.all_reduce(np.ones(3, int), "mean"), gw.UnsupportedOp, "convert to a float type"),
    "mean of a number": (lambda g: g.all_reduce(3, "mean"), gw.UnsupportedOp, "'mean' has no meaning for int64"),
    "mean of booleans": (lambda g: g.reduce(np.ones(3, bool), "mean"), gw.UnsupportedOp, "no meaning for bool"),
    "maximum of complex": (lambda g: g.all_reduce(np.ones(3, complex), "max"), gw.UnsupportedOp, "for complex128"),
    "minimum of complex": (lambda g: g.reduce_scatter(np.ones(3, "c8"), "min"), gw.UnsupportedOp, "for complex64"),
    "an unknown op": (lambda g: g.all_reduce(X, "median"), gw.UnsupportedOp, "there are sum, mean, min, max, prod"),
    "an op of torch": (lambda g: g.all_reduce(X, "avg"), gw.UnsupportedOp, "'avg': did you mean 'mean'[?]"),
    "a misspelt op": (lambda g: g.reduce(X, "summ"), gw.UnsupportedOp, "did you mean 'sum'[?]"),
    "no op": (lambda g: g.all_reduce(X, None), gw.UnsupportedOp, "unknown reduce op None"),  # type: ignore[arg-type]
    "a list of ops": (lambda g: g.all_reduce(X, ["sum"]), gw.UnsupportedOp, "unknown reduce op"),  # type: ignore[arg-type]
    "an unknown op on nothing": (lambda g: g.all_reduce_named({}, "median"), gw.UnsupportedOp, "unknown reduce op"),
    "an unknown algorithm": (
        lambda g: g.all_reduce(X, algorithm="magic"),
        gw.UnsupportedOp,
        "no algorithm 'magic'; it has: auto, star, ring",
    ),
    "an internal algorithm": (
        lambda g: g.all_reduce(X, algorithm="oneshot"),
        gw.UnsupportedOp,
        "no algorithm 'oneshot'",
    ),
    "an algorithm that all_gather lacks": (
        lambda g: g.all_gather(X, algorithm="tree"),
        gw.UnsupportedOp,
        "all_gather has no",
    ),
    "an algorithm that reduce lacks": (
        lambda g: g.reduce(X, algorithm="ring"),
        gw.UnsupportedOp,
        "reduce has no algorithm 'ring'",
    ),
    "a map with a bad array": (
        lambda g: g.all_reduce_named({"ok": X, "w": np.ones(2, int)}, "mean"),
        gw.UnsupportedOp,
        "'w': op 'mean'",
    ),
    "a map with a number as key": (lambda g: g.all_reduce_named({1: X}), gw.ArrayError, "the key 1 is a int"),  # type: ignore[dict-item]
    "a list for a map": (lambda g: g.all_reduce_named([X]), gw.ArrayError, "expected a dict of arrays"),  # type: ignore[arg-type]
    "a root too high": (lambda g: g.broadcast(X, root=3), gw.InvalidRank, "root 3 is not one of the ranks 0 … 2"),
    "a negative root": (lambda g: g.reduce(X, root=-1), gw.InvalidRank, "root -1"),
    "a root of a gather": (lambda g: g.gather(X, root=3), gw.InvalidRank, "root 3"),
    "a root of a scatter": (lambda g: g.scatter(X, root=3), gw.InvalidRank, "root 3"),
    "a root of a value": (lambda g: g.broadcast_value(1, root=3), gw.InvalidRank, "root 3"),
    "a boolean root": (lambda g: g.broadcast(X, root=True), gw.InvalidRank, "root True"),
    "a fractional root": (lambda g: g.broadcast(X, root=1.0), gw.InvalidRank, "root 1.0"),  # type: ignore[arg-type]
    "no root": (lambda g: g.broadcast(X, root=None), gw.InvalidRank, "root None"),  # type: ignore[arg-type]
    "rows that do not divide": (lambda g: g.reduce_scatter(np.zeros(7)), gw.InvalidSize, "sizes as counts="),
    "rows that do not divide either": (lambda g: g.all_to_all(np.zeros(7)), gw.InvalidSize, "as send_counts="),
    "a number to scatter": (lambda g: g.reduce_scatter(np.array(1.0)), gw.InvalidSize, "1 rows cannot be split"),
    "an out of another type": (lambda g: g.all_gather(X, out=np.zeros(18, int)), gw.ArrayError, "x is float64"),
    "an out on top of x": (lambda g: g.reduce_scatter(X, out=X[:2]), gw.ArrayError, "out overlaps x"),
    "an out that is too large": (
        lambda g: g.reduce_scatter(X, out=np.zeros(3)),
        gw.ArrayError,
        "but this rank's part is float64",
    ),
    "an out that is read-only": (lambda g: g.all_gather(X, out=READ_ONLY), gw.ArrayError, "read-only"),
    "a timeout in words": (lambda g: g.all_reduce(X, timeout="1"), gw.InvalidSize, "timeout is '1'"),  # type: ignore[arg-type]
    "a queued mean of integers": (
        lambda g: g.stream().all_reduce(np.ones(3, int), "mean"),
        gw.UnsupportedOp,
        "convert to a float type",
    ),
    "a queued call with timeout 0": (lambda g: g.stream().barrier(timeout=0), gw.InvalidSize, "timeout"),
}


for _counts in COUNTS:
    NONSENSE[f"counts {_counts}"] = (partial(gw.Group.reduce_scatter, x=X, counts=_counts), gw.InvalidSize, "counts=")
    NONSENSE[f"sent {_counts}"] = (
        partial(gw.Group.all_to_all, x=X, send_counts=_counts),
        gw.InvalidSize,
        "send_counts=",
    )
    if _counts != [3, 3, 3]:  # these are wrong only because of the other ranks' arguments
        call = partial(gw.Group.all_to_all, x=X, recv_counts=_counts)
        NONSENSE[f"received {_counts}"] = (call, gw.InvalidSize, "recv_counts=")
for _seconds in (0, -1, float("nan")):
    NONSENSE[f"timeout {_seconds}"] = (partial(gw.Group.barrier, timeout=_seconds), gw.InvalidSize, "timeout is")


@pytest.mark.parametrize(("call", "kind", "words"), NONSENSE.values(), ids=NONSENSE)
def test_operation_with_invalid_arguments_raises_and_the_group_stays_usable(
    three: Crew, call: Callable[[gw.Group], Any], kind: type[Exception], words: str
) -> None:
    def program(group: gw.Group) -> Any:
        before = GroupInternals(group).calls_made
        with pytest.raises(kind, match=words) as caught:
            call(group)
        assert isinstance(caught.value, gw.GradwireError)
        assert GroupInternals(group).calls_made == before  # the call did not start, so nothing was sent
        return group.all_reduce(1)

    assert three.run(program) == [3, 3, 3]


@pytest.mark.parametrize(
    ("operation", "call"),
    {
        "all_reduce": lambda group: group.all_reduce(X, "avg"),
        "reduce": lambda group: group.reduce(np.ones(3, bool), "mean"),
        "reduce_scatter": lambda group: group.reduce_scatter(X, "avg"),
        "all_reduce_named": lambda group: group.all_reduce_named({"x": X}, algorithm="magic"),
        "all_gather": lambda group: group.stream().all_gather(X, algorithm="tree"),
    }.items(),
)
def test_unsupported_op_names_the_call(three: Crew, operation: str, call: Callable[[gw.Group], Any]) -> None:
    with pytest.raises(gw.UnsupportedOp) as caught:
        call(three.groups[0])
    assert caught.value.operation == operation


@pytest.mark.parametrize("root", [3, -1])
def test_invalid_rank_carries_rank_and_size(three: Crew, root: int) -> None:
    with pytest.raises(gw.InvalidRank) as caught:
        three.groups[0].broadcast(X, root=root)
    assert (caught.value.rank, caught.value.size) == (root, 3)


def test_operation_refused_on_one_rank_leaves_the_call_order_intact(three: Crew) -> None:
    """After an error for its arguments, a rank can make the call that the other ranks wait for."""

    def program(group: gw.Group) -> Any:
        if group.rank == 1:
            with pytest.raises(gw.ArrayError):
                group.all_reduce([1.0])
        return group.all_reduce(np.array([1.0])).tolist()

    assert three.run(program) == [[3.0]] * 3


def test_all_gather_and_reduce_scatter_with_out_write_into_it(three: Crew) -> None:
    def program(group: gw.Group) -> None:
        gathered, part = np.zeros((3, 4)), np.zeros(2)
        for turn in range(3):  # the first call takes the general path
            row = np.full((1, 4), 10.0 * turn + group.rank)
            assert group.all_gather(row, out=gathered) is gathered
            assert gathered.tolist() == [[10.0 * turn + rank] * 4 for rank in range(3)]
            assert group.reduce_scatter(np.arange(6.0) + turn, out=part) is part
            assert part.tolist() == [3.0 * (2 * group.rank + i + turn) for i in range(2)]
        assert group.stream().all_gather(row, out=gathered[::-1]).wait()[0, 0] == 20.0

    three.run(program)


def test_all_gather_with_a_too_small_out_raises_on_that_rank_only(three: Crew) -> None:
    """The size of the result is known only after all ranks have sent their counts."""

    def program(group: gw.Group) -> None:
        for _ in range(2):
            if group.rank == 1:
                out = np.full(5, -1.0)
                with pytest.raises(gw.ArrayError, match=r"out is float64\[5\], but the result is float64\[6\]"):
                    group.all_gather(np.zeros(2), out=out)
                assert out.tolist() == [-1.0] * 5
            else:
                assert group.all_gather(np.full(2, 3.0)).tolist() == [3.0, 3.0, 0.0, 0.0, 3.0, 3.0]

    three.run(program)


# -- scatter -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "counts", "kind", "words"),
    [
        (None, None, gw.ArrayError, "the root of a scatter must pass the array"),
        (np.array(["text"]), None, gw.ArrayError, "cannot be exchanged"),
        (np.zeros(7), None, gw.InvalidSize, "7 rows cannot be split evenly over 3 ranks"),
        (np.zeros(7), [3, 3, 3], gw.InvalidSize, "add up to 9, but there are 7 rows"),
    ],
)
def test_scatter_of_an_unusable_array_raises_on_all_ranks(
    three: Crew, x: Any, counts: Any, kind: type[Exception], words: str
) -> None:
    def program(group: gw.Group) -> Any:
        with pytest.raises(kind, match=words) as caught:
            group.scatter(x if group.rank == 1 else None, root=1, counts=counts)
        assert isinstance(caught.value, gw.GradwireError)
        assert (caught.value.rank, caught.value.operation) == (1, "scatter")
        work = group.stream().scatter(x if group.rank == 1 else None, root=1, counts=counts)
        with pytest.raises(kind, match=words):
            work.wait()
        return group.all_reduce(1)

    assert three.run(program) == [3, 3, 3]


def test_scatter_needs_x_on_the_root_only(three: Crew) -> None:
    def program(group: gw.Group) -> Any:
        x = np.arange(12, dtype=np.int16).reshape(6, 2) if group.rank == 2 else "ignored" if group.rank else None
        return group.scatter(x, root=2, counts=[1, 0, 5] if group.rank != 1 else None)

    parts = three.run(program)
    assert [part.shape for part in parts] == [(1, 2), (0, 2), (5, 2)]
    assert {part.dtype for part in parts} == {np.dtype(np.int16)}
    assert np.concatenate(parts).reshape(-1).tolist() == list(range(12))


# -- named maps --------------------------------------------------------------------------------------------------------


def test_all_reduce_named_mixes_dtypes_shapes_and_layouts(three: Crew) -> None:
    def program(group: gw.Group) -> None:
        tensors: dict[str, Any] = {
            "b": np.ones((2, 3), np.float32),
            "a": np.arange(8)[::2],
            "c": np.array(2.0),
            "d": np.ones(0),
            "e": bytearray(b"\1\2"),
            "large": np.full(200_000, group.rank + 1.0),
            "large and strided": np.full(400_000, group.rank + 1.0)[::2],
        }
        kept = dict(tensors)
        assert group.all_reduce_named(tensors) is tensors
        assert list(tensors) == ["b", "a", "c", "d", "e", "large", "large and strided"]
        assert all(tensors[name] is kept[name] for name in kept)
        assert tensors["b"].tolist() == [[3.0] * 3] * 2
        assert tensors["a"].tolist() == [0, 6, 12, 18]
        assert tensors["c"] == 6.0
        assert bytes(tensors["e"]) == b"\3\6"
        assert set(tensors["large"]) == set(tensors["large and strided"]) == {6.0}

    three.run(program)


@pytest.mark.parametrize("count", [3, 300_000])
def test_all_reduce_named_of_shared_memory_reduces_each_element_once(three: Crew, count: int) -> None:
    """With tied weights and overlapping views, each element is the sum over ranks, not a sum of sums."""

    def program(group: gw.Group) -> None:
        w, v = np.arange(float(count)), np.arange(float(count))
        other = np.arange(float(count)) if group.rank else w  # tied on one rank only
        group.all_reduce_named({"embed": w, "head": w, "last": w[1:], "free": other, "v": v[:-1], "u": v[1:]})
        assert np.array_equal(w, 3 * np.arange(float(count)))
        assert np.array_equal(other, w)
        assert np.array_equal(v, w)

    three.run(program)


def test_all_reduce_named_of_an_empty_map_counts_as_a_call(three: Crew) -> None:
    def program(group: gw.Group) -> int:
        empty: dict[str, Any] = {}
        assert group.all_reduce_named(empty) is empty
        assert group.stream().all_reduce_named({}).wait() == {}
        return GroupInternals(group).calls_made

    assert len(set(three.run(program))) == 1


# -- joining and splitting ---------------------------------------------------------------------------------------------


def test_operations_of_scalars_and_empty_arrays_return_the_right_shapes(three: Crew) -> None:
    def program(group: gw.Group) -> None:
        assert group.all_gather(np.array(group.rank)).tolist() == [0, 1, 2]
        assert group.all_gather(np.zeros((group.rank, 0, 4))).shape == (3, 0, 4)
        gathered = group.gather(np.array(group.rank), root=1)
        assert (None if gathered is None else gathered.tolist()) == (None if group.rank != 1 else [0, 1, 2])
        assert group.reduce_scatter(np.zeros((3, 0))).shape == (1, 0)
        assert group.reduce_scatter(np.zeros((0, 2))).shape == (0, 2)
        assert group.scatter(np.zeros((0, 2)), root=0).shape == (0, 2)
        assert group.all_to_all(np.zeros((0, 2))).shape == (0, 2)

    three.run(program)


def test_operations_accept_counts_and_roots_of_any_integer_type(three: Crew) -> None:
    def program(group: gw.Group) -> None:
        counts = np.array([1, 0, 2], np.int16)
        assert group.reduce_scatter(np.arange(3), counts=counts).size == counts[group.rank]
        assert group.all_to_all(np.arange(3), send_counts=counts).size == 3 * counts[group.rank]
        assert group.broadcast(np.arange(3), root=np.int8(2)).tolist() == [0, 1, 2]  # type: ignore[arg-type]

    three.run(program)


def test_operation_results_are_writable_and_share_no_memory_with_the_input(three: Crew) -> None:

    def program(group: gw.Group) -> None:
        x = np.arange(3.0)
        for result in (group.all_gather(x), group.reduce_scatter(x), group.scatter(x), group.all_to_all(x)):
            assert result.flags.writeable
            assert result.flags.owndata or result.base is not None
            assert not np.shares_memory(result, x)

    three.run(program)
