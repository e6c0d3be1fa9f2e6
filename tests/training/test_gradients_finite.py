"""GradientSync with non-finite gradients: all ranks get an error that names the rank and the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.host import native_core
from support.gradients import LIKE, SMALL, some
from support.gradients import pair_fixture as pair_fixture
from support.gradients import three_fixture as three_fixture
from support.ranks import run_ranks

needs_core = pytest.mark.skipif(not native_core.available(), reason="only the core copies from addresses")


@pytest.mark.parametrize("pure", [False, True], ids=["core", "pure"])
@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside"])
def test_gradient_sync_nan_names_rank_and_tensor_on_all_ranks(
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
        assert set(sync.sync(some(group.rank))) == set(LIKE)  # the group stays usable
        error = caught.value
        return str(error), error.culprit, error.tensor, error.operation, error.generation

    if pure:
        run_ranks(three, lambda group: group.barrier())  # make the links before the native core is turned off
        monkeypatch.setenv("GRADWIRE_PURE", "1")
    text = "the gradient 'b' of rank 1 is not finite: 1 NaN of 7 elements (3 more such gradients; affected ranks: 1, 2)"
    assert run_ranks(three, body) == [(text, 1, "b", "GradientSync", 1)] * 3


@pytest.mark.parametrize("how", ["written", "added", "strided", "other dtype", "in place"])
def test_gradient_sync_nan_is_found_for_every_way_of_writing_a_gradient(pair: list[gw.Group], how: str) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE)
        for faulty in (False, True):
            gradient = np.ones((3, 4), np.float32)
            gradient[2, 1] = np.nan if faulty and group.rank == 1 else 1
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
            if not faulty:
                sync.finish()
                assert (sync.gradients["a"] == 1).all()
                continue
            with pytest.raises(gw.NotFinite, match="'a' of rank 1"):
                sync.finish()

    run_ranks(pair, body)


def test_gradient_sync_check_finite_false_returns_the_nan(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> None:
        sync = gw.GradientSync(group, LIKE, check_finite=False)
        assert np.isnan(sync.sync({"c": np.float32(np.nan)})["c"])

    run_ranks(pair, body)


@needs_core
def test_writer_copy_from_checks_for_finite_values(pair: list[gw.Group]) -> None:
    def body(group: gw.Group) -> tuple[str, float]:
        sync = gw.GradientSync(group, {"a": np.zeros(40_000), "b": np.zeros((2, 3), np.float32)})
        first, second = np.full(40_000, group.rank + 1.0), np.ones((2, 3), np.float32)
        for bad in (np.inf, 1.0):
            second[1, 2] = bad if group.rank == 1 else 1.0
            assert sync.writer.copy_from("a", first.ctypes.data)
            assert sync.writer.copy_from("b", second.ctypes.data)
            for name in sync.gradients:
                sync.ready(name)
            if bad != 1.0:
                with pytest.raises(gw.NotFinite) as caught:
                    sync.finish()
        sync.finish()
        assert (sync.gradients["b"] == 1.0).all()
        return str(caught.value.tensor), float(sync.gradients["a"][-1])

    assert run_ranks(pair, body) == [("b", 1.5)] * 2


@needs_core
@pytest.mark.parametrize(
    "bad", [None, 0, 2047, 2048, -1]
)  # blocks have 8 KiB: within a block, at its ends, and in the last block
@pytest.mark.parametrize("count", [8192, 1_000_003])
def test_writer_copy_from_a_large_array_copies_exactly_and_finds_a_nan(count: int, bad: int | None) -> None:
    with gw.local_group(1)[0] as group:
        like = {"a": np.zeros(count, np.float32), "rest": np.zeros(9 << 18, np.float32)}
        sync = gw.GradientSync(group, like)
        places = sync.writer
        lying = (
            np.random.default_rng(count).normal(size=count + 3).astype(np.float32)[3:]
        )  # not aligned to a cache line
        if bad is not None:
            lying[bad] = np.nan
        assert places.copy_from("a", lying.ctypes.data)
        assert ("a" in places.finite) == (bad is None)
        assert np.array_equal(sync.gradients["a"].view(np.uint32), lying.view(np.uint32))


@needs_core
def test_writer_copy_from_its_own_memory_is_refused_and_checked_at_finish() -> None:
    with gw.local_group(1)[0] as group:
        sync = gw.GradientSync(group, {"a": np.zeros(4)})
        one = np.ones(4)
        assert sync.writer.copy_from("a", one.ctypes.data)
        place = sync.gradients["a"]
        place[1] = np.nan
        assert not sync.writer.copy_from("a", place.ctypes.data)
        sync.ready("a")
        with pytest.raises(gw.NotFinite):
            sync.finish()


def test_writer_copy_from_without_the_native_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_PURE", "1")
    with gw.local_group(1)[0] as group:
        sync = gw.GradientSync(group, {"a": np.zeros(4)})
        assert not sync.writer.copy_from("a", np.ones(4).ctypes.data)
        assert not sync.gradients["a"].any()
