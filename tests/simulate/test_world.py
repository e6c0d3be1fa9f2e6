"""Whole jobs in virtual time: no invariant breaks, and equal seeds give equal histories."""

from __future__ import annotations

from random import Random, SystemRandom

import pytest

from gradwire.simulate import __main__ as command
from gradwire.simulate import faults, invariants
from gradwire.simulate.faults import ENDLESS, Fault
from gradwire.simulate.invariants import Violation
from gradwire.simulate.scenario import Scenario, draw_scenario
from gradwire.simulate.simulated_coordinator import run_id
from gradwire.simulate.world import World


def quiet(*happening: Fault, **facts: object) -> World:
    """Return a job of four members on four hosts, with these faults only."""
    return World(1, Scenario(faults=happening, **facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_simulation_usual_faults_break_no_invariant(first: int) -> None:
    for seed in range(first, first + 10):
        World(seed).run()


@pytest.mark.parametrize(
    "seed", [708001, 1300987, 2010526, 2014967, 2015008, 3000312, 3009034, 3012567, 6001328, 423007741242]
)
def test_simulation_seeds_of_past_violations_break_no_invariant(seed: int) -> None:
    World(seed).run()


def test_simulation_completes_checkpoints_and_some_fail() -> None:
    worlds = [
        World(seed, Scenario(checkpoints=True, start=3, faults=(Fault("crash", 8.0, 0.0, 1),))) for seed in range(8)
    ]
    for world in worlds:
        world.run()
    assert sum(len(world.checkpoints.complete) for world in worlds) > 8
    assert sum(world.checkpoints.failed for world in worlds) > 0


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_simulation_rare_faults_break_no_invariant(first: int) -> None:
    for seed in range(first, first + 10):
        World(seed, kinds=faults.KINDS).run()


@pytest.mark.parametrize(
    ("kinds", "seed"),
    [
        ("usual", 224),
        ("usual,no-journal", 6),
        ("usual,blackout", 6),
        ("usual,outage", 79),
        ("usual,unfit", 734),
        ("all", 100027),
        ("all", 100306),
        ("all", 100675),
        ("all", 77000004),
    ],
)
def test_simulation_seeds_of_past_violations_with_rare_faults_break_no_invariant(kinds: str, seed: int) -> None:
    World(seed, kinds=faults.chosen(kinds)).run()


@pytest.mark.parametrize("kind", ["unfit", "stale", "impostor"])
def test_simulation_unfit_stale_or_impostor_worker_does_not_stop_the_job(kind: str) -> None:
    for seed in range(6):
        world = quiet(Fault(kind, 2.0, 0.0, seed))
        outcome = world.run()
        refused = not any(worker.profile.unfit == "unfit in set-up" for worker in world.workers)
        assert outcome.ending == "continued"
        assert outcome.generations == 1 or not refused


@pytest.mark.parametrize("launchers", [True, False])
def test_simulation_members_with_a_join_token_join_and_keep_their_leases(launchers: bool) -> None:
    world = quiet(Fault("token", 2.0, 0.0, 5), Fault("skew", 20.0, 1.0, 5), launchers=launchers)
    assert world.run().ending == "continued"
    assert len(world.ledger.generations[max(world.ledger.generations)]) > 4


def test_simulation_coordinator_without_its_journal_begins_another_run() -> None:
    world = quiet(Fault("no-journal", 2.0, 0.5, 5))
    assert world.run().ending == "continued"
    assert world.ledger.run == 2
    assert {worker.run for worker in world.workers} == {run_id(1), run_id(2)}


@pytest.mark.parametrize(("seed", "taken"), [(1, "m3"), (2, "m1")])
def test_simulation_impostor_that_takes_a_free_id_removes_only_itself(seed: int, taken: str) -> None:
    world = quiet(Fault("no-journal", 2.0, 0.5, 5), Fault("impostor", 2.1, 0.0, seed))
    assert world.run().ending == "continued"
    assert world.ledger.generations == {1: (taken, "m4", "m5", "m6"), 2: ("m4", "m5", "m6", "m7")}
    assert world.worker(taken).run == run_id(1), "the impostor was a member of the new run, not this worker"


def test_simulation_long_coordinator_outage_with_joins_begins_another_run() -> None:
    joins = [Fault("join", 4.0 + second, 0.0, second) for second in range(2)]
    world = quiet(Fault("outage", 2.0, 90.0, 5), *joins, Fault("crash", 93.0, 0.0, 1))
    assert world.run().ending == "continued"
    assert world.ledger.run == 2


@pytest.mark.parametrize("kind", ["slow-disk", "full-disk"])
def test_simulation_slow_or_full_journal_disk_loses_no_member(kind: str) -> None:
    for seed in range(3):
        world = quiet(Fault(kind, 1.0, 5.0, seed), Fault("crash", 2.0, 0.0, seed))
        assert world.run().ending == "continued"
        assert len(world.ledger.generations[max(world.ledger.generations)]) == 3


@pytest.mark.parametrize("durable", [True, False])
def test_simulation_power_loss_keeps_the_run_only_with_a_durable_journal(durable: bool) -> None:
    world = quiet(Fault("blackout", 2.0, 1.0, 5), durable=durable)
    assert world.run().ending == "continued"
    assert world.ledger.run == (1 if durable else 2)


@pytest.mark.soak
def test_simulation_random_seeds_break_no_invariant() -> None:
    """Each run of this test uses other seeds. The message of a violation contains its seed."""
    first = SystemRandom().randrange(1 << 40)
    for seed in range(first, first + 2000):
        World(seed).run()


def test_simulation_equal_seeds_give_equal_histories() -> None:
    for seed in (3, 11, 27):
        one, other = World(seed), World(seed)
        assert one.run() == other.run()
        assert list(one.history) == list(other.history)
    assert World(3).run() != World(11).run()


def test_simulation_without_faults_has_one_generation() -> None:
    world = quiet()
    outcome = world.run()
    assert (outcome.ending, outcome.generations) == ("continued", 1)
    assert outcome.steps > 3
    assert not any("broke" in text for _, _, text, _ in world.history)


def test_simulation_crash_costs_one_generation_and_under_two_virtual_seconds() -> None:
    world = quiet(Fault("crash", 2.0, 0.0, 5))
    outcome = world.run()
    assert outcome.generations == 2
    assert len(world.ledger.generations[2]) == 3
    assert outcome.recovery < 2.0


@pytest.mark.parametrize("kind", ["stall", "stick", "skew", "restart"])
def test_simulation_stall_stick_skew_or_restart_evicts_no_member(kind: str) -> None:
    for seed in range(5):
        outcome = quiet(Fault(kind, 2.0, 4.0, seed)).run()
        assert (outcome.ending, outcome.generations) == ("continued", 1)


@pytest.mark.parametrize("kind", ["freeze", "cut", "isolate"])
def test_simulation_endless_freeze_cut_or_isolation_removes_the_member(kind: str) -> None:
    world = quiet(Fault(kind, 2.0, ENDLESS, 5))
    assert world.run().ending == "continued"
    assert len(world.ledger.generations[2]) == 3


def test_simulation_member_cut_off_from_the_coordinator_continues() -> None:
    outcome = quiet(Fault("exile", 2.0, 8.0, 5)).run()
    assert (outcome.ending, outcome.generations) == ("continued", 1)


def test_simulation_join_and_leave_break_no_collective() -> None:
    world = quiet(Fault("join", 2.0, 0.0, 5), Fault("leave", 6.0, 0.0, 5))
    assert world.run().ending == "continued"
    assert [len(world.ledger.generations[number]) for number in (1, 2, 3)] == [4, 5, 4]
    assert not any("broke" in text for _, _, text, _ in world.history)


def test_draw_scenario_draws_every_kind_of_fault() -> None:
    drawn = [fault for seed in range(300) for fault in draw_scenario(seed, Random(seed), kinds=faults.KINDS).faults]
    assert {fault.kind for fault in drawn} == faults.KINDS.keys()
    assert {fault.kind for fault in drawn if fault.seconds >= ENDLESS} == set(faults.LASTING)


def test_violation_shows_its_history_and_the_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "applied", lambda state, total: state)
    with pytest.raises(Violation) as caught:
        quiet().run()
    text = str(caught.value)
    assert "after step 0 of generation 1, expected" in caught.value.reason
    assert "generation 1: ('m" in text
    assert "replay it with: python -m gradwire.simulate --first 1 --seeds 1" in text


def test_simulate_command_runs_seeds_and_prints_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--first", "20", "--seeds", "3", "--members", "3"]) == 0
    output = capsys.readouterr().out
    assert "3 seeds in" in output
    assert "0 broken" in output


def test_simulate_command_draws_only_from_the_chosen_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "2", "--faults", "stale,unfit"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("faults: "))
    assert {word.split()[0] for word in line.removeprefix("faults: ").split(", ")} <= {"stale", "unfit"}
    with pytest.raises(SystemExit):
        command.main(["--faults", "crash,sabotage"])
    assert "unknown kinds of faults: sabotage" in capsys.readouterr().err


def test_simulate_command_with_a_broken_seed_returns_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(invariants, "applied", lambda state, total: state)
    assert command.main(["--first", "20", "--seeds", "3"]) == 1
    assert "broken: 20" in capsys.readouterr().out
    assert command.main(["--first", "20", "--seeds", "3", "--keep-going"]) == 1
    assert "broken: 20, 21, 22" in capsys.readouterr().out
