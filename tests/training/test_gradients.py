"""GradientSync: ranks are threads, over links in memory and over memory that they share."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from conformance.crews import TRANSPORTS
from gradwire import operations
from gradwire.arrays import Array, parse_dtype
from gradwire.operations import Exchange, Operation
from gradwire.training.weights import Weights
from ranks import run_ranks

LIKE = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(7, np.float32), "c": np.zeros((), np.float32)}
SMALL: dict[str, Any] = {"bucket_bytes": 64, "first_bucket_bytes": 64}  # a bucket for each


@pytest.fixture(params=["local", "shm"], name="three")
def three_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    if request.param not in TRANSPORTS:
        pytest.skip("no such transport here")
    made = TRANSPORTS[request.param](gw.Topology.single(3))
    yield made
    for group in made:
        group.close()


@pytest.fixture(name="pair")
def pair_fixture() -> Iterator[list[gw.Group]]:
    made = gw.local_group(2)
    yield made
    for group in made:
        group.close()


def some(rank: int, like: dict[str, Array] = LIKE) -> dict[str, Array]:
    """A rank's gradients."""
    random = np.random.default_rng(rank)
    return {name: np.asarray(random.normal(size=one.shape)).astype(one.dtype) for name, one in like.items()}


def copied(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def bits(arrays: dict[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


# --- the mean


@pytest.mark.parametrize("sizes", [SMALL, {}], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_the_mean_over_ranks_in_the_same_bits_on_all(three: list[gw.Group], dtype: str, sizes: dict[str, Any]) -> None:
    like = {name: np.zeros(one.shape, parse_dtype(dtype).storage) for name, one in LIKE.items()}

    def body(group: gw.Group) -> dict[str, Array]:
        sync = gw.GradientSync(group, like, **sizes)
        sync.sync(some(9, like))  # what is left of one backward must not be seen in the next
        return copied(sync.sync(some(group.rank, like)))

    results = run_ranks(three, body)
    assert bits(results[0]) == bits(results[1]) == bits(results[2])
    for name, mean in results[0].items():
        expected = np.mean([some(rank, like)[name].astype(complex) for rank in range(3)], axis=0)
        np.testing.assert_allclose(mean.astype(complex), expected, atol=0.02 if like[name].itemsize == 2 else 1e-6)


def test_dtypes_may_be_mixed(three: list[gw.Group]) -> None:
    like: dict[str, Array] = {"x": np.zeros(3), "y": np.zeros(3, np.float32), "z": np.zeros(2)}
    results = run_ranks(three, lambda group: copied(gw.GradientSync(group, like).sync(some(group.rank, like))))
    for name in like:
        np.testing.assert_allclose(results[2][name], np.mean([some(rank, like)[name] for rank in range(3)], axis=0))


def test_nothing_to_sync_is_a_sync_too(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> Any:
        sync = gw.GradientSync(group, {})
        return sync.sync({}), sync.clip(1.0), sync.used

    assert run_ranks(pair, body) == [({}, 0.0, frozenset())] * 2


def test_gradients_live_where_they_are_reduced(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        result = sync.sync(some(group.rank))
        assert all(result[name] is sync.gradients[name] for name in LIKE)
        again = sync.sync(result)  # its own memory: nothing to copy
        assert bits(again) == bits(result)
        own = group._generation.shared
        assert own is None or own.own.offset_of(result["a"].ctypes.data, 48) is not None

    run_ranks(three, body)


# --- readiness


def test_a_full_bucket_is_reduced_before_the_backward_ends(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        for _ in range(3):
            sync.begin()
            sync.gradients["c"][...] = group.rank
            sync.ready("c")
            wait_until(lambda: float(sync.gradients["c"]) == 1.0 or group.rank == 1)
            for name in ("b", "a"):
                sync.gradients[name][...] = group.rank
                sync.ready(name)
            sync.finish()
            assert all((sync.gradients[name] == 1.0).all() for name in LIKE)
            assert sync.used == {"a", "b", "c"}

    run_ranks(three, body)


def test_who_is_ready_goes_on_while_others_are_not(pair: list[gw.Group]) -> None:
    went_on = threading.Event()

    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.agree()
        sync.begin()
        if group.rank == 1:
            assert went_on.wait(20)
        sync.ready("c")
        went_on.set()
        sync.finish()

    run_ranks(pair, body)


def test_ranks_may_differ_in_the_order_of_readiness(three: list[gw.Group]) -> None:
    orders = ["abc", "bca", "cab"]

    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        for step in range(3):
            for name in orders[(group.rank + step) % 3]:
                sync.gradients[name][...] = group.rank
                sync.ready(name)
            sync.finish()
            assert all((sync.gradients[name] == 1.0).all() for name in LIKE)

    run_ranks(three, body)


@pytest.mark.parametrize("beside", [False, True])
def test_a_missing_gradient_counts_as_zeros(three: list[gw.Group], beside: bool) -> None:
    def body(group: gw.Group) -> Any:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.sync({name: np.full(one.shape, 99, np.float32) for name, one in LIKE.items()})
        if beside:
            sync.gradients["b"][...] = 3
            if group.rank == 1:
                sync.ready("b")
            sync.finish()
            result = {name: sync.gradients[name] for name in sync.used}
        else:
            result = sync.sync({"b": np.full(7, 3.0, np.float32)} if group.rank == 1 else {"a": None})
        assert not sync.gradients["a"].any()
        return {name: array.tolist() for name, array in result.items()}

    assert run_ranks(three, body) == [{"b": [1.0] * 7}] * 3


def test_gradients_are_added_up_without_a_sync(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> Any:
        sync = gw.GradientSync(group, LIKE)
        for _ in range(2):
            sync.add({"a": np.full((3, 4), group.rank, np.float32)})
            sync.add({"a": np.full((3, 4), group.rank, np.float32), "b": np.ones(7, np.float32)})
            result = sync.sync({"a": np.full((3, 4), group.rank, np.float32)})
            assert (result["a"] == 3.0).all()
            assert (result["b"] == 1.0).all()
            assert "c" not in result
        assert (sync.sync({"a": np.ones((3, 4))})["a"] == 1.0).all()

    run_ranks(three, body)


def test_what_is_left_from_earlier_takes_part_but_is_not_used(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.sync({"b": np.full(7, 5.0, np.float32), "c": np.float32(7)})
        assert not sync.under_way
        if group.rank == 0:
            sync.gradients["b"] += 2
        sync.ready("b", used=group.rank == 0)
        sync.ready("c", used=False, beside=False)
        assert sync.under_way
        sync.finish()
        assert (sync.gradients["b"] == 6.0).all()
        assert sync.gradients["c"] == 7.0
        assert sync.used == {"b"}

    run_ranks(pair, body)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving", "direct", "star"])
def test_each_algorithm_gives_a_mean(pair: list[gw.Group], algorithm: str) -> None:
    def body(group: gw.Group) -> dict[str, bytes]:
        sync = gw.GradientSync(group, LIKE, algorithm=algorithm)
        return bits(sync.sync(some(group.rank)))

    results = run_ranks(pair, body)
    assert results[0] == results[1]
    with pytest.raises(gw.UnsupportedOp, match="no algorithm 'fast'"):
        gw.GradientSync(pair[0], LIKE, algorithm="fast")


def test_what_is_ready_cannot_become_ready_again(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.ready("a")
        sync.ready("a")  # its bucket waits for others: nothing has happened yet
        sync.ready("c")
        with pytest.raises(gw.ConfigError, match="'c' was made ready before"):
            sync.ready("c")
        with pytest.raises(gw.ConfigError, match="not finished"):
            sync.begin()
        with pytest.raises(gw.ConfigError, match="no gradient 'd'"):
            sync.ready("d")
        sync.finish()
        sync.begin()

    run_ranks(pair, body)


@pytest.mark.parametrize(
    ("gradients", "reason"),
    [
        ({"d": np.zeros(2)}, "there is no gradient 'd'"),
        ({"b": np.zeros(6, np.float32)}, r"'b' is float32\[6\], not 'b': float32\[7\]"),
        ({"b": np.zeros(7, complex)}, r"'b' is complex128\[7\]"),
        ({"b": "seven"}, "expected an array"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(gradients: Any, reason: str) -> None:
    with gw.init() as group:
        sync = gw.GradientSync(group, LIKE)
        with pytest.raises(gw.GradwireError, match=reason):
            sync.sync(gradients)
        assert set(sync.sync({"b": np.zeros(7)})) == {"b"}


def test_what_does_not_fit_on_one_rank_is_no_call_of_it(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        if group.rank == 1:
            with pytest.raises(gw.ArrayError, match="'b' is"):
                sync.sync({"b": np.zeros(6)}, weight=2)
        assert set(sync.sync({"b": np.zeros(7)}, weight=1)) == {"b"}

    run_ranks(pair, body)


def test_a_weight_that_was_told_is_not_taken_back(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        sync.begin()
        sync.begin()  # nobody has heard of it
        sync.begin(weight=1)
        with pytest.raises(gw.ConfigError, match="not finished"):
            sync.begin(weight=2)
        sync.finish()

    run_ranks(pair, body)


# --- weights


def test_ranks_count_by_their_samples(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> dict[str, Array]:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        result = copied(sync.sync(some(group.rank), weight=1 + 2 * group.rank))
        assert sync.total_weight == 9
        sync.begin(weight=1 + 2 * group.rank)
        for name, gradient in some(group.rank).items():
            sync.gradients[name][...] = gradient
            sync.ready(name)
        sync.finish()
        assert bits(result) == bits(sync.gradients)
        return result

    results = run_ranks(three, body)
    assert bits(results[0]) == bits(results[1]) == bits(results[2])
    for name in LIKE:
        expected = sum((1 + 2 * rank) * some(rank)[name].astype(float) for rank in range(3)) / 9
        np.testing.assert_allclose(results[0][name], expected, rtol=1e-5, atol=1e-6)


def test_equal_weights_are_no_weights(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        plain = copied(sync.sync(some(group.rank)))
        assert bits(sync.sync(some(group.rank), weight=0.1)) == bits(plain)

    run_ranks(three, body)
    untouched = np.ones(3)
    untouched.flags.writeable = False
    Weights(0.1, 3).apply(untouched)


def test_a_rank_without_data_does_not_count_whatever_it_has(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        empty = {name: np.full(one.shape, np.nan, np.float32) for name, one in LIKE.items()}
        given = some(0) if group.rank == 0 else empty
        result = sync.sync(given, weight=5 if group.rank == 0 else 0)
        for name, gradient in some(0).items():
            np.testing.assert_allclose(result[name], gradient, rtol=1e-6)
        sync.begin(weight=0 if group.rank else 1)
        if group.rank == 0:
            sync.ready("b")
        else:
            sync.ready("c")
        sync.finish()
        assert sync.used == {"b"}
        assert sync.sync({}, weight=0) == {}
        assert sync.total_weight == 0

    run_ranks(three, body)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many", True])
def test_a_weight_is_a_number_from_0_on(weight: Any) -> None:
    with gw.init() as group, pytest.raises(gw.ConfigError, match="a weight of"):
        gw.GradientSync(group, LIKE).sync({}, weight=weight)


# --- what is not a number


@pytest.mark.parametrize("pure", [False, True], ids=["core", "pure"])
@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside"])
def test_all_ranks_are_told_who_has_a_nan(
    three: list[gw.Group], beside: bool, pure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(group: gw.Group) -> tuple[Any, ...]:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        gradients = some(group.rank)
        if group.rank > 0:
            gradients["b"][3] = np.nan if group.rank == 1 else np.inf
            gradients["c"][...] = np.inf
        with pytest.raises(gw.NotFinite) as caught:
            if beside:
                for name, gradient in gradients.items():
                    sync.gradients[name][...] = gradient
                    sync.ready(name)
                sync.finish()
            else:
                sync.sync(gradients)
        assert set(sync.sync(some(group.rank))) == set(LIKE)  # the group goes on
        error = caught.value
        return str(error), error.culprit, error.tensor, error.operation, error.generation

    if pure:
        run_ranks(three, lambda group: group.barrier())  # links are made as ever
        monkeypatch.setenv("GRADWIRE_PURE", "1")
    text = "the gradient 'b' of rank 1 is not finite: 1 NaN of 7 elements (3 more on ranks 1, 2)"
    assert run_ranks(three, body) == [(text, 1, "b", "GradientSync", 1)] * 3


@pytest.mark.parametrize("how", ["written", "added", "strided", "other dtype", "in place"])
def test_however_it_came_there_it_is_found(pair: list[gw.Group], how: str) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        for spoiled in (False, True):
            gradient = np.ones((3, 4), np.float32)
            gradient[2, 1] = np.nan if spoiled and group.rank == 1 else 1
            sync.begin()
            if how == "written":
                sync.write("a", gradient)
            elif how == "added":
                sync.write("a", np.ones((3, 4), np.float32))
                sync.add({"a": np.zeros((3, 4))})
                sync.add({"a": gradient})
            elif how == "strided":
                sync.write("a", np.asfortranarray(gradient))
            elif how == "other dtype":
                sync.write("a", gradient.astype(np.float64))
            else:
                sync.gradients["a"][...] = gradient
            sync.ready("a")
            if not spoiled:
                sync.finish()
                assert (sync.gradients["a"] == 1).all()
                continue
            with pytest.raises(gw.NotFinite, match="'a' of rank 1"):
                sync.finish()

    run_ranks(pair, body)


def test_the_check_can_be_switched_off(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, check_finite=False)
        assert np.isnan(sync.sync({"c": np.float32(np.nan)})["c"])

    run_ranks(pair, body)


# --- after the reduce


def test_clipping_by_the_global_norm_is_the_same_on_all_ranks(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> tuple[float, float, dict[str, bytes]]:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        before = copied(sync.sync(some(group.rank)))
        norm = sync.clip(1e9)
        assert bits(sync.gradients) == bits(before)
        assert norm == pytest.approx(np.linalg.norm(np.concatenate([one.ravel() for one in before.values()])))
        assert sync.clip(norm / 4) == norm
        for name, one in before.items():
            np.testing.assert_allclose(sync.gradients[name], one / 4, rtol=1e-5)
        return norm, sync.clip(1e9), bits(sync.gradients)

    results = run_ranks(three, body)
    assert results[0] == results[1] == results[2]


# --- agreement and order


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": LIKE["a"], "b": np.zeros(8, np.float32)}, r"number 3 is 'b': float32\[8\] on rank 1, 'b': float32\[7\]"),
        ({"a": LIKE["a"]}, r"number 3 is nothing more on rank 1, 'b': float32\[7\] on rank 0"),
        (LIKE, r"number 4 is 'c': float32\[\] on rank 1, nothing more on rank 0"),
        ({"a": LIKE["a"], "b": np.zeros(7)}, r"number 3 is 'b': float64\[7\] on rank 1"),
    ],
)
def test_ranks_that_differ_are_named_and_the_group_goes_on(
    three: list[gw.Group], other: dict[str, Array], said: str
) -> None:
    usual = {name: LIKE[name] for name in "ab"}

    def body(group: gw.Group) -> str:
        with pytest.raises(gw.ConfigError, match=said) as caught:
            gw.GradientSync(group, other if group.rank == 1 else usual).sync({})
        assert caught.value.culprit == 1
        group.barrier()
        return str(caught.value)

    assert len(set(run_ranks(three, body))) == 1


def test_buckets_follow_the_order_that_rank_0_has_seen(three: list[gw.Group]) -> None:
    def body(group: gw.Group) -> list[list[str]]:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        assert not sync.ordered
        before = copied(sync.sync(some(group.rank)))
        sync.reorder(["b", "a"] if group.rank == 0 else ["c", "c", "a"])
        assert sync.ordered
        assert bits(sync.gradients) == bits(before)
        assert bits(sync.sync(some(group.rank))) == bits(before)
        return [list(bucket.views) for bucket in sync._buckets]

    assert run_ranks(three, body) == [[["b"], ["a"], ["c"]]] * 3


def test_an_order_of_unknown_names_is_refused_by_all(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        with pytest.raises(gw.ConfigError, match="names 'd'"):
            gw.GradientSync(group, LIKE).reorder(["d"] if group.rank == 0 else [])
        group.barrier()

    run_ranks(pair, body)


# --- losses


def test_who_leaves_in_the_middle_is_named_and_no_error_is_left_unheard(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: gw.Group) -> int | None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        sync.sync({})
        if group.rank == 1:
            group.close()
            return None
        sync.ready("c")
        wait_until(lambda: sync._works[0].done)  # badly
        with pytest.raises(gw.PeerLost) as caught:
            sync.finish()
        return caught.value.culprit

    pair = list(gw.loopback_pair())
    with caplog.at_level(logging.ERROR):
        assert run_ranks(pair, body) == [1, None]
        for group in pair:
            group.close()
        gc.collect()  # errors and the frames that raised them refer to each other
    assert not [record for record in caplog.records if "nobody waited" in record.message]


def test_other_buckets_of_the_same_size_do_not_pass(pair: list[gw.Group]) -> None:
    like = {"a": np.zeros(3), "b": np.zeros(3)}

    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, like)
        sync.agree()
        if group.rank == 1:  # as no rank should
            sync._adopt(["a", "b"])
        with pytest.raises(gw.CollectiveMismatch, match="2 tensors from 'b' to 'a'"):
            sync.sync({})

    run_ranks(pair, body)


def test_another_group_takes_over_with_the_contents() -> None:
    first, second = gw.local_group(2), gw.local_group(2)

    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, **SMALL)
        before = copied(sync.sync(some(group.rank)))
        sync.reorder("abc")
        sync.ready("a")  # a backward that was cut short
        old = sync.gradients["a"]
        sync.rebind(group)
        assert sync.gradients["a"] is old
        sync.rebind(second[group.rank])
        assert not np.shares_memory(sync.gradients["a"], old)
        assert bits(sync.gradients) == bits(before)
        assert bits(sync.sync(some(group.rank))) == bits(before)
        assert [list(bucket.views) for bucket in sync._buckets] == [["a"], ["b"], ["c"]]

    run_ranks(first, body)
    for group in (*first, *second):
        group.close()


# --- compression


class Halves:
    """Moves float16, in the simplest way; keeps what it was asked for."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.resets = 0

    def describe(self) -> str:
        return "halves"

    def operation(self, bucket: Array, scale: Callable[[], float]) -> Operation:
        half = np.empty(bucket.size, np.float16)
        sums = operations.all_reduce(half, "sum", None, "auto")

        def body(exchange: Exchange) -> None:
            self.shares.append(scale())
            half[:] = bucket * np.float32(scale())
            sums.body(exchange)
            bucket[:] = half

        return Operation("halves", body)

    def reset(self) -> None:
        self.resets += 1


@pytest.mark.parametrize("weighted", [False, True])
def test_a_compression_exchanges_buckets_in_its_own_way(pair: list[gw.Group], weighted: bool) -> None:
    def body(group: gw.Group) -> dict[str, bytes]:
        compression = Halves()
        sync = gw.GradientSync(group, LIKE, compression=compression, **SMALL)
        assert compression.resets == 1
        for _ in range(2):
            sync.begin(weight=group.rank * 3 + 1 if weighted else None)
            for name, gradient in some(group.rank).items():
                sync.gradients[name][...] = gradient
                sync.ready(name)
            sync.finish()
        assert compression.shares == [(0.2, 0.8)[group.rank] if weighted else 0.5] * 6
        for name in LIKE:
            expected = some(0)[name] * compression.shares[0] + some(1)[name] * (1 - compression.shares[0])
            if group.rank == 0:
                np.testing.assert_allclose(sync.gradients[name], expected, atol=2e-3)
        return bits(sync.gradients)

    results = run_ranks(pair, body)
    assert results[0] == results[1]
