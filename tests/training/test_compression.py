"""Gradient compressions: identical bits on all ranks, precision, residuals, bytes sent and invalid arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import Array
from gradwire.training.compression import BF16, F16, Compression, Int8, TopK, compression_for
from gradwire.training.compression.topk import SAMPLE, largest
from support.crews import TRANSPORTS, Crew, crew_of

MAKERS: dict[str, Callable[..., Compression]] = {
    "f16": F16,
    "bf16": BF16,
    "int8": Int8,
    "int8 by 7": lambda **settings: Int8(7, **settings),
    "topk": lambda **settings: TopK(0.1, **settings),
}
# The largest error of one exchange (two roundings), relative to the largest magnitude in the bucket. Not for top-k.
PRECISION = {"f16": 2e-3, "bf16": 1.6e-2, "int8": 1.6e-2, "int8 by 7": 1.6e-2}


@pytest.fixture(scope="module", name="crew", params=[2, 3])
def crew_fixture(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with crew_of("local", gw.Topology.single(request.param)) as crew:
        yield crew


def values(rank: int, count: int, dtype: Any, step: int = 0) -> Array:
    return np.random.default_rng([rank, count, step]).normal(size=count).astype(dtype)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_compression_exchange_gives_identical_bits_on_all_ranks(crew: Crew, name: str, dtype: Any) -> None:
    def reduce(group: gw.Group) -> list[bytes]:
        one, buckets, seen = MAKERS[name](), [np.empty(count, dtype) for count in (1, 5, 1000, 70_001)], []
        for step in range(2):
            for bucket in buckets:
                bucket[:] = values(group.rank, bucket.size, dtype, step)
                one.exchange(group, bucket, 1 / group.size)
                seen.append(bucket.tobytes())
        return seen

    first, *others = crew.run(reduce)
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", PRECISION)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compression_exchange_is_close_to_the_weighted_sum(crew: Crew, name: str, dtype: Any) -> None:
    count = 40_000

    def reduce(group: gw.Group) -> Array:
        bucket: Array = MAKERS[name]().exchange(group, values(group.rank, count, dtype), 0.5 + group.rank)
        return bucket

    exact = sum((0.5 + rank) * values(rank, count, dtype).astype(np.float64) for rank in range(crew.size))
    for got in crew.run(reduce):
        assert np.abs(got - exact).max() < PRECISION[name] * np.abs(exact).max()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compression_with_feedback_has_a_smaller_accumulated_error(crew: Crew, name: str, dtype: Any) -> None:
    """With feedback, the sum over many steps is as exact as one step. Without feedback, the errors accumulate."""
    count, steps = 1000, 40

    def add_up(group: gw.Group, feedback: bool) -> Array:
        one, total, bucket = MAKERS[name](feedback=feedback), np.zeros(count), np.empty(count, dtype)
        for _ in range(steps):
            bucket[:] = values(
                group.rank, count, dtype
            )  # the same values in each step, so that the rounding errors are the same
            total += one.exchange(group, bucket)
        return total

    exact = steps * sum(values(rank, count, np.float64) for rank in range(crew.size))
    error = {
        feedback: np.abs(crew.run(partial(add_up, feedback=feedback))[0] - exact).mean() for feedback in (True, False)
    }
    assert error[True] < error[False] / 5


@pytest.mark.parametrize(
    ("maker", "largest_value", "step"), [(Int8, 100, 100 / 127), (lambda **settings: TopK(0.25, **settings), 1, 1)]
)
def test_compression_with_feedback_sends_small_values_later(
    maker: Callable[..., Compression], largest_value: float, step: float
) -> None:
    """Values too small for the block's scale, or for top-k, are sent only because the residual accumulates them."""

    def add_up(group: gw.Group, feedback: bool) -> float:
        one, bucket, total = maker(feedback=feedback), np.empty(4, np.float32), 0.0
        for _ in range(300):
            bucket[:] = [largest_value, 0.01, 1e-9, 0]
            total += float(one.exchange(group, bucket)[1])
        return total

    with crew_of("local", gw.Topology.single(2)) as crew:
        assert crew.run(lambda group: add_up(group, False)) == [0, 0]
        for total in crew.run(lambda group: add_up(group, True)):
            # Each rank, and the rank that sums, may still hold back up to one rounding step (of a sum, twice as large).
            assert total == pytest.approx(300 * 2 * 0.01, abs=3 * step)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compression_non_finite_value_reaches_all_ranks_and_not_the_residual(crew: Crew, name: str, dtype: Any) -> None:
    def reduce(group: gw.Group) -> list[Array]:
        one, bucket, seen = MAKERS[name](), np.empty(5000, dtype), []
        for bad in (np.nan, 0, np.inf, 0, -np.inf, 0):
            bucket[:] = values(group.rank, 5000, dtype)
            if group.rank == 1:
                bucket[1234] = bad
            seen.append(one.exchange(group, bucket).copy())
        return seen

    for seen in crew.run(reduce):
        for faulty, clean in zip(seen[::2], seen[1::2], strict=True):
            assert not np.isfinite(faulty[1234])
            assert np.isfinite(faulty[:1000]).all()  # other blocks are not affected
            assert np.isfinite(clean).all()


@pytest.mark.parametrize(
    ("name", "huge"), [("f16", 1e5), ("bf16", 3.4e38), ("int8", 3.4e38), ("f16", 1e300), ("int8", 1e300)]
)
def test_compression_value_beyond_the_wire_range_stays_finite(name: str, huge: float) -> None:
    dtype = np.float32 if huge < 1e39 else np.float64
    with crew_of("local", gw.Topology.single(2)) as crew:

        def reduce(group: gw.Group) -> Array:
            bucket = np.array([huge if group.rank else 0, 1], dtype)
            got: Array = MAKERS[name]().exchange(group, bucket, 0.5)
            return got

        for got in crew.run(reduce):
            assert np.isfinite(got).all()
            assert 0 < got[0] <= huge


def test_int8_block_of_denormal_values_becomes_zero() -> None:
    tiny = np.float32(1e-42)
    with crew_of("local", gw.Topology.single(2)) as crew:
        for got in crew.run(lambda group: Int8(2).exchange(group, np.array([tiny, -tiny, 0, 0, 1, -1], np.float32))):
            assert got.tolist() == [0, 0, 0, 0, 2, -2]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("maker", "times"), [(F16, 2.0), (BF16, 2.0), (Int8, 256 * 4 / 260), (lambda: TopK(0.01), 50.0)]
)
def test_compression_exchange_sends_the_documented_fraction_of_bytes(
    transport: str, maker: Callable[[], Compression], times: float
) -> None:
    """Compare with the bytes of a float32 all-reduce, both counted by the transport."""
    count = 400_000

    def measure(group: gw.Group) -> float:
        bucket = np.ones(count, np.float32)
        before = group.bytes_sent
        group.all_reduce(bucket, algorithm="direct")
        plain = group.bytes_sent - before
        maker().exchange(group, bucket)
        return plain / (group.bytes_sent - before - plain)

    with crew_of(transport, gw.Topology.single(2)) as crew:
        for found in crew.run(measure):
            assert found == pytest.approx(times, rel=0.01)


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "a", "b", "b")], ids=len)
def test_bytes_sent_is_the_same_on_every_transport(hosts: tuple[str, ...]) -> None:
    size = len(hosts)

    def measure(group: gw.Group) -> int:
        for count in (1000, 100_000):
            for registered in (False, True):
                bucket = group.empty(count) if registered else np.empty(count, np.float32)
                bucket.fill(1)
                group.all_reduce(bucket, algorithm="halving")
        group.all_gather(np.ones(10_000), algorithm="ring")
        group.barrier()
        return group.bytes_sent

    share = (size - 1) / size
    least = int(2 * share * 2 * 404_000 + (size - 1) * 80_000)
    for transport in TRANSPORTS:
        with crew_of(transport, gw.Topology.of(hosts)) as crew:
            counted = crew.run(measure)
        assert all(0.99 * least <= one <= 1.01 * least for one in counted), (transport, counted, least)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_sent_registered_arrays_is_between_two_shot_and_one_shot(transport: str) -> None:
    """With registered arrays, each rank reads only its part of the others' arrays, and writes the result to them."""

    def measure(group: gw.Group) -> list[int]:
        seen = [0]
        for count in (4, 1000, 8000):
            bucket = group.empty(count)
            bucket.fill(1)
            group.all_reduce(bucket, algorithm="direct")
            seen.append(group.bytes_sent)
        return [later - earlier for earlier, later in itertools.pairwise(seen)]

    with crew_of(transport, gw.Topology.single(3)) as crew:
        for counted in crew.run(measure):
            for count, nbytes in zip((4, 1000, 8000), counted, strict=True):
                two_shots, one_shot = 2 * 4 * count * 2 // 3, 2 * 4 * count
                assert 0.95 * two_shots - 64 <= nbytes <= one_shot + 4 * 64


def test_compression_exchange_on_a_stream_overlaps_with_other_calls() -> None:
    def work(group: gw.Group) -> list[Any]:
        stream, one = group.stream(), Int8()
        buckets = [np.full(100, i + 1, np.float32) for i in range(5)]
        works = [one.exchange(stream, bucket, lambda: 0.5) for bucket in buckets]
        total = group.all_reduce(1)
        return [total, *(float(work.wait()[7]) for work in works)]

    with crew_of("local", gw.Topology.single(2)) as crew:
        assert crew.run(work) == [[2, 1, 2, 3, 4, 5]] * 2


def test_compression_exchange_strided_bucket_leaves_other_elements_unchanged() -> None:
    def reduce(group: gw.Group) -> list[float]:
        wide = np.zeros((4, 2), np.float32)
        wide[:, 0] = 1
        F16().exchange(group, wide[:, 0])
        return wide.reshape(-1).tolist()

    with crew_of("local", gw.Topology.single(2)) as crew:
        assert crew.run(reduce) == [[2, 0, 2, 0, 2, 0, 2, 0]] * 2


def test_compression_residual_belongs_to_one_bucket_and_reset_drops_it() -> None:
    def look(group: gw.Group) -> list[bool]:
        one, bucket, other = TopK(0.5), np.array([3.0, 1.0]), np.array([3.0, 1.0])
        one.exchange(group, bucket)
        one.exchange(group, other)
        kept = [one.residual(bucket), one.residual(other)]
        assert all(residual is not None and residual.tolist() == [0, 1] for residual in kept)
        assert one.fresh().residual(bucket) is None
        one.reset()
        return [one.residual(bucket) is None]

    with crew_of("local", gw.Topology.single(2)) as crew:
        assert crew.run(look) == [[True]] * 2


def test_compression_different_block_sizes_raise_mismatch() -> None:
    groups = gw.local_group(2)
    try:
        for kinds in ((Int8(64), Int8(32)),):
            works = [kind.exchange(group.stream(), np.ones(256)) for kind, group in zip(kinds, groups, strict=True)]
            for work in works:
                with pytest.raises(gw.CollectiveMismatch, match="int8 by 64"):
                    work.wait(30)
    finally:
        for group in groups:
            group.close()


def test_compression_for_accepts_a_name_or_an_example() -> None:
    assert compression_for(None) is None
    for name in ("f16", "bf16", "int8", "topk"):
        one = compression_for(name)
        assert one is not None
        assert one.name == name
        assert one.feedback
    example = TopK(0.25, feedback=False)
    copied = compression_for(example)
    assert isinstance(copied, TopK)
    assert (copied.ratio, copied.feedback, copied is example) == (0.25, False, False)
    with pytest.raises(gw.ConfigError, match="'f16', 'bf16', 'int8', 'topk'"):
        compression_for("zip")


@pytest.mark.parametrize("ratio", [0, -1, 1.5, "much", True, float("nan")])
def test_topk_invalid_ratio_raises_config_error(ratio: Any) -> None:
    with pytest.raises(gw.ConfigError, match="above 0"):
        TopK(ratio)


@pytest.mark.parametrize("block", [0, -1, 2.5, 1 << 21])
def test_int8_invalid_block_raises_config_error(block: Any) -> None:
    with pytest.raises(gw.ConfigError, match="whole number"):
        Int8(block)


def test_compression_integer_array_raises_array_error() -> None:
    with gw.init() as group, pytest.raises(gw.ArrayError, match="int32"):
        F16().exchange(group, np.ones(3, np.int32))


@pytest.mark.parametrize("kind", ["normal", "sparse", "equal", "periodic", "nan"])
@pytest.mark.parametrize("count", [100, 8 * SAMPLE + 11])
def test_largest_returns_the_indices_of_the_largest_values(kind: str, count: int) -> None:
    random = np.random.default_rng(5)
    x = np.abs(random.normal(size=count)).astype(np.float32)
    if kind == "sparse":
        x[random.random(count) < 0.99] = 0
    if kind == "equal":
        x[:] = 1
    if kind == "periodic":
        x[::8] = 0  # exactly the sampled elements
    if kind == "nan":
        x[count // 2] = np.nan
    for number in {1, count // 100, count // 2, count}:
        found = largest(x, number)
        assert len(set(found.tolist())) == number
        assert (np.diff(found) > 0).all()
        least, rest = x[found], np.delete(x, found)
        if kind == "nan":
            assert count // 2 in found
            least = least[~np.isnan(least)]
        assert not rest.size or not least.size or rest.max() <= least.min()
