"""The invariants of the simulation: which histories they accept, and which they report as violations."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest

from gradwire.arrays import Array
from gradwire.simulate.invariants import Invariants, Version
from gradwire.simulate.toy_training import applied, gradient
from gradwire.training.commit_rules import Settlement

SEED = 5


class Broken(Exception):
    pass


def fail(text: str) -> NoReturn:
    raise Broken(text)


@pytest.fixture
def ledger() -> Invariants:
    """Generation 1 has two members and has committed steps 0 and 1. One member has also completed step 2."""
    ledger = Invariants(SEED, fail)
    ledger.settled(1, Settlement(-1, 0, {}), True)
    ledger.began("a", 1, np.zeros_like(gradient(SEED, 0, 0, 2)))
    for step in range(3):
        complete(ledger, (step, 1), size=2)
    for step in range(2):
        commit(ledger, (step, 1))
    return ledger


def complete(ledger: Invariants, version: Version, size: int) -> Array:
    """Complete a step on top of the previous state of its generation, or of the generation's initial state."""
    step, number = version
    before = ledger.states.get((step - 1, number))
    if before is None:
        base = ledger.bases[number]
        before = ledger.beginnings[number] if base[0] < 0 else ledger.states[base]
    total = np.sum([gradient(SEED, step, rank, size) for rank in range(size)], axis=0)
    state = applied(before, np.asarray(total))
    ledger.completed("a", version, size, state)
    return state


def commit(ledger: Invariants, version: Version) -> None:
    ledger.commit("a", version, ledger.states[version])


def test_invariants_abandoned_settlement_allows_a_later_commit(ledger: Invariants) -> None:
    """Generation 2 broke while the state was handed over. Then the member that has completed step 2 returned."""
    ledger.settled(2, Settlement(1, 1, {}), True)
    ledger.settled(3, Settlement(2, 1, {}), True)
    commit(ledger, (2, 1))
    assert ledger.committed == 2


def test_invariants_commit_of_a_step_skipped_by_a_later_generation_breaks(ledger: Invariants) -> None:
    ledger.settled(2, Settlement(1, 1, {}), True)
    complete(ledger, (2, 2), size=1)
    commit(ledger, (1, 1))
    complete(ledger, (3, 2), size=1)
    commit(ledger, (3, 2))
    with pytest.raises(Broken, match="commits step 2 in generation 1, but generation 2 has continued after step 1"):
        commit(ledger, (2, 1))


def test_invariants_holds_is_true_for_the_last_commit_and_later_states_only(ledger: Invariants) -> None:
    assert ledger.holds((1, 1), ledger.states[(1, 1)])
    assert ledger.holds((2, 1), ledger.states[(2, 1)])
    assert not ledger.holds((0, 1), ledger.states[(0, 1)])
    assert not ledger.holds((1, 1), ledger.states[(2, 1)])


def test_invariants_state_of_another_history_does_not_hold_the_commit(ledger: Invariants) -> None:
    """One member continued alone after step 1, and its step 2 differs from the one that the other had completed."""
    ledger.settled(2, Settlement(1, 1, {}), True)
    alone = complete(ledger, (2, 2), size=1)
    commit(ledger, (2, 2))
    assert ledger.holds((2, 2), alone)
    assert not ledger.holds((2, 1), ledger.states[(2, 1)])
    with pytest.raises(Broken, match="generation 3 begins after step 1, but step 2 was committed"):
        ledger.settled(3, Settlement(1, 1, {}), True)
    with pytest.raises(Broken, match=r"generation 4 begins after \(2, 1\), which did not follow from \(2, 2\)"):
        ledger.settled(4, Settlement(2, 1, {}), True)


def test_invariants_step_lost_with_all_its_holders_may_be_repeated(ledger: Invariants) -> None:
    ledger.settled(2, Settlement(0, 1, {}), False)
    assert ledger.committed == 0
    complete(ledger, (1, 2), size=1)
    commit(ledger, (1, 2))
    with pytest.raises(Broken, match="but generation 2 committed it"):
        commit(ledger, (1, 1))


def test_invariants_commit_after_a_lost_step_is_protected_again(ledger: Invariants) -> None:
    commit(ledger, (2, 1))
    ledger.settled(2, Settlement(1, 1, {}), False)  # step 2 is lost with all members that held it
    complete(ledger, (2, 2), size=1)  # completed by one member, never committed
    ledger.settled(3, Settlement(1, 1, {}), True)
    complete(ledger, (2, 3), size=2)
    commit(ledger, (2, 3))
    with pytest.raises(Broken, match=r"begins after \(2, 2\), which did not follow from \(2, 3\)"):
        ledger.settled(4, Settlement(2, 2, {}), True)


def test_invariants_returning_member_with_a_later_step_restores_its_history(
    ledger: Invariants,
) -> None:
    ledger.settled(2, Settlement(-1, 0, {}), False)
    ledger.began("b", 2, np.ones_like(gradient(SEED, 0, 0, 1)))
    complete(ledger, (0, 2), size=1)
    commit(ledger, (0, 2))
    ledger.settled(3, Settlement(1, 1, {}), True)
    assert ledger.committed == 1
    commit(ledger, (1, 1))
    complete(ledger, (2, 3), size=2)
    commit(ledger, (2, 3))
