"""State that one rank hands to others: the same bits, and what is spoiled on the way is not believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.training import transfer
from gradwire.training.state import State
from ranks import run_ranks

LARGE = transfer.CHUNK_FOR_ONE // 4 * 2 + 3  # in several chunks, of which the last is not whole


def of(rank: int) -> dict[str, Any]:
    return {
        "w": np.full(LARGE, rank, np.float32),
        "empty": np.zeros((0, 3)),
        "deep": {"n": rank, "b": np.ones(3) * rank},
    }


def handed_over(
    ranks: int, takers: Sequence[int], *, overwrite: bool, digest: str | None = None
) -> list[dict[str, Any]]:
    """What all ranks hold after rank 1 has handed its state to the takers."""
    states = [of(rank) for rank in range(ranks)]
    told = digest or State(states[1]).digest()

    def exchange(group: gw.Group) -> None:
        if group.rank in (1, *takers):
            transfer.hand_over(group, State(states[group.rank]), 1, takers, told, overwrite=overwrite)

    run_ranks(gw.local_group(ranks), exchange)
    return states


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("takers", [[0], [0, 2]])
def test_takers_hold_what_the_giver_holds(takers: list[int], overwrite: bool) -> None:
    states = handed_over(4, takers, overwrite=overwrite)
    for rank in takers:
        assert State(states[rank]).digest() == State(of(1)).digest()
    assert State(states[3]).digest() == State(of(3)).digest(), "who takes no part keeps its own"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_state_that_is_not_what_was_told_is_not_believed(overwrite: bool) -> None:
    with pytest.raises(gw.StateLost, match=r"from rank 1 has the digest [0-9a-f]{32}, not feed"):
        handed_over(2, [0], overwrite=overwrite, digest="feed")
