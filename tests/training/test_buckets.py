"""Assignment of gradients to buckets: a function of names, shapes, dtypes and sizes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.arrays import parse_dtype
from gradwire.training.buckets import ALIGNMENT, Tensor, check_bytes, make_buckets, partition, tensors_like


def tensor(name: str, count: int = 16, dtype: str = "float32") -> Tensor:
    return Tensor(name, parse_dtype(dtype), (count,))


def names(order: list[Tensor], bucket: int, first: int) -> list[str]:
    return ["".join(one.name for one in part) for part in partition(order, bucket, first)]


def test_partition_respects_the_bucket_size_and_the_first_bucket_size() -> None:
    order = [tensor(name) for name in "abcdefg"]  # 64 bytes each
    assert names(order, 192, 64) == ["a", "bcd", "efg"]
    assert names(order, 191, 128) == ["ab", "cd", "ef", "g"]
    assert names(order, 1 << 20, 1 << 20) == ["abcdefg"]


def test_partition_tensor_larger_than_a_bucket_gets_its_own_bucket() -> None:
    assert names([tensor("a"), tensor("b", 1000), tensor("c")], 128, 64) == ["a", "b", "c"]


def test_partition_mixed_dtypes_get_separate_buckets_ordered_by_their_last_tensor() -> None:
    order = [tensor("a"), tensor("x", 8, "float64"), tensor("b"), tensor("y", 8, "float64")]
    assert names(order, 1 << 20, 1 << 20) == ["ab", "xy"]
    order = [tensor("x", 8, "float64"), tensor("a"), tensor("b"), tensor("y", 8, "float64")]
    assert names(order, 1 << 20, 1 << 20) == ["ab", "xy"]
    order = [tensor("a"), tensor("x", 8, "float64"), tensor("y", 8, "float64"), tensor("b")]
    assert names(order, 1 << 20, 1 << 20) == ["xy", "ab"]


@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["float16", "float32", "float64"])), max_size=20),
    st.integers(1, 2000),
    st.integers(1, 2000),
)
def test_partition_any_tensors_are_assigned_once_in_order_with_one_dtype_per_bucket(
    kinds: list[tuple[int, str]], bucket: int, first: int
) -> None:
    order = [tensor(str(number), count, dtype) for number, (count, dtype) in enumerate(kinds)]
    made = partition(order, bucket, first)
    assert sorted((one.name for part in made for one in part), key=int) == [one.name for one in order]
    for part in made:
        assert len({one.dtype for one in part}) == 1
        assert part == [one for one in order if one in part]  # in order
    last = [order.index(part[-1]) for part in made]
    assert last == sorted(last)


def test_bucket_views_do_not_overlap_and_begin_on_cache_lines() -> None:
    like = {"scalar": np.zeros(()), "none": np.zeros((0, 3)), "some": np.zeros(5), "more": np.zeros((2, 3))}
    with gw.init() as group:
        (bucket,) = make_buckets(group, list(tensors_like(like).values()), 1 << 20, 1 << 20)
        assert not bucket.flat.any()
        for number, (name, one) in enumerate(like.items(), start=1):
            assert bucket.views[name].shape == one.shape
            bucket.views[name][...] = number
            assert (bucket.views[name].ctypes.data - bucket.flat.ctypes.data) % ALIGNMENT == 0
        assert sorted(bucket.flat[bucket.flat > 0].tolist()) == [1] + [3] * 5 + [4] * 6


@pytest.mark.parametrize(
    ("like", "reason"),
    [
        ([np.zeros(2)], "expected a dict of arrays by name, got list"),
        ({3: np.zeros(2)}, "the key 3 is a int"),
        ({"w": np.zeros(2, int)}, "'w': op 'mean' has no meaning for int64"),
        ({"w": np.zeros(2, "U3")}, "'w': arrays of dtype <U3 cannot be exchanged"),
        ({"w": 1.5}, "'w': None is not a dtype"),
    ],
)
def test_tensors_like_invalid_gradient_description_is_refused(like: Any, reason: str) -> None:
    with pytest.raises(gw.GradwireError) as caught:
        tensors_like(like)
    assert reason in str(caught.value)


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, None])
def test_check_bytes_not_a_positive_integer_raises_config_error(nbytes: Any) -> None:
    with pytest.raises(gw.ConfigError, match="bucket_bytes is"):
        check_bytes("bucket_bytes", nbytes)
