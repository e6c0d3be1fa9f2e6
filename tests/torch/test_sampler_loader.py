"""Sampler as the sampler of torch's DataLoader: its position follows the batches that the loop has received."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import gradwire as gw
from gradwire.errors import ConfigError
from gradwire.training.companions import Companion, Plain

SAMPLES, BATCH = 23, 3
DATA = TensorDataset(torch.arange(SAMPLES))
KINDS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "one worker": {"num_workers": 1, "prefetch_factor": 7},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "drop_last": {"drop_last": True},
    "drop_last with workers": {"drop_last": True, "num_workers": 2},
    "single samples": {"batch_size": None},
    "single samples with workers": {"batch_size": None, "num_workers": 2},
}


@dataclass
class Ranks:
    rank: int = 0
    size: int = 2


@dataclass
class FakeRun:
    """One rank of a run, of which a test decides when a step ends."""

    group: Ranks = field(default_factory=Ranks)
    resumes_from: Mapping[str, Plain] | None = None
    companions: list[Companion] = field(default_factory=list)

    def attach(self, companion: Companion) -> None:
        self.companions.append(companion)

    def begin(self) -> None:
        if self.resumes_from is not None:
            self.companions[0].load_state_dict(self.resumes_from)
            self.resumes_from = None

    def end_step(self) -> dict[str, Plain]:
        self.companions[0].step_ended()
        return dict(self.companions[0].state_dict())

    def fail_step(self, ranks: Ranks | None = None) -> None:
        self.companions[0].step_failed()
        self.group = ranks or self.group


def loader_of(resumes_from: Mapping[str, Plain] | None = None, **options: Any) -> tuple[Any, gw.Sampler, FakeRun]:
    run = FakeRun(resumes_from=resumes_from)
    sampler = gw.Sampler(SAMPLES, run=run, seed=4)
    options = {"batch_size": BATCH} | options
    if options.pop("own_batch_sampler", False):
        batches = BatchSampler(sampler, options.pop("batch_size"), drop_last=True)
        return DataLoader(DATA, batch_sampler=batches, **options), sampler, run
    return DataLoader(DATA, sampler=sampler, **options), sampler, run


def values(batch: Any) -> list[int]:
    return batch[0].reshape(-1).tolist()  # type: ignore[no-any-return]


def expected_batches(epochs: int, options: Mapping[str, Any]) -> list[list[int]]:
    """Return the batches of rank 0 of 2, in which each rank has 11 of the 23 samples of an epoch."""
    size = options.get("batch_size", BATCH) or 1
    found = []
    for epoch in range(epochs):
        share = gw.Sampler(SAMPLES, rank=0, size=2, seed=4).epoch(epoch).tolist()[: SAMPLES // 2]
        found += [share[start : start + size] for start in range(0, len(share), size)]
    whole = options.get("drop_last") or options.get("own_batch_sampler")
    return [batch for batch in found if len(batch) == size or not whole]


CASES = [
    pytest.param(options, id=name)
    for name, options in (KINDS | {"own batch sampler": {"own_batch_sampler": True}}).items()
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_loader_resumed_after_any_batch_yields_the_batches_of_an_undisturbed_run(
    options: dict[str, Any], stop: int
) -> None:
    expected = expected_batches(2, options)
    loader, sampler, run = loader_of(**options)
    seen, state = [], None
    batches = iter(loader)
    for _ in range(stop):
        seen.append(values(next(batches)))
        state = run.end_step()
    del batches

    loader, sampler, run = loader_of(state, **options)
    for epoch in range(sampler.current_epoch, 2):
        sampler.set_epoch(epoch)
        for batch in loader:
            seen.append(values(batch))
            run.end_step()
    assert seen == expected


@pytest.mark.parametrize("options", CASES)
def test_loader_followed_through_failed_steps_repeats_their_batches(options: dict[str, Any]) -> None:
    expected = expected_batches(3, options)
    loader, sampler, run = loader_of(**options)
    batches = sampler.follow(loader)
    seen: list[list[int]] = []
    failed: set[int] = set()
    while len(seen) < len(expected):
        batch = values(next(batches))
        if len(seen) % 3 == 0 and len(seen) not in failed:
            failed.add(len(seen))
            run.fail_step()
        else:
            seen.append(batch)
            run.end_step()
    batches.close()  # type: ignore[attr-defined]
    assert seen == expected


@pytest.mark.parametrize("options", CASES)
def test_loader_bare_loop_begins_the_next_epoch_when_the_loader_has_ended(options: dict[str, Any]) -> None:
    loader, _, run = loader_of(**options)
    seen = []
    for _ in range(3):
        for batch in loader:
            seen.append(values(batch))
            run.end_step()
    assert seen == expected_batches(3, options)


@pytest.mark.parametrize("options", [KINDS["no workers"], KINDS["workers"]], ids=["no workers", "workers"])
def test_loader_new_iterator_for_each_step_continues_at_the_position(options: dict[str, Any]) -> None:
    loader, _, run = loader_of(**options)
    seen = []
    for _ in range(3):
        seen.append(values(next(iter(loader))))
        run.end_step()
    assert seen == expected_batches(1, options)[:3]


@pytest.mark.parametrize("options", [KINDS["workers"], KINDS["persistent workers"]], ids=["workers", "persistent"])
def test_loader_that_a_loop_leaves_early_continues_in_the_same_epoch(options: dict[str, Any]) -> None:
    """The workers have then taken all indices of the epoch."""
    loader, _, run = loader_of(**options)
    seen = []
    for most in (3, 9):
        for batch in loader:
            seen.append(values(batch))
            run.end_step()
            if len(seen) == most:
                break
    assert seen == expected_batches(1, options)


def test_loader_step_over_two_epochs_counts_both() -> None:
    loader, sampler, run = loader_of(num_workers=2)
    batches = sampler.follow(loader)
    for _ in range(3):
        next(batches)
    run.end_step()
    assert [len(values(next(batches))) for _ in range(2)] == [2, 3]
    state = run.end_step()
    batches.close()  # type: ignore[attr-defined]
    assert (state["epoch"], state["position"]) == (1, 6)


def test_loader_without_workers_adapts_to_another_number_of_ranks() -> None:
    loader, _, run = loader_of()
    batches = iter(loader)
    next(batches)
    run.end_step()
    next(batches)
    run.fail_step(Ranks(0, 3))
    order = gw.Sampler(SAMPLES, rank=0, size=1, seed=4).epoch(0).tolist()
    assert values(next(batches)) == order[6:15:3]
    assert run.end_step()["position"] == 15


OUTDATED = r"now rank 1 of 3, before 0 of 2.*sampler\.follow\(loader\)"


def test_loader_with_workers_is_refused_after_the_number_of_ranks_has_changed() -> None:
    loader, _, run = loader_of(num_workers=2, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    run.end_step()
    run.fail_step(Ranks(1, 3))
    with pytest.raises(ConfigError, match=OUTDATED):
        next(batches)


def test_loader_with_workers_that_have_taken_all_indices_is_refused_at_the_end_of_the_step() -> None:
    loader, _, run = loader_of(num_workers=2)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
        run.end_step()
    next(batches)
    run.fail_step(Ranks(1, 3))
    run.end_step()  # a step without a batch
    next(batches)
    with pytest.raises(ConfigError, match=OUTDATED):
        run.end_step()


@pytest.mark.parametrize(
    "options", [KINDS["drop_last"], KINDS["drop_last with workers"]], ids=["no workers", "workers"]
)
def test_loader_with_drop_last_is_in_the_next_epoch_after_the_last_whole_batch(options: dict[str, Any]) -> None:
    loader, _, run = loader_of(**options)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        state = run.end_step()
    assert (state["epoch"], state["position"]) == (1, 0)


def test_loader_with_unordered_batches_is_refused() -> None:
    loader, _, _ = loader_of(num_workers=2, in_order=False)
    with pytest.raises(ConfigError, match="needs in_order=True"):
        iter(loader)


class Ahead(BatchSampler):  # type: ignore[misc]
    """Takes all indices before it yields the first batch."""

    def __iter__(self) -> Any:
        indices = list(self.sampler)
        return iter([indices[start : start + BATCH] for start in range(0, len(indices), BATCH)])


class AheadLater(Ahead):
    def __iter__(self) -> Any:
        yield from super().__iter__()


@pytest.mark.parametrize("kind", [Ahead, AheadLater])
def test_loader_whose_batch_sampler_takes_samples_ahead_is_refused(kind: type[Ahead]) -> None:
    run = FakeRun()
    sampler = gw.Sampler(SAMPLES, run=run)
    loader = DataLoader(DATA, batch_sampler=kind(sampler, BATCH, drop_last=False))
    with pytest.raises(ConfigError, match="has taken samples of several batches"):
        for _ in loader:
            run.end_step()


def test_loader_of_a_sampler_without_run_iterates_over_the_chosen_epoch() -> None:
    samplers = [gw.Sampler(SAMPLES, rank=rank, size=2, seed=4) for rank in range(2)]
    loaders = [
        DataLoader(DATA, batch_size=BATCH, sampler=sampler, num_workers=rank) for rank, sampler in enumerate(samplers)
    ]
    for epoch in (0, 2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [[value for batch in loader for value in values(batch)] for loader in loaders]
        assert shares == [sampler.epoch(epoch).tolist() for sampler in samplers]
        assert sorted(shares[0] + shares[1]) == list(range(SAMPLES))
        assert [len(loader) for loader in loaders] == [4, 4]
