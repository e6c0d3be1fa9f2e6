"""The protocol of checkpoints: which votes begin, publish, drop and complete a checkpoint, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gradwire.training.checkpoint_protocol import CheckpointProtocol
from gradwire.training.commit_rules import NONE, Wishes, ballot, count
from gradwire.training.step_requests import Gather


class Rank:
    """A rank whose writes take until the test ends them."""

    settings = "folder x"

    def __init__(self, every: int | None) -> None:
        self.protocol = CheckpointProtocol(self, every)
        self.requested = False
        self.epoch = NONE
        self.writing = False
        self.failure = ""
        self.published = NONE
        self.events: list[str] = []

    def copy(self, step: int, digest: str) -> None:
        assert not self.writing
        self.requested, self.published, self.writing = False, NONE, True
        self.events.append(f"copy {step}")

    def publish(self) -> None:
        assert not self.writing
        self.events.append("publish")

    def drop(self) -> None:
        self.failure = ""
        self.events.append("drop")

    def completed(self, step: int, epoch: int) -> None:
        self.events.append(f"completed {step}" + (f" for epoch {epoch}" if epoch != NONE else ""))

    def failed(self, step: int, reasons: Sequence[str]) -> None:
        self.events.append(f"failed {step}: {list(reasons)}")

    def delayed(self, step: int, by: int) -> None:
        self.events.append(f"delayed {step} by {by}")


class Ranks:
    """Ranks that vote together."""

    def __init__(self, size: int = 2, every: int | None = None) -> None:
        self.all = [Rank(every) for _ in range(size)]

    def vote(self, *steps: int, last: bool = False) -> None:
        for step in steps:
            ballots = [ballot(step, "", rank.protocol.wishes(step, last=last)) for rank in self.all]
            wishes = count(np.maximum.reduce(ballots)).wishes
            advances = [rank.protocol.advance(step, "d", wishes, last=last) for rank in self.all]
            gathers = [next(advance, None) for advance in advances]
            assert len({gather is None for gather in gathers}) == 1
            if isinstance(gathers[0], Gather):
                values = [gather.value for gather in gathers if gather is not None]
                for advance in advances:
                    with pytest.raises(StopIteration):
                        advance.send(values)

    def written(self) -> None:
        for rank in self.all:
            rank.writing = False

    @property
    def events(self) -> list[str]:
        """The events since the last call, which are the same on all ranks."""
        first, *others = [rank.events.copy() for rank in self.all]
        assert all(other == first for other in others)
        for rank in self.all:
            rank.events.clear()
        return first


def complete(ranks: Ranks, copied: int, *steps: int, last: bool = False) -> None:
    """Let the checkpoint of step `copied` become complete by the votes of two more steps."""
    ranks.written()
    ranks.vote(steps[0], last=last)
    ranks.all[0].published = copied
    ranks.vote(steps[1], last=last)


def test_checkpoint_is_copied_published_and_completed_by_one_vote_each() -> None:
    ranks = Ranks(every=3)
    ranks.vote(0, 1, 2, 3)
    assert ranks.events == ["copy 2"]
    ranks.all[0].writing = False
    ranks.vote(4)  # rank 1 still writes
    assert ranks.events == []
    ranks.written()
    ranks.vote(5)
    assert ranks.events == ["publish", "delayed 5 by 2"]
    ranks.vote(6)
    ranks.all[0].published = 2
    ranks.vote(7)
    assert ranks.events == ["completed 2", "copy 7"]


def test_checkpoint_asked_for_by_one_rank_is_copied_by_all() -> None:
    ranks = Ranks(3)
    ranks.all[1].requested = True
    ranks.vote(4, 5)
    assert ranks.events == ["copy 4"]


def test_checkpoint_of_the_last_step_waits_for_the_one_in_progress_without_a_warning() -> None:
    ranks = Ranks(every=4)
    ranks.vote(3)
    ranks.vote(7, last=True)
    assert ranks.all[0].protocol.unfinished
    complete(ranks, 3, 7, 7, last=True)
    assert ranks.events == ["copy 3", "publish", "completed 3", "copy 7"]
    complete(ranks, 7, 7, 7, last=True)
    assert ranks.events == ["publish", "completed 7"]
    assert not ranks.all[0].protocol.unfinished


def test_checkpoint_of_a_run_that_ends_before_its_first_step_is_not_written() -> None:
    ranks = Ranks()
    ranks.vote(NONE, last=True)
    assert ranks.events == []
    assert not ranks.all[0].protocol.unfinished


def test_checkpoint_that_the_run_continued_from_is_not_written_again() -> None:
    ranks = Ranks(every=5)
    for rank in ranks.all:
        rank.protocol.resumed(9)
    ranks.vote(9, last=True)
    assert ranks.events == []


def test_checkpoint_that_one_rank_cannot_write_fails_on_all_with_the_reasons() -> None:
    ranks = Ranks(every=2)
    ranks.vote(1)
    ranks.written()
    ranks.all[1].failure = "the disk is full"
    ranks.vote(2)
    assert ranks.events == ["copy 1", "drop", "failed 1: ['', 'the disk is full']"]
    ranks.vote(2, 3)
    assert ranks.events == ["copy 3"]


def test_checkpoint_of_a_broken_generation_is_dropped_and_copied_after_the_next_step() -> None:
    ranks = Ranks(every=3)
    ranks.vote(2)
    for rank in ranks.all:
        rank.protocol.begin_generation()
    assert ranks.events == ["copy 2", "drop"]
    ranks.vote(3)  # a thread has not noticed yet that it is to stop
    assert ranks.events == []
    ranks.written()
    ranks.vote(4)
    assert ranks.events == ["copy 4"]


def test_checkpoint_in_progress_is_unknown_to_a_rank_that_joins() -> None:
    ranks = Ranks(every=3)
    ranks.vote(2)
    ranks.all.append(Rank(3))
    for rank in ranks.all:
        rank.protocol.begin_generation()
        rank.events.clear()
    ranks.written()
    ranks.vote(3)
    assert ranks.events == ["copy 3"]


def test_checkpoint_for_the_coordinator_is_copied_once_and_reported_by_all() -> None:
    ranks = Ranks()
    ranks.all[1].epoch = 0  # the others have not received the news yet
    ranks.vote(5)
    ranks.all[0].epoch = 0
    ranks.vote(6)
    complete(ranks, 5, 7, 8)
    assert ranks.events == ["copy 5", "publish", "completed 5 for epoch 0"]
    ranks.vote(9, 10)
    assert ranks.events == []
    ranks.all[0].epoch = 3
    ranks.vote(11)
    assert ranks.events == ["copy 11"]


def test_checkpoint_for_the_coordinator_that_fails_is_replaced_by_the_next_one() -> None:
    ranks = Ranks(every=5)
    for rank in ranks.all:
        rank.epoch = 1
    ranks.vote(0)
    ranks.all[0].failure = "the disk is full"
    ranks.written()
    ranks.vote(1, 2, 3)
    assert ranks.events == ["copy 0", "drop", "failed 0: ['the disk is full', '']"]
    ranks.vote(4)
    complete(ranks, 4, 5, 6)
    assert ranks.events == ["copy 4", "publish", "completed 4 for epoch 1"]


def test_wishes_of_a_rank_without_anything_to_write_are_empty() -> None:
    assert Rank(3).protocol.wishes(0, last=False) == Wishes()
