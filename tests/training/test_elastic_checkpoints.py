"""Elastic runs that write checkpoints and continue from them. Ranks are threads that write real files."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.errors import CheckpointError
from gradwire.training import checkpoint_saver
from gradwire.training.checkpoints import CheckpointFolder, tensor_file
from gradwire.training.checkpoints.files import write_all
from gradwire.training.elastic import Saving
from gradwire.training.zero import ShardedOptimizer
from support.crews import crew_of
from support.elastic_ranks import Joiner, Left
from support.ranks import eventually, run_ranks

WRITER = "gradwire-checkpoint"  # the name of the threads that write


class Trainer:
    """One rank's program. Its result does not depend on the number of ranks."""

    def __init__(self, group: gw.Group, folder: Path, every: int | None = None, keep: int = 3) -> None:
        self.state: dict[str, Any] = {"w": np.zeros(5), "b": np.zeros((2, 3), np.float32), "epoch": 0}
        self.run = gw.Elastic(self.state, group, 1, saving=Saving.of(folder, every, keep))
        self.steps: list[int] = []  # whose bodies this rank has begun

    def train(self, total: int, in_step: Callable[[int], None] = lambda step: None) -> Trainer:
        for step in self.run.steps(total):
            with step:
                self.steps.append(step.index)
                in_step(step.index)
                self.state["w"] += self.run.group.all_reduce(np.full(5, step.index / 4), op="mean")
                self.state["b"] *= np.float32(0.5)
                self.state["b"] += np.float32(step.index)
                self.state["epoch"] = step.index // 3
        return self

    def digest(self) -> str:
        return self.run.digest


def trained(size: int, total: int, folder: Path, every: int | None = None, **options: Any) -> list[Trainer]:
    return run_ranks(gw.local_group(size), lambda group: Trainer(group, folder, every, **options).train(total))


def digest_without_interruption(total: int, tmp_path: Path) -> str:
    return trained(1, total, tmp_path / "undisturbed")[0].digest()


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints, the newest first."""
    return [checkpoint.step for checkpoint in CheckpointFolder(folder).complete()]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 2), (3, 2), (2, 4)])
def test_run_continues_from_the_checkpoint_also_with_another_number_of_ranks(
    first: int, second: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(first, 5, tmp_path / "c")
    assert steps_in(tmp_path / "c") == [4]
    with caplog.at_level(logging.WARNING):
        resumed = trained(second, 9, tmp_path / "c")
    assert [rank.steps for rank in resumed] == [[5, 6, 7, 8]] * second
    assert {rank.digest() for rank in resumed} == {digest_without_interruption(9, tmp_path)}
    assert [record.getMessage()[:44] for record in caplog.records] == ["continuing after step 4, from the checkpoint"]
    assert {rank.run.committed for rank in resumed} == {8}


def test_run_whose_steps_are_done_continues_from_the_checkpoint_without_a_step(tmp_path: Path) -> None:
    digest = trained(2, 5, tmp_path)[0].digest()
    again = trained(3, 5, tmp_path)
    assert [(rank.steps, rank.digest()) for rank in again] == [([], digest)] * 3
    assert steps_in(tmp_path) == [4]


def test_run_writes_checkpoints_at_the_interval_and_removes_old_ones(tmp_path: Path) -> None:
    def train(group: gw.Group) -> list[str | None]:
        seen: list[str | None] = []
        trainer = Trainer(group, tmp_path, 3, keep=2)

        trainer.train(40, lambda step: seen.append(trainer.run.last_checkpoint))
        return [*seen, trainer.run.last_checkpoint]

    results = run_ranks(gw.local_group(2), train)
    assert results[0] == results[1]
    assert results[0][0] is None
    assert steps_in(tmp_path)[0] == 39
    assert len(steps_in(tmp_path)) == 2
    assert Path(results[0][-1] or "").name.startswith("step-000000000039.")


def test_checkpoint_that_one_rank_asks_for_is_written_by_all(tmp_path: Path) -> None:
    def train(group: gw.Group) -> None:
        trainer = Trainer(group, tmp_path)

        def ask(step: int) -> None:
            if step == 2 and group.rank == 1:
                trainer.run.checkpoint()
            if step == 6:
                raise KeyboardInterrupt  # so that no checkpoint of the last step follows

        def complete_before_6(step: int) -> None:
            if step in (3, 4, 5) and group.rank == 0:
                assert eventually(lambda: not any(thread.name == WRITER for thread in threading.enumerate()))
            ask(step)

        with pytest.raises(KeyboardInterrupt):
            trainer.train(9, complete_before_6)

    run_ranks(gw.local_group(2), train)
    assert steps_in(tmp_path) == [2]


def test_checkpoint_without_a_folder_raises_config_error() -> None:
    with gw.init() as group:
        run = gw.Elastic({"w": np.zeros(1)}, group, 1)
        assert run.last_checkpoint is None
        with pytest.raises(gw.ConfigError, match="this run has no folder for checkpoints"):
            run.checkpoint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_every": 5}, "needs a folder"),
        ({"checkpoint": "c", "checkpoint_every": 0}, "checkpoint_every is 0: it must be at least 1"),
        ({"checkpoint": "c", "checkpoint_every": 1.5}, "checkpoint_every is 1.5: it must be a whole number"),
        ({"checkpoint": "c", "keep": 0}, "at least 1 checkpoint"),
        ({"checkpoint": 7}, "checkpoint is 7: it must be the path of a folder"),
    ],
)
def test_elastic_with_wrong_settings_of_checkpoints_raises_config_error(options: Any, message: str) -> None:
    with gw.init(), pytest.raises(gw.ConfigError, match=message):
        gw.elastic({"w": np.zeros(1)}, **options)


def test_elastic_with_other_settings_than_rank_0_raises_config_error_on_all_ranks(tmp_path: Path) -> None:
    def train(group: gw.Group) -> str:
        with pytest.raises(gw.ConfigError) as caught:
            Trainer(group, tmp_path, 2 + group.rank).train(3)
        return str(caught.value)

    first, second = run_ranks(gw.local_group(2), train)
    assert first == second
    assert "every 3" in first
    assert "Pass the same checkpoint, checkpoint_every and keep" in first


# -- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked_at", [0, 3])
def test_request_stop_on_one_rank_lets_all_leave_after_the_same_step_with_a_checkpoint(
    asked_at: int, tmp_path: Path
) -> None:
    def train(group: gw.Group) -> tuple[list[int], bool]:
        trainer = Trainer(group, tmp_path / "c")

        def ask(step: int) -> None:
            assert trainer.run.stopping is False
            if step == asked_at and group.rank == 2:
                trainer.run.request_stop()

        trainer.train(50, ask)
        return trainer.steps, trainer.run.stopping

    assert run_ranks(gw.local_group(3), train) == [(list(range(asked_at + 1)), True)] * 3
    assert steps_in(tmp_path / "c") == [asked_at]
    resumed = trained(2, 6, tmp_path / "c")
    assert resumed[0].steps == list(range(asked_at + 1, 6))
    assert resumed[0].digest() == digest_without_interruption(6, tmp_path)


def test_request_stop_before_the_first_step_ends_the_run_without_a_checkpoint(tmp_path: Path) -> None:
    def train(group: gw.Group) -> list[int]:
        trainer = Trainer(group, tmp_path)
        if group.rank == 1:
            trainer.run.request_stop()
        return trainer.train(5).steps

    assert run_ranks(gw.local_group(2), train) == [[], []]
    assert steps_in(tmp_path) == []


def test_request_stop_while_the_run_waits_for_members_ends_it(tmp_path: Path) -> None:
    def train(group: gw.Group) -> list[int]:
        state = {"w": np.zeros(1)}
        run = gw.Elastic(state, group, 3)
        if group.rank == 1:
            run.request_stop()
        return [step.index for step in run.steps(5)]

    assert run_ranks(gw.local_group(2), train) == [[], []]


def test_request_stop_is_known_to_the_ranks_that_remain_after_a_loss(tmp_path: Path) -> None:
    def train(group: gw.Group) -> list[int]:
        trainer = Trainer(group, tmp_path)

        def lose(step: int) -> None:
            if step == 2 and group.rank == 1:
                trainer.run.request_stop()
            if step == 2 and group.rank == 2:
                raise Left

        try:
            return trainer.train(50, lose).steps
        except Left:
            trainer.run.close()
            return []

    results = run_ranks(gw.local_group(3), train)
    assert results[0] == results[1] == [0, 1, 2]  # the interrupted step is not repeated: the stop is agreed first
    assert steps_in(tmp_path) == [1]


# -- losses and joins -------------------------------------------------------------------------------------------------


class SlowDisk:
    """Lets the threads that write wait at their first array until the test opens the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.waiting = threading.Semaphore(0)

        def wait(descriptor: int, data: Any) -> None:
            if not self.opened.is_set():
                self.waiting.release()
                assert self.opened.wait(60)
            write_all(descriptor, data)

        monkeypatch.setattr(tensor_file, "write_all", wait)


@pytest.fixture(name="slow_disk")
def slow_disk_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.opened.set()


@pytest.mark.parametrize("victim", [0, 2])
def test_checkpoint_that_a_lost_rank_cuts_short_is_written_anew(
    victim: int, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    def train(group: gw.Group) -> Trainer | None:
        trainer, mine = Trainer(group, tmp_path / "c", 4), group.rank

        def lose(step: int) -> None:
            if step == 5 and mine == victim:
                raise Left
            if step == 6:
                slow_disk.opened.set()

        try:
            return trainer.train(9, lose)
        except Left:
            trainer.run.close()
            return None

    results = [result for result in run_ranks(gw.local_group(3), train) if result is not None]
    assert {rank.digest() for rank in results} == {digest_without_interruption(9, tmp_path)}
    newest = CheckpointFolder(tmp_path / "c").find()[0]
    assert (newest.step, newest.fence.generation, newest.is_complete) == (8, 2, True)
    assert newest.manifest.head.size == 2


def test_joiner_takes_part_in_the_next_checkpoint(tmp_path: Path) -> None:
    def live(group: gw.Group) -> int:
        trainer = Trainer(group, tmp_path, 3)

        def admit(step: int) -> None:
            if step == 3 and trainer.run.group.generation == 1:
                joiner.let_in()

        trainer.train(8, admit)
        return trainer.run.group.size

    joiner = Joiner(live)
    assert joiner.run(live) == ([3, 3], 3)
    newest = CheckpointFolder(tmp_path).complete()[0]
    assert (newest.step, newest.manifest.head.size) == (7, 3)
    assert newest.verify() == []


def test_state_lost_names_the_last_complete_checkpoint(tmp_path: Path) -> None:
    def train(group: gw.Group) -> tuple[str, str | None] | None:
        trainer = Trainer(group, tmp_path, 2)

        def spoil(step: int) -> None:
            if trainer.run.last_checkpoint is not None:  # from the same vote on, all ranks know it
                trainer.state["w"] += 1  # on every rank, so that no intact copy is left
                trainer.run.group.barrier()
                if group.rank == 1:
                    raise Left

        try:
            trainer.train(10**6, spoil)
        except Left:
            trainer.run.close()
            return None
        except gw.StateLost as lost:
            trainer.run.close()
            return str(lost), lost.checkpoint
        raise AssertionError("no error")

    lost = run_ranks(gw.local_group(2), train)[0]
    assert lost is not None
    text, checkpoint = lost
    assert checkpoint == str(CheckpointFolder(tmp_path).complete()[0].path)
    assert f"Start the job again: it continues from the last complete checkpoint, {checkpoint}" in text


# -- disks ------------------------------------------------------------------------------------------------------------


def test_checkpoints_on_a_full_disk_are_reported_on_all_ranks_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = threading.Event()
    full.set()

    def write_if_not_full(descriptor: int, data: Any) -> None:
        if full.is_set() and "rank-1." in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(descriptor, data)

    monkeypatch.setattr(tensor_file, "write_all", write_if_not_full)
    folder = tmp_path / "c"
    with caplog.at_level(logging.WARNING):
        first = trained(2, 5, folder)
    assert {rank.digest() for rank in first} == {digest_without_interruption(5, tmp_path)}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert len(set(warnings)) == 1
    assert "rank 1" in warnings[0]
    assert "could not write the checkpoint of step 4: cannot write" in warnings[0]
    assert warnings[0].endswith("rank-1.safetensors: No space left on device. Training continues")
    assert eventually(lambda: os.listdir(folder) == ["claims"])  # the parts that were written free the disk again
    full.clear()
    assert {rank.digest() for rank in trained(2, 5, folder)} == {first[0].digest()}
    assert steps_in(folder) == [4]


def test_checkpoints_in_a_folder_that_cannot_be_made_are_reported_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ranks = trained(2, 4, Path("/proc/folder"))  # root may write to any folder that is not one of the kernel's
    assert {rank.digest() for rank in ranks} == {digest_without_interruption(4, tmp_path)}
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("no checkpoint can be written: cannot claim /proc/folder: ")
    assert len(texts) == 3
    assert all("could not write the checkpoint of step 3: cannot " in text for text in texts[1:])


def test_checkpoint_folder_that_is_a_file_raises_checkpoint_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def train(group: gw.Group) -> None:
        with pytest.raises(CheckpointError, match=r"cannot read .*file: Not a directory"):
            Trainer(group, tmp_path / "file").train(2)

    run_ranks(gw.local_group(2), train)


@pytest.mark.parametrize("exists", [False, True])
def test_checkpoints_in_folders_that_hosts_do_not_share_are_reported_and_leave_no_files(
    exists: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if exists:
        (tmp_path / "1").mkdir()

    def train(group: gw.Group) -> None:
        folder = CheckpointFolder(tmp_path / str(group.rank))
        run = gw.Elastic({"w": np.zeros(9), "v": np.zeros(7)}, group, 1, saving=Saving(folder, "the same", 2))
        for step in run.steps(5):
            with step:
                pass

    with caplog.at_level(logging.WARNING):
        run_ranks(gw.local_group(2), train)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith(
        f"rank {int(not exists)} (a thread of this process) could not write the checkpoint of step 1"
    )
    assert all(text.endswith(": do all hosts share this folder?. Training continues") for text in texts)
    assert eventually(lambda: os.listdir(tmp_path / "0") == ["claims"])
    assert not exists or os.listdir(tmp_path / "1") == []


def test_checkpoint_on_a_slow_disk_is_delayed_and_reported_once_per_rank(
    tmp_path: Path, slow_disk: SlowDisk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_saver, "SLOW_SECONDS", 0.0)

    def train(group: gw.Group) -> None:
        def open_the_disk(step: int) -> None:
            if step == 10:
                slow_disk.opened.set()

        Trainer(group, tmp_path, 2).train(13, open_the_disk)

    with caplog.at_level(logging.WARNING):
        run_ranks(gw.local_group(2), train)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "the checkpoint of step 3 is delayed: that of step 1 is still being written after" in texts[0]
    assert steps_in(tmp_path)[0] == 12


def test_checkpoint_of_a_later_format_is_an_error_and_no_older_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(1, 3, tmp_path)
    with monkeypatch.context() as later:
        later.setattr("gradwire.training.checkpoints.manifest.FORMAT", 2)
        (tmp_path / "claims").rename(tmp_path / "moved")  # the older format would stop this run too
        older = [path.rename(tmp_path / f"hidden-{path.name}") for path in tmp_path.glob("step-*")]
        trained(1, 5, tmp_path)
    for path in older:
        path.rename(tmp_path / path.name.removeprefix("hidden-"))
    with pytest.raises(CheckpointError, match=r"cannot continue from .*step-000000000004.*it has format 2"):
        trained(1, 7, tmp_path)


def test_checkpoint_that_is_damaged_is_reported_and_an_older_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "c"
    trained(2, 3, folder)
    trained(2, 6, folder)
    caplog.clear()
    newest = CheckpointFolder(folder).complete()[0]
    damaged = newest.path / "rank-1.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        resumed = trained(2, 8, folder)
    assert resumed[0].steps == [3, 4, 5, 6, 7]
    assert resumed[0].digest() == digest_without_interruption(8, tmp_path)
    assert f"the checkpoint {newest.path} is damaged and is not used" in caplog.records[0].getMessage()


def test_checkpoint_of_another_program_raises_checkpoint_error_on_all_ranks(tmp_path: Path) -> None:
    trained(2, 3, tmp_path)

    def train(group: gw.Group) -> str:
        run = gw.Elastic({"w": np.zeros(6), "b": np.zeros((2, 3), np.float32), "epoch": 0}, group, 1, saving=saving)
        with pytest.raises(CheckpointError) as caught:
            next(run.steps(5))
        return str(caught.value)

    saving = Saving.of(tmp_path, None, 3)
    first, second = run_ranks(gw.local_group(2), train)
    assert first == second
    assert "does not fit this program's state: w is float64[5] there and float64[6] in this program" in first


def test_checkpoint_of_two_iterations_of_one_run_is_written_at_the_end_of_each(tmp_path: Path) -> None:
    def train(group: gw.Group) -> None:
        trainer = Trainer(group, tmp_path)
        for total in (3, 3, 7):
            trainer.train(total)
            assert steps_in(tmp_path)[0] == total - 1

    run_ranks(gw.local_group(2), train)


# -- sharded state ----------------------------------------------------------------------------------------------------


class Momentum:
    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights
        self.velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}

    def step(self, gradients: dict[str, Any]) -> None:
        for name, gradient in gradients.items():
            self.velocity[name] *= 0.9
            self.velocity[name] += gradient
            self.weights[name] -= 0.1 * self.velocity[name]

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.velocity = state["velocity"]


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 2), (1, 3)])
def test_sharded_optimizer_continues_from_the_checkpoint_of_any_number_of_ranks(
    first: int, second: int, tmp_path: Path
) -> None:
    def train(size: int, total: int, folder: Path) -> dict[str, bytes]:
        def run(group: gw.Group) -> dict[str, bytes]:
            weights = {"a": np.ones(9), "b": np.ones((2, 2)), "c": np.ones(1), "d": np.ones(4)}
            optimizer = ShardedOptimizer(group, weights, Momentum)
            saving = Saving.of(folder, None, 3)
            elastic = gw.Elastic({"weights": weights, "optimizer": optimizer}, group, 1, saving=saving)
            for step in elastic.steps(total):
                with step:
                    optimizer.step({name: np.cos(weight + step.index) for name, weight in weights.items()})
            return {name: weight.tobytes() for name, weight in weights.items()}

        with crew_of("local", gw.Topology.single(size)) as crew:
            results = crew.run(run)
        assert all(result == results[0] for result in results)
        return results[0]

    train(first, 4, tmp_path / "c")
    assert train(second, 9, tmp_path / "c") == train(1, 9, tmp_path / "undisturbed")


def test_checkpoint_that_cannot_be_read_now_raises_checkpoint_error_instead_of_using_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(2, 3, tmp_path)
    trained(2, 6, tmp_path)

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("gradwire.training.checkpoints.checkpoint.read_header", failing)

    def train(group: gw.Group) -> None:
        with pytest.raises(CheckpointError, match=r"cannot read .*step-000000000005.*: Input/output error"):
            Trainer(group, tmp_path).train(8)

    run_ranks(gw.local_group(2), train)


def test_checkpoint_after_its_folder_was_removed_is_written_again(tmp_path: Path) -> None:
    def train(group: gw.Group) -> None:
        trainer = Trainer(group, tmp_path / "c", 2)

        def remove(step: int) -> None:
            if step == 5 and group.rank == 0:
                assert eventually(lambda: not any(thread.name.startswith(WRITER) for thread in threading.enumerate()))
                shutil.rmtree(tmp_path / "c")
            trainer.run.group.barrier()

        trainer.train(20, remove)

    run_ranks(gw.local_group(2), train)
    assert steps_in(tmp_path / "c")[0] == 19
