"""Fences: their order, and files that a writer with a smaller fence cannot overwrite."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.identity import new_run
from support.ranks import run_ranks

fences = st.builds(gw.Fence, st.binary(min_size=16, max_size=16), st.integers(0, 10**9))


@given(fences, fences)
def test_fence_text_sorts_like_the_fence_and_reads_back(one: gw.Fence, other: gw.Fence) -> None:
    assert (one < other) == (str(one) < str(other))
    assert gw.Fence.parse(str(one)) == one


@pytest.mark.parametrize("text", ["", "x", "00-1", f"{bytes(16).hex()}-7", f"{bytes(16).hex()}-{-1:012d}", "é" * 45])
def test_fence_parse_malformed_text_raises_config_error(text: str) -> None:
    with pytest.raises(gw.ConfigError, match="is not a fence"):
        gw.Fence.parse(text)


def test_fence_of_a_later_run_is_greater_for_any_generation() -> None:
    first = new_run()
    assert gw.Fence(new_run(), 1) > gw.Fence(first, 1000)


def test_run_id_after_the_clock_was_set_back_is_still_greater() -> None:
    future = (1 << 62).to_bytes(8, "big") + bytes(8)
    assert new_run(after=future) > future


def draft(folder: Path, text: str) -> Path:
    path = folder / "draft"
    path.write_text(text)
    return path


def test_replace_under_a_smaller_fence_raises_and_keeps_both_files(tmp_path: Path) -> None:
    early, late = gw.Fence(new_run(), 7), gw.Fence(new_run(), 1)
    path = tmp_path / "checkpoint"
    late.replace(draft(tmp_path, "late"), path)
    with pytest.raises(gw.Fenced, match="was written by generation 1 of run"):
        early.replace(draft(tmp_path, "early"), path)
    assert (path.read_text(), (tmp_path / "draft").read_text()) == ("late", "early")
    late.replace(draft(tmp_path, "later"), path)
    gw.Fence(late.run, 2).replace(draft(tmp_path, "next"), path)
    assert path.read_text() == "next"
    with pytest.raises(gw.Fenced):
        late.replace(draft(tmp_path, "stale"), path)


def test_replace_with_a_torn_record_still_refuses_the_earlier_writer(tmp_path: Path) -> None:
    early, late = gw.Fence(new_run(), 1), gw.Fence(new_run(), 1)
    path = tmp_path / "checkpoint"
    late.replace(draft(tmp_path, "late"), path)
    with (tmp_path / "checkpoint.fence").open("a") as record:
        record.write(str(late)[:20])
    with pytest.raises(gw.Fenced):
        early.replace(draft(tmp_path, "early"), path)
    gw.Fence(late.run, 2).replace(draft(tmp_path, "next"), path)
    with pytest.raises(gw.Fenced):
        late.replace(draft(tmp_path, "stale"), path)


def test_run_fence_is_equal_on_all_ranks_and_grows_with_the_generation() -> None:
    def train(group: gw.Group) -> tuple[gw.Fence, gw.Fence]:
        run = gw.Elastic({"w": np.zeros(1)}, group, 1)
        before = run.fence
        run.group = group.recover()
        return before, run.fence

    fences = run_ranks(gw.local_group(2), train)
    assert len(set(fences)) == 1
    before, after = fences[0]
    assert (before.run, before.generation, after.generation) == (after.run, 1, 2)
    assert before < after


def test_replace_with_a_lock_descriptor_inherited_by_a_fork_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may fork a data loader, which inherits the descriptor of the lock."""
    fence, path = gw.Fence(new_run(), 1), tmp_path / "checkpoint"
    inherited: list[int] = []
    replace = os.replace

    def fork_and_replace(source: object, target: object) -> None:
        if not inherited:
            inherited.extend(os.dup(int(name)) for name in os.listdir("/proc/self/fd") if _is_record(name))
        replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", fork_and_replace)
    try:
        for text in ("one", "two"):
            fence.replace(draft(tmp_path, text), path)
        assert inherited
        assert path.read_text() == "two"
    finally:
        for descriptor in inherited:
            os.close(descriptor)


def _is_record(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").endswith(".fence")
    except OSError:
        return False
