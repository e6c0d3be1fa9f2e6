"""DistributedDataParallel with compression: fewer bytes, identical bits on all ranks, correct gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers need it: import it once, before ranks are forked
from torch import nn

import gradwire as gw
from gradwire.training.compression import BF16, F16, Int8, TopK
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import run_group
from support.small_models import (
    assert_close,
    assert_same_bits,
    batch,
    filled,
    gradients,
    loss,
    mean_gradients,
    mlp,
    weights,
)

DIGITS = Path(__file__).parents[2] / "examples" / "data" / "digits.csv.gz"
DDP = gw.torch.DistributedDataParallel
NAMES = ["f16", "bf16", "int8", "topk"]
# The largest error of one exchange per element (two roundings). Top-k has no such bound.
ROUNDING = {"f16": 2e-3, "bf16": 2e-2, "int8": 2e-2}
SMALL: Any = {"bucket_mb": 0.001, "first_bucket_mb": 0.0001}  # small, so that there are several buckets


def step(model: Any, seed: int, rank: int) -> None:
    x, y = batch(seed, rank, dtype=next(model.parameters()).dtype)
    loss(model(x), y).backward()


def train(ddp: Any, rank: int, steps: int, clip: float = 0.0) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for seed in range(steps):
        optimizer.zero_grad()
        step(ddp, seed, rank)
        if clip:
            ddp.clip(clip)
        optimizer.step()


# -- identical bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_ddp_compression_weights_have_identical_bits_on_all_ranks(name: str, dtype: Any, overlap: bool) -> None:
    def run(group: gw.Group, compression: str | None) -> dict[str, Any]:
        ddp = DDP(mlp(group.rank, dtype), group, compression=compression, overlap=overlap, **SMALL)
        train(ddp, group.rank, 6)
        return weights(ddp.module)

    of_ranks = run_group(3, lambda group: run(group, name))
    assert_same_bits(of_ranks)
    whole = run_group(3, lambda group: run(group, None))[0]
    if dtype is not torch.bfloat16:
        assert not torch.equal(of_ranks[0]["0.weight"], whole["0.weight"])  # it was compressed
        assert_close(of_ranks[0], whole, ROUNDING.get(name, 1.0))


def digests(group: gw.Group) -> list[str]:
    """Train with each compression, and return the digests of the weights."""
    found = []
    for name in NAMES:
        ddp = DDP(mlp(group.rank, torch.float32), group, compression=name, **SMALL)
        train(ddp, group.rank, 5, clip=0.1)
        bits = b"".join(one.numpy().tobytes() for one in weights(ddp.module).values())
        found.append(hashlib.sha256(bits).hexdigest())
    return found


def trains(here: Here) -> None:
    torch.set_num_threads(1)
    with gw.init() as group:
        here.send(digests=digests(group))


@pytest.mark.slow
def test_ddp_compression_processes_hold_the_weights_of_threads(job: StartJob) -> None:
    """The values that ranks send, and the order of their additions, do not depend on the transport."""
    expected = run_group(4, digests)[0]
    assert len(set(expected)) == len(NAMES)
    with job(trains, 4) as ranks:
        assert [rank.receive()["digests"] for rank in ranks] == [expected] * 4
        for rank in ranks:
            assert rank.ended() == 0, rank.output()


def test_ddp_different_compression_raises_config_error_on_all_ranks() -> None:
    def begin(group: gw.Group) -> float:
        with pytest.raises(gw.ConfigError, match=r"topk of 0\.25") as failure:
            DDP(mlp(), group, compression=TopK(0.25) if group.rank == 1 else "int8")
        assert failure.value.culprit == 1
        return float(group.all_reduce(1.0))

    assert run_group(3, begin) == [3.0] * 3


# -- residuals: every gradient arrives in the end ---------------------------------------------------------------------


class Branches(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Any, way: str) -> Any:
        return getattr(self, way)(x)


def branches() -> Any:
    return filled(Branches(), 3).double()


def through(model: Any, rank: int, *ways: str) -> None:
    """Run one backward pass for each path through the model; the gradients accumulate."""
    for seed, way in enumerate(ways):
        x, y = batch(seed, rank)
        loss(model(x, way), y).backward()


def different_halves(model: Any, rank: int) -> None:
    """In each backward pass, the ranks use different parameters."""
    through(model, rank, "one" if rank else "two")


def in_turn(model: Any, rank: int) -> None:
    """In each backward pass, all ranks use one half of the model; the gradients of the other half do not change."""
    through(model, rank, "one", "two", "one")


def same_half(model: Any, rank: int) -> None:
    through(model, rank, "one")


def accumulated(model: Any, rank: int) -> None:
    """Accumulate gradients without an exchange, a different number of times on each rank."""
    if isinstance(model, DDP):
        with model.no_sync():
            through(model, rank, *["one"] * rank)
    else:
        through(model, rank, *["one"] * rank)
    through(model, rank, "two")


def add(total: dict[str, Any], model: Any) -> None:
    for name, one in gradients(model).items():
        total[name] = total[name] + (0 if one is None else one)


def zeros(model: Any) -> None:
    (sum(one.sum() for one in model.parameters()) * 0).backward()


def warmed_up(group: gw.Group, kind: Any) -> Any:
    """Return a model after its first backward pass, which reorders the buckets and resets the residuals."""
    ddp = DDP(branches(), group, compression=kind, **SMALL)
    zeros(ddp)
    ddp.zero_grad()
    return ddp


def received(ddp: Any, rank: int, backwards: list[Callable[[Any, int], None]]) -> dict[str, Any]:
    """Return the sum of all gradients that a loop receives, plus the residuals that are left at the end."""
    total: dict[str, Any] = dict.fromkeys(dict(ddp.module.named_parameters()), 0)
    for backward in backwards:
        ddp.zero_grad()
        backward(ddp, rank)
        add(total, ddp.module)
    for _ in range(40):
        ddp.zero_grad()
        zeros(ddp)
        add(total, ddp.module)
    return total


@pytest.mark.parametrize("kind", [F16(), BF16(), Int8(16), TopK(0.1)], ids=lambda kind: kind.describe())
@pytest.mark.parametrize(
    "backwards",
    [[same_half, in_turn, same_half], [different_halves, same_half, different_halves], [accumulated, in_turn]],
)
def test_ddp_compression_delivers_every_gradient_exactly_once(
    kind: Any, backwards: list[Callable[[Any, int], None]]
) -> None:
    """For any use of the parameters, residuals are neither dropped nor sent twice."""

    def run(group: gw.Group) -> dict[str, Any]:
        return received(warmed_up(group, kind), group.rank, backwards)

    of_ranks = run_group(3, run)
    assert_same_bits(of_ranks)
    expected: dict[str, Any] = dict.fromkeys(of_ranks[0], 0)
    for backward in backwards:
        for name, one in mean_gradients(branches, 3, backward).items():
            expected[name] = expected[name] + (0 if one is None else one)
    expected["never.weight"], expected["never.bias"] = torch.zeros(3, 6), torch.zeros(3)
    assert_close(of_ranks[0], expected, 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_ddp_compression_parameter_unused_on_all_ranks_has_no_gradient(name: str) -> None:
    def run(group: gw.Group) -> list[dict[str, Any]]:
        ddp, found = DDP(branches(), group, compression=name), []
        for way in ("one", "two", "one"):
            ddp.zero_grad()
            through(ddp, group.rank, way)
            found.append(gradients(ddp.module))
        return found

    of_ranks = run_group(2, run)
    for number, unused in enumerate(("two", "one", "two")):
        assert_same_bits([found[number] for found in of_ranks])
        missing = {one for one, gradient in of_ranks[0][number].items() if gradient is None}
        assert missing == {f"{unused}.weight", f"{unused}.bias", "never.weight", "never.bias"}


# -- uneven data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [[3, 1, 5], [0, 2, 1]])
@pytest.mark.parametrize("name", NAMES)
def test_ddp_compression_join_with_uneven_data_is_close_to_uncompressed(name: str, batches: list[int]) -> None:
    def run(group: gw.Group, compression: str | None) -> dict[str, Any]:
        ddp = DDP(mlp(), group, compression=compression, **SMALL)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for epoch in range(2):
            with ddp.join(optimizer):
                for number in range(batches[group.rank]):
                    optimizer.zero_grad()
                    step(ddp, 10 * epoch + number, group.rank)
                    optimizer.step()
        return weights(ddp.module)

    of_ranks = run_group(3, lambda group: run(group, name))
    assert_same_bits(of_ranks)
    assert_close(of_ranks[0], run_group(3, lambda group: run(group, None))[0], ROUNDING.get(name, 0.5))


def test_ddp_compression_residual_arrives_after_a_round_without_data() -> None:
    """In the last round of `join` no rank has data, and its gradients are not used."""

    def run(group: gw.Group) -> dict[str, Any]:
        ddp = warmed_up(group, TopK(0.1))
        total: dict[str, Any] = dict.fromkeys(dict(ddp.module.named_parameters()), 0)
        with ddp.join():
            same_half(ddp, group.rank)
            add(total, ddp.module)
        later = received(ddp, group.rank, [])
        return {name: total[name] + later[name] for name in ("one.weight", "one.bias")}

    of_ranks = run_group(2, run)
    assert_same_bits(of_ranks)
    expected = mean_gradients(branches, 2, same_half)
    assert_close(of_ranks[0], {name: expected[name] for name in of_ranks[0]}, 1e-9)


# -- checks and clipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "seed", [0, 1]
)  # in the first backward pass, which learns the order, and in the second, which overlaps
@pytest.mark.parametrize("name", NAMES)
def test_ddp_compression_nan_raises_on_all_ranks_and_is_not_kept(name: str, seed: int, bad: float) -> None:
    def run(group: gw.Group) -> dict[str, Any]:
        ddp = DDP(mlp(), group, compression=name, **SMALL)
        for number in range(seed):
            step(ddp, number, group.rank)
        ddp.zero_grad()
        x, y = batch(seed, group.rank)
        if group.rank == 1:
            y[2, 1] = bad
        with pytest.raises(gw.NotFinite, match="of rank 1 is not finite") as failure:
            loss(ddp(x), y).backward()
        assert failure.value.culprit == 1
        ddp.zero_grad()
        step(ddp, 7, group.rank)
        return gradients(ddp.module)

    of_ranks = run_group(3, run)
    assert_same_bits(of_ranks)
    for tensor, one in of_ranks[0].items():
        assert torch.isfinite(one).all(), tensor
    if name != "topk":
        expected = mean_gradients(mlp, 3, lambda model, rank: step(model, 7, rank))
        assert_close(of_ranks[0], expected, 2 * ROUNDING[name])


@pytest.mark.parametrize("name", NAMES)
def test_ddp_compression_clip_uses_the_norm_of_the_received_gradients(name: str) -> None:
    def run(group: gw.Group) -> tuple[float, dict[str, Any]]:
        ddp = DDP(branches(), group, compression=name)
        for way in (
            "two",
            "two",
            "one",
        ):  # at the end, part of the other half is still in the residual, and not in the norm
            ddp.zero_grad()
            through(ddp, group.rank, way)
        before = nn.utils.get_total_norm([one.grad for one in ddp.parameters() if one.grad is not None])
        found = ddp.clip(0.01)
        assert found == pytest.approx(float(before), rel=1e-12)
        return found, gradients(ddp.module)

    of_ranks = run_group(3, run)
    assert len({norm for norm, _ in of_ranks}) == 1
    assert_same_bits([found for _, found in of_ranks])
    after = nn.utils.get_total_norm([one for one in of_ranks[0][1].values() if one is not None])
    assert float(after) == pytest.approx(0.01, rel=1e-3)


# -- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ddp_compression_accuracy_is_within_one_point_of_uncompressed() -> None:
    table = torch.from_numpy(np.loadtxt(DIGITS, delimiter=",", dtype=np.float32))
    images, labels = table[:, :64] / 16, table[:, 64].long()

    test, train = (images[:360], labels[:360]), (images[360:], labels[360:])

    def learn(group: gw.Group, compression: str | None) -> float:
        network = filled(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)), 0)
        ddp = DDP(network, group, compression=compression)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        sampler = gw.Sampler(len(train[0]), rank=group.rank, size=group.size, seed=0)
        right = []
        for epoch in range(40):
            for mine in sampler.batches(epoch, 120):
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(train[0][mine]), train[1][mine]).backward()
                optimizer.step()
            right.append(float((ddp(test[0]).argmax(dim=1) == test[1]).float().mean()))
        return sum(right[-4:]) / 4

    def accuracy(compression: str | None) -> float:
        return run_group(2, lambda group: learn(group, compression))[0]

    whole, *others = map(accuracy, (None, *NAMES))
    assert whole > 0.9
    assert min(others) > whole - 0.01


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "times"),
    [
        ("f16", 2, 2.0),
        ("bf16", 2, 2.0),
        ("int8", 2, 256 * 4 / 260),
        ("topk", 2, 50.0),
        ("int8", 4, 3.94),
        ("topk", 4, 25.0),
    ],
)
def test_ddp_compression_step_sends_the_documented_fraction_of_bytes(name: str, size: int, times: float) -> None:
    """Count all bytes of a backward pass with the transport's own counter."""

    def measure(group: gw.Group, compression: str | None) -> int:
        model = filled(nn.Sequential(nn.Linear(600, 1000), nn.Tanh(), nn.Linear(1000, 500)), 0)
        ddp = DDP(model, group, compression=compression, algorithm="ring")
        x = torch.ones(2, 600)
        ddp(x).sum().backward()
        before = group.bytes_sent
        ddp(x).sum().backward()
        return group.bytes_sent - before

    plain = run_group(size, lambda group: measure(group, None))
    for whole, fewer in zip(plain, run_group(size, lambda group: measure(group, name)), strict=True):
        assert whole / fewer == pytest.approx(times, rel=0.02)
