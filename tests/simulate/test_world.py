"""Whole jobs in virtual time: nothing is broken, and equal seeds are equal histories."""

from __future__ import annotations

from random import Random, SystemRandom

import pytest

from gradwire.simulate import __main__ as command
from gradwire.simulate import faults, ledger
from gradwire.simulate.faults import ENDLESS, Fault
from gradwire.simulate.setting import Setting, draw_setting
from gradwire.simulate.world import Violation, World


def quiet(*happening: Fault, **facts: object) -> World:
    """A job of four on four hosts, to which only this happens."""
    return World(1, Setting(faults=happening, **facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_no_invariant_breaks(first: int) -> None:
    for seed in range(first, first + 10):
        World(seed).run()


@pytest.mark.parametrize(
    "seed", [708001, 1300987, 2010526, 2014967, 2015008, 3000312, 3009034, 3012567, 6001328, 423007741242]
)
def test_what_once_broke_an_invariant_breaks_none(seed: int) -> None:
    World(seed).run()


@pytest.mark.soak
def test_no_invariant_breaks_in_thousands_of_other_jobs() -> None:
    """Others each time: a broken one tells its seed."""
    first = SystemRandom().randrange(1 << 40)
    for seed in range(first, first + 2000):
        World(seed).run()


def test_equal_seeds_are_equal_histories() -> None:
    for seed in (3, 11, 27):
        one, other = World(seed), World(seed)
        assert one.run() == other.run()
        assert list(one.history) == list(other.history)
    assert World(3).run() != World(11).run()


def test_without_faults_there_is_one_generation_and_nobody_breaks() -> None:
    world = quiet()
    outcome = world.run()
    assert (outcome.ending, outcome.generations) == ("went on", 1)
    assert outcome.steps > 3
    assert not any("broke" in text for _, _, text, _ in world.history)


def test_a_crash_costs_a_generation_and_less_than_two_seconds() -> None:
    world = quiet(Fault("crash", 2.0, 0.0, 5))
    outcome = world.run()
    assert outcome.generations == 2
    assert len(world.ledger.generations[2]) == 3
    assert outcome.recovery < 2.0


@pytest.mark.parametrize("kind", ["stall", "stick", "skew", "restart"])
def test_what_is_no_reason_to_give_a_rank_up(kind: str) -> None:
    for seed in range(5):
        outcome = quiet(Fault(kind, 2.0, 4.0, seed)).run()
        assert (outcome.ending, outcome.generations) == ("went on", 1)


@pytest.mark.parametrize("kind", ["freeze", "cut", "isolate"])
def test_what_never_ends_is_done_without(kind: str) -> None:
    world = quiet(Fault(kind, 2.0, ENDLESS, 5))
    assert world.run().ending == "went on"
    assert len(world.ledger.generations[2]) == 3


def test_who_is_cut_off_from_the_coordinator_works_on() -> None:
    outcome = quiet(Fault("exile", 2.0, 8.0, 5)).run()
    assert (outcome.ending, outcome.generations) == ("went on", 1)


def test_who_joins_gets_the_state_and_who_leaves_is_not_missed() -> None:
    world = quiet(Fault("join", 2.0, 0.0, 5), Fault("leave", 6.0, 0.0, 5))
    assert world.run().ending == "went on"
    assert [len(world.ledger.generations[number]) for number in (1, 2, 3)] == [4, 5, 4]
    assert not any("broke" in text for _, _, text, _ in world.history)


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = [fault for seed in range(300) for fault in draw_setting(seed, Random(seed), kinds=faults.KINDS).faults]
    assert {fault.kind for fault in drawn} == faults.KINDS.keys()
    assert {fault.kind for fault in drawn if fault.seconds >= ENDLESS} == set(faults.LASTING)


def test_a_broken_invariant_shows_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "applied", lambda state, total: state)
    with pytest.raises(Violation) as caught:
        quiet().run()
    text = str(caught.value)
    assert "after step 0 of generation 1; it should be" in caught.value.reason
    assert "generation 1: ('m" in text
    assert "replay it with: python -m gradwire.simulate --first 1 --seeds 1" in text


def test_the_command_runs_seeds_and_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--first", "20", "--seeds", "3", "--members", "3"]) == 0
    said = capsys.readouterr().out
    assert "3 seeds in" in said
    assert "0 broken" in said


def test_the_command_fails_with_a_broken_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "applied", lambda state, total: state)
    assert command.main(["--first", "20", "--seeds", "3"]) == 1
    assert "broken: 20" in capsys.readouterr().out
    assert command.main(["--first", "20", "--seeds", "3", "--keep-going"]) == 1
    assert "broken: 20, 21, 22" in capsys.readouterr().out
