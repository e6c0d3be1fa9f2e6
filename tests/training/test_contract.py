"""Replica checks: check_replicas, Contract, broadcast_named and weighted_mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradwire as gw
from gradwire.training.contract import diverged
from support.ranks import run_ranks


@pytest.fixture(name="groups", params=[2, 3], ids=["two", "three"])
def groups_fixture(request: pytest.FixtureRequest) -> Iterator[list[gw.Group]]:
    made = gw.local_group(request.param)
    yield made
    for group in made:
        group.close()


def weights() -> dict[str, Any]:
    return {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half": np.ones(5, ml_dtypes.bfloat16),
        "strided": np.arange(10.0)[::2],
        "steps": np.zeros((), np.int64),
        "none": np.zeros((0, 3)),
        "bias": np.full(4, 0.5),
    }


def test_check_replicas_equal_replicas_have_one_digest(groups: list[gw.Group]) -> None:
    digests = set(run_ranks(groups, lambda group: gw.check_replicas(group, weights())))
    assert len(digests) == 1
    with gw.init() as group:
        assert {gw.check_replicas(group, weights())} == digests
        assert gw.check_replicas(group, weights() | {"steps": np.ones((), np.int64)}) not in digests


@pytest.mark.parametrize("name", ["w", "half", "strided", "steps"])
def test_check_replicas_flipped_bit_names_rank_and_tensor_on_all_ranks(groups: list[gw.Group], name: str) -> None:
    last = len(groups) - 1

    def body(group: gw.Group) -> tuple[Any, ...]:
        mine = weights()
        if group.rank == last:
            whole = np.ascontiguousarray(mine[name])
            whole.reshape(-1).view(np.uint8)[-1] ^= 1
            mine[name] = whole
        with pytest.raises(gw.ReplicasDiverged) as caught:
            gw.check_replicas(group, mine)
        gw.check_replicas(group, weights())  # the group stays usable
        error = caught.value
        return error.culprit, error.tensor, error.generation, str(error)

    most = "2 of 3 ranks" if last == 2 else "rank 0"
    found = run_ranks(groups, body)
    assert found == [(last, name, 1, found[0][3])] * len(groups)
    text = (
        rf"rank {last} holds a different '{name}' \(digest (\w+)\) than {most} \(digest (\w+)\): the replicas have .*"
    )
    digests = re.fullmatch(text, found[0][3])
    assert digests is not None
    assert digests[1] != digests[2]


def test_diverged_names_the_first_rank_of_the_minority_even_if_it_is_rank_0() -> None:
    common, other = [["a", "1"], ["b", "2"]], [["a", "1"], ["b", "3"]]
    assert diverged([other, common, common]).culprit == 0
    assert diverged([common, other]).culprit == 1
    assert diverged([common, common, other, other]).culprit == 2
    error = diverged([common, other, common, other, common], 7)
    assert (error.culprit, error.tensor, error.generation) == (1, "b", 7)
    assert str(error).endswith("the replicas have diverged; rank 3 differs too")


@pytest.mark.parametrize(
    ("mine", "tensor"),
    [
        ({"w": np.ones(3), "b": np.ones(2)}, "b"),
        ({}, "w"),
        ({"v": np.ones(3)}, "v"),
        ({"w": np.ones((3, 1))}, "w"),
        ({"w": np.ones(3).view(np.int64)}, "w"),
    ],
    ids=["more", "none", "another name", "another shape", "another dtype"],
)
def test_check_replicas_other_name_shape_or_dtype_raises_replicas_diverged(mine: dict[str, Any], tensor: str) -> None:
    def body(group: gw.Group) -> tuple[Any, ...]:
        with pytest.raises(gw.ReplicasDiverged) as caught:
            gw.check_replicas(group, mine if group.rank else {"w": np.ones(3)})
        return caught.value.culprit, caught.value.tensor

    assert run_ranks(gw.local_group(2), body) == [(1, tensor)] * 2


def test_contract_every_3_checks_each_third_step() -> None:
    def body(group: gw.Group) -> list[int]:
        contract = gw.Contract(group, every=3)
        seen = [step for step in range(1, 9) if contract.check({"w": np.full(2, step)})]
        with pytest.raises(gw.ReplicasDiverged):
            contract.check({"w": np.full(2, group.rank)})
        return seen

    assert run_ranks(gw.local_group(2), body) == [[3, 6]] * 2


def test_contract_rebind_to_another_group_restarts_the_step_count() -> None:
    one, two = gw.init(), gw.local_group(1)[0]
    contract = gw.Contract(one, every=2)
    assert [contract.check({}) for _ in range(3)] == [False, True, False]
    contract.rebind(one)
    assert contract.check({})
    assert not contract.check({})
    contract.rebind(two)
    assert [contract.check({}) for _ in range(2)] == [False, True]
    never = gw.Contract(one, every=0)
    assert not any(never.check({"w": "no array"}) for _ in range(10))
    one.close()
    two.close()


@pytest.mark.parametrize("every", [-1, 1.5, True, None])
def test_contract_invalid_every_raises_config_error(every: Any) -> None:
    with gw.init() as group, pytest.raises(gw.ConfigError, match="every is"):
        gw.Contract(group, every)


def test_check_replicas_value_that_is_no_array_raises_array_error() -> None:
    with gw.init() as group:
        with pytest.raises(gw.ArrayError, match="'w': expected an array, got str"):
            gw.check_replicas(group, {"w": "words"})
        with pytest.raises(gw.ArrayError, match="expected a dict of arrays by name, got list"):
            gw.check_replicas(group, [np.ones(2)])  # type: ignore[arg-type]


# --- initial values


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_named_writes_the_tensors_of_the_root_in_place(groups: list[gw.Group], root: int) -> None:
    def body(group: gw.Group) -> str:
        mine = weights() | {"big": np.zeros(20_000)}
        for name in mine:
            mine[name][...] = mine[name] + mine[name].dtype.type(group.rank)
        held = dict(mine)
        assert gw.broadcast_named(group, mine, root) is mine
        assert all(mine[name] is held[name] for name in held)
        assert mine["big"][-1] == root
        assert mine["bias"].tolist() == [root + 0.5] * 4
        assert mine["strided"].tolist() == [root + 2.0 * i for i in range(5)]
        return gw.check_replicas(group, mine)

    run_ranks(groups, body)


def test_broadcast_named_different_shapes_raise_before_any_write(groups: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        mine = {"w": np.full(3, group.rank), "b": np.zeros(2 + group.rank)}
        with pytest.raises(gw.ConfigError, match=r"broadcast_named: item 2 is 'b': float64\[3\] on rank 1, but") as e:
            gw.broadcast_named(group, mine)
        assert e.value.culprit == 1
        assert (mine["w"] == group.rank).all()
        group.barrier()

    run_ranks(groups, body)


def test_broadcast_named_read_only_array_raises_array_error() -> None:
    def body(group: gw.Group) -> None:
        mine = {"w": np.zeros(3)}
        mine["w"].flags.writeable = False
        if group.rank:
            with pytest.raises(gw.ArrayError, match="'w': the array is read-only"):
                gw.broadcast_named(group, mine)
            mine["w"] = np.ones(3)
        assert not gw.broadcast_named(group, mine)["w"].any()

    run_ranks(gw.local_group(2), body)


# --- weighted means


def test_weighted_mean_weights_ranks_by_samples(groups: list[gw.Group]) -> None:
    def body(group: gw.Group) -> Any:
        rank, size = group.rank, group.size
        mean = gw.weighted_mean(group, 10.0 * rank, weight=rank + 1)
        assert mean == pytest.approx(sum(10 * r * (r + 1) for r in range(size)) / sum(range(1, size + 1)))
        array = gw.weighted_mean(group, np.full((2, 2), rank, np.float32), weight=2)
        assert array.dtype == np.float32
        assert (array == (size - 1) / 2).all()
        assert gw.weighted_mean(group, np.array([rank, 1]), weight=1).tolist() == [(size - 1) / 2, 1.0]
        return mean

    assert len(set(run_ranks(groups, body))) == 1


def test_weighted_mean_rank_with_weight_zero_is_ignored(groups: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        assert gw.weighted_mean(group, 3.0 if group.rank == 0 else float("nan"), 7 if group.rank == 0 else 0) == 3.0
        assert np.isnan(gw.weighted_mean(group, 3.0, 0))
        with pytest.raises(gw.ConfigError, match="the weight is -1"):
            gw.weighted_mean(group, 3.0, -1)
        with pytest.raises(gw.ArrayError, match="complex128"):
            gw.weighted_mean(group, np.ones(2, complex), 1)

    run_ranks(groups, body)
