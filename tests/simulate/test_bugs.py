"""Bugs put in on purpose: the simulation finds each of them within 1,000 seeds.

The first seeds to try are those that have found it before; if the simulation has changed since, it takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from gradwire.liveness.control import Control
from gradwire.membership import state
from gradwire.membership.roster import Roster
from gradwire.simulate import worker
from gradwire.simulate.collective import Collectives
from gradwire.simulate.process import Program
from gradwire.simulate.world import Violation, World
from gradwire.training.steps import NONE, Settlement, Standing, settle

SEEDS = 1000
Plant = Callable[[pytest.MonkeyPatch], None]


def survivors_do_not_keep_their_order(patch: pytest.MonkeyPatch) -> None:
    seat = Roster.seat
    patch.setattr(Roster, "seat", lambda roster, order: seat(roster, order[::-1]))


def a_complaint_drops_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "cut_off", lambda *_: [])


def the_lower_step_wins(patch: pytest.MonkeyPatch) -> None:
    def lower(standings: Sequence[Standing]) -> Settlement:
        versions = [one.version for one in standings if one.sound and one.completed != NONE]
        if not versions:
            return settle(standings)
        holders = [rank for rank, one in enumerate(standings) if one.sound and one.version == min(versions)]
        takers = [rank for rank in range(len(standings)) if rank not in holders]
        return Settlement(*min(versions), dict.fromkeys(takers, holders[0]))

    patch.setattr(worker, "settle", lower)


def a_spoiled_state_counts_as_sound(patch: pytest.MonkeyPatch) -> None:
    def believing(completed: int, generation: int, committed: int, digest: str, sound: bool) -> Standing:
        return Standing(completed, generation, committed, digest)

    believing.from_wire = Standing.from_wire  # type: ignore[attr-defined]
    patch.setattr(worker, "Standing", believing)


def a_first_step_that_was_cut_short_counts_as_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "is_sound", lambda completed, remembered, now: completed == NONE or now == remembered)


def a_vote_does_not_wait_for_all(patch: pytest.MonkeyPatch) -> None:
    run = Collectives.run

    def hasty(calls: Collectives, collective: str, algorithm: str, x: object, *rest: object) -> Program:
        votes = rest[1:] == ("max",) and len(x) > 1  # type: ignore[arg-type]
        if not votes:
            yield from run(calls, collective, algorithm, x, *rest)  # type: ignore[arg-type]

    patch.setattr(Collectives, "run", hasty)


def nobody_says_goodbye(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Control, "goodbye", lambda control: None)


def violation_of(seed: int) -> Violation | None:
    try:
        World(seed).run()
    except Violation as violation:
        return violation
    return None


@pytest.mark.parametrize(
    ("plant", "first", "found"),
    [
        (survivors_do_not_keep_their_order, 0, "have not kept their order"),
        (a_complaint_drops_nobody, 20, "no step was committed"),
        (the_lower_step_wins, 0, "was committed"),
        (a_spoiled_state_counts_as_sound, 5, "it should be"),
        (a_first_step_that_was_cut_short_counts_as_nothing, 12, "begins generation 2 after (-1, 1) with"),
        (a_vote_does_not_wait_for_all, 226, "was committed"),
        (nobody_says_goodbye, 5, "was evicted, and nothing had happened to it"),
    ],
)
def test_a_bug_is_found(plant: Plant, first: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    violations = filter(None, map(violation_of, (*range(first, first + 3), *range(SEEDS))))
    violation = next(violations, None)
    assert violation is not None, f"not found in {SEEDS} seeds"
    assert found in violation.reason, violation
    assert f"--first {violation.seed} --seeds 1" in str(violation)
