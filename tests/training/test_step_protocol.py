"""The step protocol, driven by simulated ranks that answer each other's requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradwire.errors import Broken, ConfigError, PeerLost, ReplicasDiverged, StateLost
from gradwire.training.commit_rules import Settlement
from gradwire.training.step_protocol import StepProtocol
from gradwire.training.step_requests import (
    Gather,
    GatherDigests,
    HandOver,
    NextGeneration,
    Pause,
    Request,
    Steps,
    Vote,
)


class Ranks:
    """Simulated ranks of successive generations, without new members. The state of a rank is a string."""

    def __init__(self, *states: str, min_size: int = 1) -> None:
        self.number = 1
        self.members = [Rank(self, state, min_size) for state in states]
        self.asked: list[type[Request]] = []

    def together(self, steps: list[Steps], breaking: type[Request] | None = None) -> None:
        """Run these steps on all ranks. At the first request of type `breaking`, the generation breaks."""
        requests = [next(one, None) for one in steps]
        while any(requests):
            for rank, request in enumerate(requests):
                if isinstance(request, HandOver):  # only the giver and the takers perform it
                    self.hand_over(rank, request)
                    requests[rank] = steps[rank].send(None)
            kinds = {type(request) for request in requests}
            assert len(kinds) == 1, requests
            self.asked.append(kind := kinds.pop())  # type: ignore[arg-type]
            if kind is breaking:
                breaking = None
                requests = [one.throw(PeerLost("rank 9 is gone")) for one in steps]
                continue
            answers = self.answers(requests)
            requests = [_sent(one, answer) for one, answer in zip(steps, answers, strict=True)]

    def hand_over(self, rank: int, request: HandOver) -> None:
        if rank in request.takers:
            self.members[rank].state = self.members[request.giver].state
            assert self.members[rank].state == request.digest

    def answers(self, requests: list[Any]) -> list[Any]:
        match requests[0]:
            case Vote():
                reduced = np.max([request.ballot for request in requests], axis=0)
                return [reduced] * len(requests)
            case Gather():
                assert len({request.operation for request in requests}) == 1
                return [[request.value for request in requests]] * len(requests)
            case GatherDigests():
                return [[request.digests for request in requests]] * len(requests)
            case NextGeneration():
                self.number += 1
            case Pause():
                pass
        return [None] * len(requests)


class Rank:
    """One simulated rank."""

    def __init__(self, ranks: Ranks, state: str, min_size: int) -> None:
        self._ranks = ranks
        self.state = state
        self.protocol = StepProtocol(self, min_size)
        self.runs = 1
        self.stop = 0
        self.events: list[str] = []

    @property
    def rank(self) -> int:
        return self._ranks.members.index(self)

    @property
    def size(self) -> int:
        return len(self._ranks.members)

    @property
    def generation(self) -> int:
        return self._ranks.number

    def digest(self) -> str:
        return self.state

    def digest_if_readable(self) -> str:
        return self.state

    def digests(self) -> list[tuple[str, str]]:
        return [("state", self.state)]

    def others_wait(self) -> bool:
        return False

    def stop_wanted(self) -> int:
        return self.stop

    def last_checkpoint(self) -> str:
        return ""

    def can_recover(self, error: Broken) -> bool:
        return True

    def begun_runs(self, number: int) -> int:
        return self.runs

    def leave(self) -> None:
        self.events.append("left")

    def is_short_of_members(self, wanted: int) -> None:
        self.events.append("short")

    def begins(self) -> None:
        self.events.append("begins")

    def decided(self, settlement: Settlement) -> None:
        self.events.append("decided")

    def holds(self, version: tuple[int, int]) -> None:
        self.events.append("holds")

    def committed(self, version: tuple[int, int]) -> None:
        self.events.append(f"committed {version[0]}")

    def diverged(self, error: ReplicasDiverged) -> None:
        self.events.append("diverged")

    def broke(self, error: Broken, step: int) -> None:
        self.events.append("broke")

    def recovered(self) -> None:
        self.events.append("recovered")


def _sent(steps: Steps, answer: Any) -> Request | None:
    try:
        return steps.send(answer)
    except StopIteration:
        return None


def begun(*states: str) -> Ranks:
    ranks = Ranks(*states)
    ranks.together([one.protocol.begin() for one in ranks.members])
    return ranks


def completed(ranks: Ranks, step: int, state: str) -> list[Steps]:
    """Set the state at the end of a step's body on all ranks, and return the protocol's steps that follow."""
    for one in ranks.members:
        one.state = state
    return [one.protocol.end(step) for one in ranks.members]


def test_begin_hands_the_state_of_rank_0_to_all_others() -> None:
    ranks = begun("0000", "aaaa", "0000")
    assert [one.state for one in ranks.members] == ["0000"] * 3
    assert ranks.members[1].events == ["begins", "decided", "holds", "committed -1"]


def test_begin_a_second_time_sends_no_request() -> None:
    ranks = begun("0000", "0000")
    ranks.asked.clear()
    ranks.together([one.protocol.begin() for one in ranks.members])
    assert ranks.asked == []


def test_end_commits_the_step_when_all_have_voted() -> None:
    ranks = begun("0000", "0000")
    ranks.together(completed(ranks, 0, "1111"))
    assert [(one.protocol.committed, one.protocol.version) for one in ranks.members] == [(0, (0, 1))] * 2
    assert ranks.members[0].protocol.counts(0, 1)


def test_vote_that_breaks_commits_the_step_in_the_next_generation() -> None:
    ranks = begun("0000", "0000")
    ranks.together(completed(ranks, 0, "1111"), breaking=Vote)
    assert [one.protocol.committed for one in ranks.members] == [0, 0]
    assert ranks.members[0].events[4:] == ["broke", "begins", "decided", "holds", "committed 0", "recovered"]
    assert ranks.number == 2


def test_recover_after_an_interrupted_step_restores_the_committed_state() -> None:
    ranks = begun("0000", "0000")
    ranks.together(completed(ranks, 0, "1111"))
    ranks.members[0].state = "half a step"
    ranks.together([one.protocol.recover(PeerLost("rank 9 is gone")) for one in ranks.members])
    assert [one.state for one in ranks.members] == ["1111", "1111"]


def test_begin_with_partly_overwritten_states_raises_state_lost() -> None:
    ranks = Ranks("0000", "0000")
    for one in ranks.members:
        one.protocol.overwritten = True  # as after a giver was lost during the transfer
    with pytest.raises(StateLost, match="no rank has an intact copy of the initial state"):
        ranks.together([one.protocol.begin() for one in ranks.members])


def test_vote_on_different_steps_raises_config_error() -> None:
    ranks = begun("0000", "0000")
    with pytest.raises(ConfigError, match="ranks vote on different steps"):
        ranks.together([one.protocol.end(rank) for rank, one in enumerate(ranks.members)])


def test_vote_with_different_states_raises_and_commits_nothing() -> None:
    ranks = begun("0000", "0000", "0000")
    steps = completed(ranks, 0, "1111")
    ranks.members[2].state = "2222"
    with pytest.raises(ReplicasDiverged, match="rank 2 holds a different 'state'"):
        ranks.together(steps)
    assert ranks.members[0].protocol.committed == -1


def test_begin_in_an_earlier_run_than_the_others_leaves_and_raises() -> None:
    ranks = Ranks("0000", "0000")
    ranks.members[1].runs = 2
    with pytest.raises(
        ConfigError, match="this process is in its elastic run 1, but the other ranks are in their run 2"
    ):
        ranks.together([one.protocol.begin() for one in ranks.members])
    assert ranks.members[0].events == ["begins", "left"]


def test_begin_below_min_size_votes_and_pauses() -> None:
    ranks = Ranks("0000", min_size=2)
    steps = ranks.members[0].protocol.begin()
    vote = next(steps)
    assert isinstance(vote, Vote)
    assert isinstance(steps.send(vote.ballot), Pause)
    assert ranks.members[0].events == ["begins", "short"]
