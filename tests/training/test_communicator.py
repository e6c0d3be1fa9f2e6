"""Training code on engines of a user's own: the same results as on a `Group`, bit for bit, and the same errors."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import Array, bfloat16
from gradwire.training.compression import Int8
from gradwire.training.zero import ShardedOptimizer
from support.engines import RichThreadEngine, SocketEngine, ThreadEngine, thread_engines
from support.gradients import bits
from support.ranks import run_group, run_ranks

LIKE: dict[str, Array] = {
    "single": np.zeros((5, 3), np.float32),
    "double": np.zeros(4),
    "half": np.zeros(3, np.float16),
    "brain": np.zeros(2, bfloat16()),
    "complex": np.zeros(2, np.complex64),
}


def gradients(rank: int) -> dict[str, Array]:
    """Return whole numbers: their sums are exact, so they do not depend on an engine's order of additions."""
    random = np.random.default_rng(rank)
    return {name: random.integers(-50, 50, one.shape).astype(one.dtype) for name, one in LIKE.items()}


def train(group: Any) -> dict[str, bytes]:
    """Run everything that training code does with a group, and return the bits of all results."""
    weights = {name: np.full_like(one, group.rank + 1) for name, one in LIKE.items()}
    weights["flags"] = np.full(3, group.rank == 1)
    gw.broadcast_named(group, weights, root=group.size - 1)
    sync = gw.GradientSync(group, LIKE, bucket_bytes=64, first_bucket_bytes=64)
    contract = gw.Contract(group, every=2)
    checks = [contract.check(weights)]
    for step in range(3):
        mean = sync.sync(gradients(10 * step + group.rank), weight=None if step else 2.0 ** (group.rank % 2))
        norm = sync.clip(1e6)
        for name, gradient in mean.items():
            weights[name] += gradient
        checks.append(contract.check(weights))
    sync.reorder(list(LIKE))
    sync.begin()
    for name in LIKE if group.rank else reversed(LIKE):
        sync.gradients[name][...] = group.rank
        sync.ready(name)
    sync.finish()
    loss = gw.weighted_mean(group, 0.5 * group.rank, weight=2)
    digest = gw.check_replicas(group, weights)
    numbers = np.array([norm, loss, sync.total_weight, *checks])
    text = np.frombuffer("".join([digest, *sorted(sync.used)]).encode(), np.uint8)
    return bits({**weights, **{f"mean {name}": view for name, view in sync.gradients.items()}, "n": numbers, "t": text})


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", [ThreadEngine, RichThreadEngine])
def test_training_on_an_engine_gives_the_bits_of_a_group(size: int, kind: Any) -> None:
    expected = run_group(size, train)
    engines = thread_engines(size, kind)
    assert run_ranks(engines, train) == expected
    assert {(call, dtype) for call, dtype, op in engines[0].seen if op in ("", "sum")} <= {
        ("all_reduce", "float32"),
        ("all_reduce", "float64"),
        ("all_gather", "uint8"),
        ("broadcast", "uint8"),
    }
    assert {(dtype, op) for _, dtype, op in engines[0].seen if op not in ("", "sum")} == {("uint8", "max")}


def test_training_on_processes_with_sockets_gives_the_bits_of_a_group() -> None:
    here, there = socket.socketpair()
    reader, writer = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=train_in_process, args=(there, writer))
    process.start()
    there.close()  # the process has copies of these two
    writer.close()
    with here, reader:
        trained = [train(SocketEngine(0, 2, [here])), reader.recv()]  # raises if the process has failed
    process.join()
    assert trained == run_group(2, train)


def train_in_process(connection: socket.socket, result: Any) -> None:
    with connection:
        result.send(train(SocketEngine(1, 2, [connection])))


@pytest.mark.parametrize("compression", ["f16", "bf16", "int8", "topk", pytest.param(Int8(4), id="int8 by 4")])
@pytest.mark.parametrize("kind", [ThreadEngine, RichThreadEngine])
def test_compression_on_an_engine_gives_the_bits_of_a_group(kind: Any, compression: Any) -> None:
    like: dict[str, Array] = {"a": np.zeros((3, 40), np.float32), "b": np.zeros(7)}

    def compressed(group: Any) -> list[dict[str, bytes]]:
        sync = gw.GradientSync(group, like, compression=compression, bucket_bytes=64, first_bucket_bytes=64)
        random = np.random.default_rng(group.rank)
        return [
            bits(sync.sync({name: random.normal(size=one.shape) for name, one in like.items()}, weight=1 + group.rank))
            for _ in range(3)
        ]

    engines = thread_engines(3, kind)
    assert run_ranks(engines, compressed) == run_group(3, compressed)
    used_all_to_all = ("all_to_all", "uint8", "") in engines[0].seen
    assert used_all_to_all == (kind is RichThreadEngine and compression != "topk")


def test_compression_exchange_on_an_engine_gives_the_bits_of_a_group() -> None:
    def exchange(group: Any) -> bytes:
        bucket = np.random.default_rng(group.rank).normal(size=100).astype(np.float32)
        return bytes(Int8().exchange(group, bucket, scale=0.5).tobytes())

    assert run_ranks(thread_engines(2), exchange) == run_group(2, exchange)
    with pytest.raises(gw.UnsupportedOp, match="ThreadEngine has its own timeouts"):
        Int8().exchange(thread_engines(1)[0], np.ones(3), timeout=1.0)


def test_sharded_optimizer_on_an_engine_gives_the_bits_of_a_group() -> None:
    class Descent:
        def __init__(self, weights: dict[str, Array]) -> None:
            self.weights = weights

        def step(self, gradients: dict[str, Array]) -> None:
            for name, gradient in gradients.items():
                self.weights[name] -= gradient

    def sharded(group: Any) -> dict[str, bytes]:
        weights = {name: np.ones_like(one) for name, one in LIKE.items()}
        ShardedOptimizer(group, weights, Descent).step(gradients(0))
        return bits(weights)

    assert run_ranks(thread_engines(3), sharded) == run_group(3, sharded)


# -- errors -----------------------------------------------------------------------------------------------------------


def errors_of(engines: list[ThreadEngine], fn: Callable[[Any], object]) -> list[gw.GradwireError]:
    def attempt(engine: Any) -> gw.GradwireError:
        with pytest.raises(gw.GradwireError) as caught:
            fn(engine)
        return caught.value

    return run_ranks(engines, attempt)


def test_gradient_sync_on_an_engine_not_finite_is_raised_on_all_ranks_and_training_continues() -> None:
    def attempt(engine: Any) -> None:
        sync = gw.GradientSync(engine, {"a": np.zeros(2), "b": np.zeros(2)})
        sync.sync({"a": np.ones(2), "b": np.ones(2)})
        try:
            sync.sync({"a": np.ones(2), "b": np.array([np.nan if engine.rank == 1 else 0, 0])})
        finally:
            assert sync.sync({"a": np.ones(2)})["a"].tolist() == [1, 1]

    for error in errors_of(thread_engines(3, RichThreadEngine), attempt):
        assert isinstance(error, gw.NotFinite)
        assert (error.culprit, error.tensor, error.generation) == (1, "b", 7)


def test_contract_on_an_engine_diverged_names_rank_and_tensor() -> None:
    def attempt(engine: Any) -> None:
        gw.Contract(engine).check({"w": np.ones(3), "b": np.full(2, engine.rank == 2)})

    for error in errors_of(thread_engines(3), attempt):
        assert isinstance(error, gw.ReplicasDiverged)
        assert (error.culprit, error.tensor, error.generation) == (2, "b", None)


def test_gradient_sync_on_an_engine_different_tensors_raise_config_error_on_all_ranks() -> None:
    def attempt(engine: Any) -> None:
        gw.GradientSync(engine, {"w": np.zeros(2 + engine.rank)}).agree()

    for error in errors_of(thread_engines(2), attempt):
        assert "item 2 is 'w': float64[3] on rank 1, but 'w': float64[2] on rank 0" in str(error)


class WithoutGather:
    rank, size = 0, 1

    def all_reduce(self, x: Any, op: str = "sum") -> Any: ...


class WithMethods(ThreadEngine):
    def __init__(self) -> None:
        pass

    def rank(self) -> int:  # type: ignore[override]  # as torch's process groups
        return 0

    def size(self) -> int:  # type: ignore[override]
        return 1


@pytest.mark.parametrize(
    "call",
    [
        lambda group: gw.GradientSync(group, {}),
        gw.Contract,
        lambda group: gw.check_replicas(group, {}),
        lambda group: gw.broadcast_named(group, {}),
        lambda group: gw.weighted_mean(group, 1.0, 1.0),
        lambda group: ShardedOptimizer(group, {}, lambda share: None),  # type: ignore[type-var]
        lambda group: Int8().exchange(group, np.ones(1)),
    ],
)
def test_communicator_without_its_calls_raises_config_error_naming_them(call: Callable[[Any], object]) -> None:
    with pytest.raises(gw.ConfigError, match=r"got WithoutGather, .* it lacks broadcast, all_gather$"):
        call(WithoutGather())
    with pytest.raises(gw.ConfigError, match=r"got str, .* it lacks rank, size, all_reduce, broadcast, all_gather$"):
        call("group")
    with pytest.raises(gw.ConfigError, match="the rank and the size of WithMethods are methods"):
        call(WithMethods())


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0, 1.5), ("0", 1), (True, 2)])
def test_communicator_with_an_impossible_position_raises_config_error(rank: Any, size: Any) -> None:
    (engine,) = thread_engines(1)
    engine.rank, engine.size = rank, size
    with pytest.raises(gw.ConfigError):
        gw.Contract(engine)


def test_communicator_that_returns_a_wrong_result_raises_config_error_naming_the_call() -> None:
    class Truncating(ThreadEngine):
        def all_gather(self, x: Array) -> Array:
            return super().all_gather(x)[1:]

    class Widening(ThreadEngine):
        def all_reduce(self, x: Array, op: str = "sum") -> Array:
            return super().all_reduce(x.astype(np.float64), op)

    for error in errors_of(thread_engines(2, Truncating), lambda engine: gw.GradientSync(engine, {}).agree()):
        assert "Truncating.all_gather returned uint8[15] on rank" in str(error)
    for error in errors_of(thread_engines(2, Widening), lambda engine: gw.check_replicas(engine, {})):
        assert "Widening.all_reduce returned float64[32]" in str(error)


def test_communicator_own_error_reaches_the_program_unchanged() -> None:
    class Failing(ThreadEngine):
        def all_reduce(self, x: Array, op: str = "sum") -> Array:
            raise OSError("the cable is unplugged")

    with pytest.raises(OSError, match="unplugged"):
        gw.check_replicas(thread_engines(1, Failing)[0], {})


def test_gradient_sync_on_an_engine_with_an_algorithm_raises_unsupported_op() -> None:
    with pytest.raises(gw.UnsupportedOp, match="ThreadEngine chooses its own algorithm"):
        gw.GradientSync(thread_engines(1)[0], {}, algorithm="ring")


def test_gradient_sync_follows_an_object_whose_engine_changes() -> None:
    class Run:
        def __init__(self, group: gw.Communicator) -> None:
            self.group = group

    def attempt(engine: Any) -> list[float]:
        run = Run(engine)
        sync = gw.GradientSync(run, {"w": np.zeros(1)})
        first = sync.sync({"w": np.full(1, engine.rank)})["w"].tolist()
        (run.group,) = thread_engines(1)
        return [*first, *sync.sync({"w": np.full(1, engine.rank)})["w"].tolist(), sync.total_weight]

    assert run_ranks(thread_engines(2), attempt) == [[0.5, 0, 1], [0.5, 1, 1]]


def test_communicator_with_an_attribute_group_is_used_itself() -> None:
    (engine,) = thread_engines(1)
    engine.group = "the engine's own"  # type: ignore[attr-defined]
    assert gw.GradientSync(engine, {}).group is engine


def test_communicator_isinstance_accepts_groups_and_engines_only() -> None:
    with gw.init() as group:
        assert isinstance(group, gw.Communicator)
    assert isinstance(thread_engines(1)[0], gw.Communicator)
    assert not isinstance(WithoutGather(), gw.Communicator)
