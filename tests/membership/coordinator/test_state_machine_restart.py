"""Tests that a coordinator restored from a snapshot answers as the original would have."""

from __future__ import annotations

import json

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradwire.membership.coordinator.state_machine import MINORITY_GRACE, Membership
from gradwire.membership.types import Assembly, Claim
from support.membership_claims import RUN, worker

NAMES = "abcdef"
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES), max_size=2)),
        st.tuples(st.sampled_from(["gone", "leave", "withdraw", "checkpoint"]), st.sampled_from(NAMES), st.just(set())),
    ),
    max_size=12,
)


class Job:
    """Healthy workers and their coordinator. Waiting workers ask all the time."""

    def __init__(self) -> None:
        self.state = Membership("job", RUN, start=3, minimum=2, maximum=4)
        self.now = 0.0
        self.told: dict[str, int] = {}
        self.claims: dict[str, Claim] = {}
        for name in "abc":
            self.play("come", name, set())

    def play(self, what: str, name: str, lost: set[str]) -> object:
        if what == "come":
            return self.ask(name, lost)
        claim = self.claims.pop(name, None) if what != "checkpoint" else None
        if what == "gone":
            self.state.gone([name], self.now)
        elif what == "leave":
            self.state.leave(worker(name).member, self.now)
        elif what == "checkpoint":
            return self.state.end_checkpoint(self.state.news().checkpoint or 1, name, self.now)
        elif claim is not None:
            return self.state.withdraw(claim)
        return self.state.news()

    def ask(self, name: str, lost: set[str]) -> object:
        claim = self.claims.setdefault(name, worker(name, self.told.get(name, 0), sorted(lost)))
        outcome = self.state.register(claim, self.now)
        if isinstance(outcome, Assembly):
            self.told[name] = outcome.generation
            del self.claims[name]
        return type(outcome), outcome if isinstance(outcome, Assembly) else None

    def settle(self) -> object:
        """Let enough time pass for all short time limits."""
        until = self.now + 2 * MINORITY_GRACE
        while self.now < until:
            self.now += 0.5
            self.state.heartbeat(NAMES, self.now)
            for name in list(self.claims):
                self.ask(name, set())
        return self.state.snapshot(), self.state.news()


@given(EVENTS, EVENTS)
@settings(max_examples=60, deadline=None)
def test_restored_membership_answers_as_the_original_would(before: list, after: list) -> None:  # type: ignore[type-arg]
    job, twin = Job(), Job()
    for event in before:
        assert job.play(*event) == twin.play(*event)
    assume(not job.state.waiting or not job.state.roster.backoff_ends())  # back-offs are not in the snapshot
    twin.state = Membership.restore(json.loads(json.dumps(twin.state.snapshot())), twin.now)
    line = job.state.roster.queue.keys()
    for name in sorted(twin.claims, key=lambda name: name not in line):  # members may complete the next generation
        twin.ask(name, set())
        job.ask(name, set())
    assert job.settle() == twin.settle()
    assume(not job.state.roster.backoff_ends())
    for event in after:
        assert job.play(*event) == twin.play(*event)
        assert job.settle() == twin.settle()
