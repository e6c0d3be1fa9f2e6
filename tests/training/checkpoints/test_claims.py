"""The order of runs in a folder, and writers that are outdated."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.training.checkpoints.claims import Claims, locked_claims, read_claims
from support.checkpoints import fence_of


def add(folder: Path, fence: gw.Fence, *, is_new: bool = True) -> None:
    with locked_claims(folder) as claims:
        claims.add(fence, is_new=is_new)


def test_add_generations_in_order_records_each_once(tmp_path: Path) -> None:
    for generation in (1, 1, 2, 2):
        add(tmp_path, fence_of(1, generation), is_new=False)
    assert read_claims(tmp_path).fences == (fence_of(1, 1), fence_of(1, 2))


def test_add_an_earlier_generation_raises_fenced_with_both_fences(tmp_path: Path) -> None:
    add(tmp_path, fence_of(1, 7))
    with pytest.raises(gw.Fenced, match=r"claimed by generation 7 of run 0+1 after generation 6 of run 0+1"):
        add(tmp_path, fence_of(1, 6))


def test_add_a_run_that_was_replaced_raises_fenced(tmp_path: Path) -> None:
    add(tmp_path, fence_of(1))
    add(tmp_path, fence_of(2))
    for is_new in (True, False):
        with pytest.raises(gw.Fenced):
            add(tmp_path, fence_of(1, 99), is_new=is_new)


def test_add_a_new_run_after_the_clock_was_set_back_is_accepted(tmp_path: Path) -> None:
    add(tmp_path, fence_of(9))
    add(tmp_path, fence_of(3))
    add(tmp_path, fence_of(3, 2), is_new=False)
    assert read_claims(tmp_path).runs == [fence_of(9).run, fence_of(3).run]


def test_add_a_run_whose_record_was_lost_raises_fenced(tmp_path: Path) -> None:
    add(tmp_path, fence_of(2))
    with pytest.raises(gw.Fenced):
        add(tmp_path, fence_of(1), is_new=False)


def test_add_after_the_file_was_deleted_records_the_run_again(tmp_path: Path) -> None:
    add(tmp_path, fence_of(1))
    (tmp_path / "claims").unlink()
    add(tmp_path, fence_of(1), is_new=False)
    assert read_claims(tmp_path).fences == (fence_of(1),)


def test_read_claims_ignores_incomplete_and_foreign_lines(tmp_path: Path) -> None:
    text = f"{fence_of(1)}\n\nhello\n\xff\x00\n{fence_of(2)}\n{str(fence_of(3))[:-1]}"
    (tmp_path / "claims").write_bytes(text.encode("latin-1"))
    assert read_claims(tmp_path).fences == (fence_of(1), fence_of(2))


def test_add_after_an_incomplete_line_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text(str(fence_of(1))[:20])
    add(tmp_path, fence_of(2))
    assert read_claims(tmp_path).fences == (fence_of(2),)


def test_read_claims_of_a_missing_file_has_none(tmp_path: Path) -> None:
    assert read_claims(tmp_path / "missing") == Claims(())


def test_age_key_sorts_by_claim_then_step_then_generation() -> None:
    claims = Claims((fence_of(9, 1), fence_of(9, 2), fence_of(3, 1)))
    oldest_first = [
        (500, fence_of(4, 1)),  # runs that are not recorded
        (500, fence_of(5, 1)),
        (7, fence_of(9, 2)),
        (9, fence_of(9, 1)),
        (9, fence_of(9, 2)),
        (1, fence_of(3, 1)),  # a later claim, although its id is smaller and its step too
    ]
    newest_first = oldest_first[::-1]
    assert sorted(newest_first, key=lambda one: claims.age_key(*one)) == oldest_first


def test_locked_claims_without_locks_of_the_file_system_raises_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        add(tmp_path, fence_of(1))
