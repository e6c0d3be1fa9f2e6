"""Sampler with `run=`: the position of a run in the data, over failed steps, other numbers of ranks, and epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.errors import ConfigError, InvalidSize
from gradwire.training.companions import Companion, Plain
from gradwire.training.elastic import Saving
from support.elastic_ranks import Joiner, Left
from support.ranks import run_ranks


@dataclass
class Ranks:
    rank: int
    size: int


@dataclass
class FakeRun:
    """One rank of a run, of which a test decides when a step ends and which ranks there are."""

    group: Ranks
    resumes_from: Mapping[str, Plain] | None = None
    companions: list[Companion] = field(default_factory=list)

    def attach(self, companion: Companion) -> None:
        self.companions.append(companion)

    def begin(self) -> None:
        if self.resumes_from is not None:
            self.companions[0].load_state_dict(self.resumes_from)
            self.resumes_from = None

    @property
    def state(self) -> dict[str, Plain]:
        return dict(self.companions[0].state_dict())

    @property
    def place(self) -> tuple[Plain, Plain]:
        return self.state["epoch"], self.state["position"]

    def end_step(self) -> None:
        self.companions[0].step_ended()

    def fail_step(self, ranks: Ranks | None = None) -> None:
        self.companions[0].step_failed()
        self.group = ranks or self.group


def sampler_of(
    length: int, rank: int = 0, size: int = 1, resumes_from: Mapping[str, Plain] | None = None, **options: Any
) -> tuple[gw.Sampler, FakeRun]:
    run = FakeRun(Ranks(rank, size), resumes_from)
    return gw.Sampler(length, run=run, **{"shuffle": False} | options), run


class BatchLoader:
    """A loader without workers: it takes the indices of a batch when the batch is wanted."""

    def __init__(self, sampler: gw.Sampler, batch_size: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(islice(indices, self.batch_size)):
            yield batch


@dataclass
class Rank:
    run: FakeRun
    sampler: gw.Sampler
    batches: Iterator[list[int]]


@st.composite
def generations(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, bool]]]:
    """Draw a number of samples, a batch size, and per generation: the ranks, the steps, and how it ends.

    It ends with a checkpoint from which new processes continue, or with a failed step after which processes remain.
    """
    length = draw(st.integers(8, 60))
    sizes, steps = st.integers(1, 8), st.integers(0, 12)
    return length, draw(st.integers(1, 5)), draw(st.lists(st.tuples(sizes, steps, st.booleans()), min_size=1))


@given(generations(), st.integers(0, 99))
def test_sampler_run_uses_each_sample_of_an_epoch_at_most_once_and_leaves_out_fewer_than_ranks(
    job: tuple[int, int, list[tuple[int, int, bool]]], seed: int
) -> None:
    length, batch_size, plan = job
    used: dict[int, list[int]] = {}
    state: Mapping[str, Plain] | None = None
    ranks: list[Rank] = []
    for size, steps, restarts in plan:
        if restarts or not ranks:
            ranks = []  # new processes
        for number in range(size):
            if number < len(ranks):
                ranks[number].run.group = Ranks(number, size)
            else:
                sampler, run = sampler_of(length, number, size, state, seed=seed, shuffle=True)
                run.begin()
                ranks.append(Rank(run, sampler, sampler.follow(BatchLoader(sampler, batch_size))))
        del ranks[size:]
        for _ in range(steps):
            epochs = {rank.sampler.current_epoch for rank in ranks}
            batches = [next(rank.batches) for rank in ranks]
            for rank in ranks:
                rank.run.end_step()
            (epoch,) = epochs
            used.setdefault(epoch, []).extend(index for batch in batches for index in batch)
            assert len({len(batch) for batch in batches}) == 1
        (state,) = unique(rank.run.state for rank in ranks)
        for rank in ranks:
            next(rank.batches)
            rank.run.fail_step()
    for epoch, samples in used.items():
        assert len(set(samples)) == len(samples)
        if epoch < max(used):
            assert length - len(samples) < max(size for size, *_ in plan)


def unique(values: Iterable[dict[str, Plain]]) -> list[dict[str, Plain]]:
    found: list[dict[str, Plain]] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def test_sampler_run_continues_at_the_position_with_another_number_of_ranks() -> None:
    first = [sampler_of(20, rank, 2) for rank in range(2)]
    for sampler, run in first:
        assert list(islice(sampler, 3)) == [run.group.rank, run.group.rank + 2, run.group.rank + 4]
        run.end_step()
    (state,) = unique(run.state for _, run in first)
    assert (state["epoch"], state["position"]) == (0, 6)
    resumed = [sampler_of(20, rank, 4, state) for rank in range(4)]
    # As in `batch`, the sample at position p belongs to rank p mod size.
    assert [list(sampler) for sampler, _ in resumed] == [[8, 12, 16], [9, 13, 17], [6, 10, 14], [7, 11, 15]]


def test_sampler_run_gives_each_rank_equally_many_samples() -> None:
    pairs = [sampler_of(11, rank, 3) for rank in range(3)]
    assert [list(sampler) for sampler, _ in pairs] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert {len(sampler) for sampler, _ in pairs} == {3}
    for _, run in pairs:
        run.end_step()
    assert [run.place for _, run in pairs] == [(1, 0)] * 3


def test_sampler_run_with_a_seed_has_the_order_of_the_epoch_without_a_run() -> None:
    sampler, _ = sampler_of(12, 1, 3, shuffle=True, seed=5)
    alone = gw.Sampler(12, rank=1, size=3, seed=5)
    sampler.set_epoch(4)
    assert list(sampler) == alone.epoch(4).tolist()
    assert sampler.batch(3, 6).tolist() == alone.batch(3, 6).tolist()


def test_sampler_run_samples_count_at_the_end_of_the_step_only() -> None:
    sampler, run = sampler_of(10)
    indices = iter(sampler)
    assert [next(indices), next(indices)] == [0, 1]
    assert run.place == (0, 0)
    run.end_step()
    assert run.place == (0, 2)
    run.end_step()  # a step without samples
    assert run.place == (0, 2)


def test_sampler_run_failed_step_repeats_its_samples() -> None:
    sampler, run = sampler_of(10, 0, 2)
    indices = iter(sampler)
    next(indices)
    run.end_step()
    assert next(indices) == 2
    run.fail_step()
    assert [next(indices), next(indices)] == [2, 4]
    run.fail_step(Ranks(0, 1))
    assert [next(indices), next(indices)] == [2, 3]
    run.end_step()
    assert run.place == (0, 4)


def test_sampler_run_repeats_the_last_step_of_an_epoch_that_failed() -> None:
    sampler, run = sampler_of(3)
    indices = iter(sampler)
    next(indices)
    run.end_step()
    assert [next(indices), next(indices), next(indices, None)] == [1, 2, None]
    run.fail_step()
    assert list(indices) == [1, 2]
    run.end_step()
    assert run.place == (1, 0)


def test_sampler_run_iterator_ends_if_another_rank_has_completed_the_last_step_of_its_epoch() -> None:
    sampler, run = sampler_of(4)
    indices = iter(sampler)
    next(indices)
    run.fail_step()
    run.companions[0].load_state_dict(run.state | {"epoch": 1, "position": 0})
    assert next(indices, None) is None
    assert list(sampler) == [0, 1, 2, 3]
    assert sampler.current_epoch == 1


def test_sampler_run_failed_step_over_two_epochs_is_refused_by_the_iterator_and_repeated_by_follow() -> None:
    sampler, run = sampler_of(3)
    one = iter(sampler)
    next(one)
    run.end_step()
    assert list(one) == [1, 2]
    other = iter(sampler)
    assert next(other) == 0
    run.fail_step()
    with pytest.raises(ConfigError, match=r"samples of epochs 0 and 1.*sampler\.follow"):
        next(other)

    sampler, run = sampler_of(3)
    batches = sampler.follow(sampler)
    next(batches)
    run.end_step()
    assert [next(batches) for _ in range(3)] == [1, 2, 0]
    run.fail_step()
    assert [next(batches) for _ in range(3)] == [1, 2, 0]
    run.end_step()
    assert run.place == (1, 1)


# -- epochs -----------------------------------------------------------------------------------------------------------


def use(sampler: gw.Sampler, run: FakeRun, most: int = 1000) -> list[int]:
    """Take one sample per step, to the end of the epoch or fewer. Return the samples, with the epoch in front."""
    found = []
    for index in sampler:
        run.end_step()
        found.append(index)
        if len(found) == most:
            break
    return found


def test_sampler_run_next_iterator_begins_the_next_epoch_without_set_epoch() -> None:
    sampler, run = sampler_of(5, shuffle=True)
    orders = [use(sampler, run) for _ in range(3)]
    assert orders == [gw.Sampler(5, rank=0, size=1).epoch(epoch).tolist() for epoch in range(3)]


def test_sampler_run_usual_loop_over_epochs_continues_in_the_middle() -> None:
    def train(resumes_from: Mapping[str, Plain] | None, epochs: Iterable[int], most: int) -> tuple[Any, list[Any]]:
        sampler, run = sampler_of(4, shuffle=True, resumes_from=resumes_from)
        seen: list[Any] = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            for index in sampler:
                if len(seen) == most:
                    return run.state, seen
                seen.append(index)
                run.end_step()
        return run.state, seen

    _, undisturbed = train(None, range(4), 99)
    assert len(undisturbed) == 16
    for most in range(17):
        state, before = train(None, range(4), most)
        sampler, _ = sampler_of(4, shuffle=True, resumes_from=state)
        begin = sampler.current_epoch
        assert before + train(state, range(begin, 4), 99)[1] == undisturbed
        # A loop that begins at 0 gets the same samples. Its number of steps limits it, not the number of epochs.
        assert before + train(state, range(4), 16 - most)[1] == undisturbed


def test_sampler_run_set_epoch_begins_a_later_epoch_and_keeps_the_position_in_the_current_one() -> None:
    sampler, run = sampler_of(6)
    use(sampler, run, 2)
    sampler.set_epoch(0)
    assert use(sampler, run, 1) == [2]
    sampler.set_epoch(3)
    assert run.place == (0, 3)  # a joining rank receives the state of the last step
    assert use(sampler, run, 1) == [0]
    assert run.place == (3, 1)
    sampler.set_epoch(1)
    assert use(sampler, run, 1) == [1]
    assert sampler.current_epoch == 3


def test_sampler_run_chosen_epoch_belongs_to_the_state_after_a_step_without_samples() -> None:
    sampler, run = sampler_of(6)
    sampler.set_epoch(3)
    assert run.place == (0, 0)
    run.end_step()
    assert run.place == (3, 0)


def test_sampler_run_that_was_only_read_begins_the_chosen_epoch_again() -> None:
    sampler, _ = sampler_of(6, shuffle=True)
    sampler.set_epoch(2)
    first = list(sampler)
    sampler.set_epoch(2)
    assert list(sampler) == first
    sampler.set_epoch(0)
    assert list(sampler) == gw.Sampler(6, rank=0, size=1).epoch(0).tolist()


def test_sampler_run_peek_before_training_does_not_use_a_sample() -> None:
    sampler, run = sampler_of(6)
    assert next(iter(sampler)) == 0
    assert use(sampler, run, 2) == [0, 1]


def test_sampler_run_epoch_that_was_chosen_before_the_checkpoint_is_loaded_gives_way() -> None:
    state = sampler_of(9)[1].state | {"epoch": 2, "position": 5}
    sampler, _ = sampler_of(9, resumes_from=state)
    sampler.set_epoch(0)
    assert list(sampler) == [5, 6, 7, 8]
    sampler, _ = sampler_of(9, resumes_from=state)
    sampler.set_epoch(3)
    assert list(sampler) == list(range(9))


# -- errors and arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"length": 8}, {"seed": 1}, {"shuffle": True}])
def test_sampler_run_state_of_another_sampler_is_refused(other: dict[str, Any]) -> None:
    state = sampler_of(**{"length": 9} | other)[1].state
    sampler, _ = sampler_of(9, resumes_from=state)
    with pytest.raises(ConfigError, match=r"another gw\.Sampler than before: this one has length=9, seed=0"):
        next(iter(sampler))


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"position": 10}, {"position": -1}])
def test_sampler_run_malformed_position_is_refused(wrong: dict[str, int]) -> None:
    run = sampler_of(9)[1]
    with pytest.raises(ConfigError, match="malformed position"):
        run.companions[0].load_state_dict(run.state | wrong)


def test_sampler_run_with_fewer_samples_than_ranks_is_refused_at_once_and_after_a_join() -> None:
    with pytest.raises(InvalidSize, match="2 samples are too few for 3 ranks"):
        sampler_of(2, 0, 3)
    sampler, run = sampler_of(2, 0, 2)
    run.group = Ranks(0, 3)
    with pytest.raises(InvalidSize, match="2 samples are too few for 3 ranks"):
        next(iter(sampler))


def test_sampler_run_together_with_rank_or_size_is_refused() -> None:
    arguments: list[dict[str, Any]] = [{"rank": 0}, {"size": 1}, {"rank": 0, "size": 1}]
    for both in arguments:
        with pytest.raises(ConfigError, match="always has the rank and size of the run"):
            gw.Sampler(9, run=FakeRun(Ranks(0, 1)), **both)


def test_sampler_without_arguments_has_the_ranks_of_the_process_group() -> None:
    with pytest.raises(ConfigError, match=r"no open group: call gw\.init\(\) before gw\.Sampler"):
        gw.Sampler(9)
    with gw.init():
        sampler = gw.Sampler(9)
        assert (sampler.rank, sampler.size) == (0, 1)
    halves: list[dict[str, Any]] = [{"rank": 0}, {"size": 1}]
    for one in halves:
        with pytest.raises(ConfigError, match="both rank and size"):
            gw.Sampler(9, **one)


def test_sampler_follow_loader_of_another_sampler_is_refused() -> None:
    sampler, _ = sampler_of(9)
    with pytest.raises(ConfigError, match="does not take its samples from this sampler"):
        next(sampler.follow([1, 2]))


def test_sampler_follow_loader_without_batches_is_refused() -> None:
    def whole_batches(sampler: gw.Sampler) -> Callable[[], Iterator[int]]:
        class Loader:
            def __iter__(self) -> Iterator[int]:
                return iter([] if len(list(sampler)) < 10 else [1])

        return Loader  # type: ignore[return-value]

    sampler, _ = sampler_of(9)
    with pytest.raises(ConfigError, match="yields no batch"):
        next(sampler.follow(whole_batches(sampler)()))
    alone = gw.Sampler(9, rank=0, size=1)
    with pytest.raises(ConfigError, match="yields no batch"):
        next(alone.follow(whole_batches(alone)()))


# -- in elastic runs --------------------------------------------------------------------------------------------------


class Trainer:
    """One rank's program. It records the samples of each committed step."""

    def __init__(self, group: gw.Group, folder: Path | None = None, **options: Any) -> None:
        saving = Saving.of(folder, None, 3) if folder is not None else None
        self.state = {"w": np.zeros(2)}
        self.run = gw.Elastic(self.state, group, 1, saving=saving)
        self.sampler = gw.Sampler(50, run=self.run, seed=3)
        self.used: dict[int, list[int]] = {}

    def train(self, total: int, in_step: Callable[[int], None] = lambda step: None) -> Trainer:
        batches = self.sampler.follow(BatchLoader(self.sampler, 4))
        for step in self.run.steps(total):
            with step:
                batch = next(batches)
                in_step(step.index)
                self.state["w"] += self.run.group.all_reduce(np.full(2, float(sum(batch))), op="sum")
            if step.committed:
                self.used[step.index] = batch
        return self


def together(trainers: list[Trainer]) -> dict[int, list[int]]:
    """Return the samples of all ranks, by step."""
    found: dict[int, list[int]] = {}
    for trainer in trainers:
        for step, batch in trainer.used.items():
            found.setdefault(step, []).extend(batch)
    return found


def test_sampler_elastic_run_continues_in_the_middle_of_an_epoch_from_a_checkpoint(tmp_path: Path) -> None:
    def train(folder: str, total: int, size: int = 2) -> list[Trainer]:
        return run_ranks(gw.local_group(size), lambda group: Trainer(group, tmp_path / folder).train(total))

    undisturbed = train("a", 11)
    stopped, resumed = train("b", 4), train("b", 11)
    assert [one.used | two.used for one, two in zip(stopped, resumed, strict=True)] == [one.used for one in undisturbed]
    assert {one.run.digest for one in resumed} == {one.run.digest for one in undisturbed}

    train("c", 4)
    used = together(stopped) | together(train("c", 6, size=3))
    samples = [index for step in sorted(used) for index in used[step]]
    assert set(samples) <= set(gw.Sampler(50, rank=0, size=1, seed=3).epoch(0).tolist())
    assert len(samples) == len(set(samples)) == 4 * 8 + 12 + 6


def test_sampler_elastic_lost_rank_the_others_repeat_its_step_with_their_new_shares() -> None:
    def train(group: gw.Group) -> Trainer | None:
        trainer = Trainer(group)

        def leave(step: int) -> None:
            if group.rank == 1 and step == 2:
                raise Left

        try:
            return trainer.train(4, leave)
        except Left:
            trainer.run.close()
            return None

    used = together([one for one in run_ranks(gw.local_group(3), train) if one is not None])
    order = gw.Sampler(50, rank=0, size=1, seed=3).epoch(0).tolist()
    assert sorted(used[2]) == sorted(order[24:32])
    assert sorted(used[3]) == sorted(order[32:40])


def test_sampler_elastic_joiner_continues_at_the_position_of_the_others() -> None:
    def live(group: gw.Group) -> Trainer:
        trainer = Trainer(group)
        return trainer.train(
            4, lambda step: joiner.let_in() if step == 1 and trainer.run.group.generation == 1 else None
        )

    joiner = Joiner(live)
    old, new = joiner.run(live)
    used = together([*old, new])
    order = gw.Sampler(50, rank=0, size=1, seed=3).epoch(0).tolist()
    assert [sorted(used[step]) for step in range(4)] == [
        sorted(order[start:end]) for start, end in ((0, 8), (8, 16), (16, 28), (28, 40))
    ]


def test_sampler_elastic_different_seeds_are_found_at_the_first_step() -> None:
    def train(group: gw.Group) -> str:
        run = gw.Elastic({"w": np.zeros(1)}, group, 1)
        gw.Sampler(50, run=run, seed=group.rank)
        try:
            for step in run.steps(2):
                with step:
                    pass
        except ConfigError as error:
            run.close()
            return str(error)
        return ""

    first, second = run_ranks(gw.local_group(2), train)
    assert first == ""
    assert "this one has length=50, seed=1" in second
    assert "to continue from has length=50, seed=0" in second
