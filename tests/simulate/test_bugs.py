"""The simulation finds each deliberately planted bug within 1,000 seeds.

Each test first tries the seeds that found its bug before. If the simulation has changed since, the test takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from gradwire.identity import PROTOCOL
from gradwire.job import session_protocol
from gradwire.job.session_protocol import Past, SessionProtocol
from gradwire.liveness.control_protocol import ControlProtocol, Event, Instruction, Leaving
from gradwire.membership.client import registration_rules
from gradwire.membership.coordinator import admission_rules, state_machine
from gradwire.membership.coordinator.admission_rules import Terms
from gradwire.membership.coordinator.call_rules import CallRules, Report, Save
from gradwire.membership.coordinator.roster import Roster
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Change, Claim
from gradwire.security.tokens import TokenGate
from gradwire.simulate import faults
from gradwire.simulate.collective import Collectives
from gradwire.simulate.disk import Disk
from gradwire.simulate.faults import USUAL
from gradwire.simulate.invariants import Violation
from gradwire.simulate.process import Program
from gradwire.simulate.world import World
from gradwire.training import step_protocol
from gradwire.training.checkpoint_protocol import CheckpointProtocol
from gradwire.training.commit_rules import NONE, Settlement, Standing, settle

SEEDS = 1000
Plant = Callable[[pytest.MonkeyPatch], None]


def survivors_do_not_keep_their_order(patch: pytest.MonkeyPatch) -> None:
    record = Roster.record
    patch.setattr(Roster, "record", lambda roster, order: record(roster, order[::-1]))


def complaints_drop_no_member(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_machine, "cut_off", lambda *_: [])


def the_lower_step_wins(patch: pytest.MonkeyPatch) -> None:
    def lower(standings: Sequence[Standing]) -> Settlement:
        versions = [one.version for one in standings if one.intact and one.completed != NONE]
        if not versions:
            return settle(standings)
        holders = [rank for rank, one in enumerate(standings) if one.intact and one.version == min(versions)]
        takers = [rank for rank in range(len(standings)) if rank not in holders]
        return Settlement(*min(versions), dict.fromkeys(takers, holders[0]))

    patch.setattr(step_protocol, "settle", lower)


def a_spoiled_state_counts_as_sound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_protocol, "is_intact", lambda completed, remembered, now, overwritten: True)


def an_interrupted_first_step_leaves_the_state_sound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        step_protocol,
        "is_intact",
        lambda completed, remembered, now, overwritten: completed == NONE or now == remembered,
    )


def a_vote_does_not_wait_for_all(patch: pytest.MonkeyPatch) -> None:
    run = Collectives.run

    def hasty(calls: Collectives, collective: str, algorithm: str, x: object, *rest: object) -> Program:
        votes = rest[1:] == ("max",) and len(x) > 1  # type: ignore[arg-type]
        if not votes:
            yield from run(calls, collective, algorithm, x, *rest)  # type: ignore[arg-type]

    patch.setattr(Collectives, "run", hasty)


def members_leave_without_a_goodbye_message(patch: pytest.MonkeyPatch) -> None:
    handle = ControlProtocol.handle

    def silent(control: ControlProtocol, event: Event, now: float) -> Sequence[Instruction]:
        return () if isinstance(event, Leaving) else handle(control, event, now)

    patch.setattr(ControlProtocol, "handle", silent)


def a_member_of_another_run_is_admitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission_rules, "is_of_another_run", lambda claim, terms, roster: False)
    patch.setattr(registration_rules, "is_of_another_run", lambda claim, assembly: False)


def an_unfit_newcomer_is_admitted(patch: pytest.MonkeyPatch) -> None:
    objection = admission_rules.objection

    def trusting(claim: Claim, terms: Terms, roster: Roster) -> str | None:
        transport = "auto" if claim.transport == "shm" else claim.transport
        return objection(replace(claim, protocol=PROTOCOL, transport=transport), terms, roster)

    patch.setattr(admission_rules, "objection", trusting)


def a_refused_claim_counts_as_a_use_of_its_join_token(patch: pytest.MonkeyPatch) -> None:
    def hasty(gate: TokenGate, ticket: bytes, member: str, now: float, known: object) -> None:
        gate.admit(ticket, member)

    patch.setattr(TokenGate, "refusal", hasty)


def a_generation_without_the_state_stays_in_its_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_machine, "next_run", lambda run: run)


def a_journal_without_fsync_is_accepted_after_a_power_loss(patch: pytest.MonkeyPatch) -> None:
    lose_power = Disk.lose_power

    def forgetful(disk: Disk, random: Random) -> None:
        lose_power(disk, random)
        disk.accept()

    patch.setattr(Disk, "lose_power", forgetful)


def a_coordinator_continues_when_its_journal_fails(patch: pytest.MonkeyPatch) -> None:
    save = Disk.save
    patch.setattr(Disk, "save", lambda disk, snapshot: 0.0 if disk.full else save(disk, snapshot))


def a_call_is_answered_before_the_journal_is_written(patch: pytest.MonkeyPatch) -> None:
    init = CallRules.__init__

    def hasty(rules: CallRules, membership: Membership, save: Save, report: Report) -> None:
        unwritten: list[tuple[Sequence[Change], Mapping[str, Any]]] = []

        def later(changes: Sequence[Change], snapshot: Mapping[str, Any]) -> None:
            if unwritten:
                save(*unwritten.pop())
            unwritten.append((changes, snapshot))

        init(rules, membership, later, report)

    patch.setattr(CallRules, "__init__", hasty)


def a_join_token_covers_all_members(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TokenGate, "may_act_for", lambda gate, ticket, member: True)


def a_member_does_not_report_its_run(patch: pytest.MonkeyPatch) -> None:
    _omit(patch, run=b"")


def a_member_does_not_report_lost_members(patch: pytest.MonkeyPatch) -> None:
    _omit(patch, lost=())


def _omit(patch: pytest.MonkeyPatch, **omitted: Any) -> None:
    """Replace a part of what members report to the coordinator when they register."""
    past = SessionProtocol.past
    patch.setattr(SessionProtocol, "past", lambda session: replace(past(session), **omitted))


def a_member_fails_when_another_is_lost_during_set_up(patch: pytest.MonkeyPatch) -> None:
    init = SessionProtocol.__init__

    def rigid(session: SessionProtocol, elastic: bool, past: Past = Past()) -> None:  # noqa: B008
        init(session, False, past)

    patch.setattr(SessionProtocol, "__init__", rigid)


def a_set_up_waits_for_frozen_members(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session_protocol, "SET_UP_SECONDS", 1e6)


def a_checkpoint_is_published_while_a_rank_still_writes(patch: pytest.MonkeyPatch) -> None:
    advance = CheckpointProtocol.advance
    patch.setattr(
        CheckpointProtocol,
        "advance",
        lambda protocol, step, digest, wishes: advance(protocol, step, digest, replace(wishes, writing=False)),
    )


def a_checkpoint_outlives_its_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointProtocol, "begin_generation", lambda protocol: None)


def violation_of(seed: int, kinds: Collection[str] = USUAL) -> Violation | None:
    try:
        World(seed, kinds=kinds).run()
    except Violation as violation:
        return violation
    return None


@pytest.mark.parametrize(
    ("plant", "first", "found"),
    [
        (survivors_do_not_keep_their_order, 3, "did not keep their order"),
        (complaints_drop_no_member, 20, "no step was committed"),
        (the_lower_step_wins, 9, "was committed"),
        (a_spoiled_state_counts_as_sound, 5, "holds a different 'state'"),
        (an_interrupted_first_step_leaves_the_state_sound, 12, "begins generation 2 after (-1, 1) with"),
        (members_leave_without_a_goodbye_message, 5, "was evicted, but no fault had affected it"),
        (a_call_is_answered_before_the_journal_is_written, 4, "knows generation"),
        (a_member_does_not_report_its_run, 3, "was refused"),
        (a_member_fails_when_another_is_lost_during_set_up, 16, " raised "),
        (a_set_up_waits_for_frozen_members, 19, "no step was committed"),
        (a_checkpoint_is_published_while_a_rank_still_writes, 0, "publishes a checkpoint of"),
        (a_checkpoint_outlives_its_generation, 9, "publishes a checkpoint of"),
        pytest.param(a_member_does_not_report_lost_members, 20, "no step was committed", marks=pytest.mark.slow),
    ],
)
def test_simulation_finds_a_planted_bug(plant: Plant, first: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    violations = filter(None, map(violation_of, (*range(first, first + 3), *range(SEEDS))))
    violation = next(violations, None)
    assert violation is not None, f"not found in {SEEDS} seeds"
    assert found in violation.reason, violation
    assert f"--first {violation.seed} --seeds 1" in str(violation)


@pytest.mark.parametrize(
    ("plant", "kinds", "first", "found"),
    [
        (a_vote_does_not_wait_for_all, "cut,isolate,split", 15, "was committed"),
        (a_member_of_another_run_is_admitted, "usual,no-journal", 6, "is a member of run"),
        (a_member_of_another_run_is_admitted, "usual,stale", 0, "is a member of run"),
        (an_unfit_newcomer_is_admitted, "usual,unfit", 7, "is unfit"),
        (a_refused_claim_counts_as_a_use_of_its_join_token, "usual,impostor", 0, "joined with other credentials"),
        (a_join_token_covers_all_members, "usual,impostor", 0, "but it is still alive"),
        (a_generation_without_the_state_stays_in_its_run, "usual,outage", 2, "was committed"),
        (a_journal_without_fsync_is_accepted_after_a_power_loss, "usual,blackout", 6, "knows generation"),
        (a_coordinator_continues_when_its_journal_fails, "usual,full-disk", 289, "knows generation"),
    ],
)
def test_simulation_with_chosen_faults_finds_a_planted_bug(
    plant: Plant, kinds: str, first: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    chosen = faults.chosen(kinds)
    violations = (violation_of(seed, chosen) for seed in (*range(first, first + 3), *range(SEEDS)))
    violation = next(filter(None, violations), None)
    assert violation is not None, f"not found in {SEEDS} seeds"
    assert found in violation.reason, violation
    assert f"--first {violation.seed} --seeds 1 --faults {faults.named(chosen)}" in str(violation)
