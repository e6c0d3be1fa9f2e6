"""A torch job with a DataLoader is stopped or killed in the middle of an epoch, and continues from its checkpoint.

Its batches and its final weights are those of a job that was not interrupted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire as gw
from support.processes import Here, StartJob, Zygote, start_job
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import eventually

SAMPLES, BATCH, EPOCHS = 61, 4, 3
PER_EPOCH = 8  # steps of two ranks: 30 samples each, in batches of 4
TOTAL = EPOCHS * PER_EPOCH
STOPPED = PER_EPOCH + 3  # a step in the middle of epoch 1
ENDS = {"SIGUSR2": 128 + signal.SIGUSR2, "SIGTERM": 128 + signal.SIGTERM, "SIGKILL": -signal.SIGKILL}


def train(folder: str, loop: str, before_step: Callable[[Any, int], None]) -> dict[str, Any]:
    """Train in this process as one rank. Return the samples of each committed step, and the final state."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 6, generator=random), torch.arange(SAMPLES))
    torch.manual_seed(int(os.environ["GRADWIRE_RANK"]))  # each rank draws other weights
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run = gw.elastic(state, checkpoint=folder, checkpoint_every=4)
    ddp = gw.torch.DistributedDataParallel(model, run)
    sampler = gw.Sampler(SAMPLES, run=run, seed=9)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=2)
    samples: dict[int, list[int]] = {}
    for batch, step in LOOPS[loop](run, sampler, loader):
        with step:
            x, index = batch()
            before_step(run, step.index)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x)[:, 0], index / SAMPLES).backward()
            optimizer.step()
            scheduler.step()
        samples[step.index] = index.tolist()
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"samples": samples, "weights": weights, "lr": scheduler.get_last_lr()}


def over_epochs(run: gw.Elastic, sampler: gw.Sampler, loader: Any) -> Iterator[Any]:
    steps = run.steps(TOTAL)
    for epoch in range(sampler.current_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch, step in zip(loader, steps, strict=False):
            yield lambda batch=batch: batch, step


def over_steps(run: gw.Elastic, sampler: gw.Sampler, loader: Any) -> Iterator[Any]:
    """Take each batch inside the step. The loader begins before the run has loaded its checkpoint."""
    batches, epoch = iter(loader), 0

    def next_batch() -> Any:
        nonlocal batches, epoch
        try:
            return next(batches)
        except StopIteration:
            epoch += 1  # in a resumed run this lags behind
            sampler.set_epoch(epoch)
            batches = iter(loader)
            return next(batches)

    for step in run.steps(TOTAL):
        yield next_batch, step


def over_steps_following(run: gw.Elastic, sampler: gw.Sampler, loader: Any) -> Iterator[Any]:
    batches = sampler.follow(loader)
    for step in run.steps(TOTAL):
        yield lambda: next(batches), step


LOOPS = {"over epochs": over_epochs, "over steps": over_steps, "follow": over_steps_following}


def trains(here: Here, folder: str, loop: str, at: int | None = None, kind: str = "") -> None:
    seen: list[int] = []

    def interrupt(run: Any, step: int) -> None:
        seen.append(step)
        if step == at and kind == "SIGKILL":
            assert eventually(lambda: run.last_checkpoint is not None or bool(list(Path(folder).glob("*/manifest*"))))
        if step == at and (run.group.rank == 1 or kind == "SIGKILL"):
            os.kill(os.getpid(), getattr(signal, kind))

    try:
        found = train(folder, loop, interrupt)
    finally:
        if at is not None:
            here.send(began=seen)
    here.send(**found)


def run_to_the_end(job: StartJob, folder: Path, loop: str = "over epochs") -> list[dict[str, Any]]:
    with job(trains, 2, str(folder), loop) as ranks:
        found = [rank.receive() for rank in ranks]
        assert [rank.ended() for rank in ranks] == [0, 0]
    return found


@pytest.fixture(scope="module", name="undisturbed")
def undisturbed_fixture(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    def job(body: Callable[..., None], size: int, *args: Any, **options: Any) -> Any:
        return start_job(zygote, body, size, *args, **options)

    found = run_to_the_end(job, tmp_path_factory.mktemp("undisturbed"))
    assert [len(rank["samples"]) for rank in found] == [TOTAL] * 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "kind"), [("over steps", "SIGUSR2"), ("over epochs", "SIGTERM"), ("follow", "SIGUSR2")]
)
def test_torch_job_stopped_in_an_epoch_continues_with_the_same_batches_and_bits(
    loop: str, kind: str, job: StartJob, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    with job(trains, 2, str(tmp_path), loop, STOPPED, kind) as ranks:
        began = [rank.receive()["began"] for rank in ranks]
        assert [rank.ended() for rank in ranks] == [ENDS[kind]] * 2
    assert began[0] == began[1] == list(range(len(began[0])))
    assert STOPPED < len(began[0]) <= STOPPED + 3

    resumed = run_to_the_end(job, tmp_path, loop)
    for one, other in zip(resumed, undisturbed, strict=True):
        assert list(one["samples"]) == list(other["samples"])[len(began[0]) :]
        assert one["samples"].items() <= other["samples"].items()
        assert (one["weights"], one["lr"]) == (other["weights"], other["lr"])


@pytest.mark.slow
def test_torch_job_killed_in_an_epoch_continues_with_the_same_batches_and_bits(
    job: StartJob, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    with job(trains, 2, str(tmp_path), "over epochs", STOPPED, "SIGKILL") as ranks:
        assert [rank.ended() for rank in ranks] == [ENDS["SIGKILL"]] * 2

    resumed = run_to_the_end(job, tmp_path)
    assert 4 <= min(map(int, resumed[0]["samples"])) <= STOPPED
    for one, other in zip(resumed, undisturbed, strict=True):
        assert one["samples"].items() <= other["samples"].items()
        assert (one["weights"], one["lr"]) == (other["weights"], other["lr"])
