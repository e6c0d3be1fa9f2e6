"""State transfer from one rank to others: identical bits, and a wrong digest raises StateLost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.training import transfer
from gradwire.training.state import State
from support.ranks import run_ranks

LARGE = transfer.CHUNK_FOR_ONE // 4 * 2 + 3  # several chunks, of which the last is shorter


def of(rank: int) -> dict[str, Any]:
    return {"w": np.full(LARGE, rank, np.float32), "empty": np.zeros((0, 3)), "deep": {"b": np.ones(3) * rank}}


def numbered(rank: int) -> dict[str, Any]:
    """A state whose plain values differ between ranks too, so that the skeletons differ."""
    return of(rank) | {"n": rank}


class Rounding:
    """A state that loads its arrays as another dtype, as some optimizers do."""

    def __init__(self, rank: int) -> None:
        self.moments = np.full(5, rank / 3, np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"m": self.moments.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = state["m"].astype(np.float16).astype(np.float32)


def hand_over(states: Sequence[Any], takers: Sequence[int], *, overwrite: bool, digest: str | None = None) -> None:
    """Rank 1 hands its state to the takers."""
    expected = digest or State(states[1]).digest()

    def exchange(group: gw.Group) -> None:
        if group.rank in (1, *takers):
            transfer.hand_over(group, State(states[group.rank]), 1, takers, expected, overwrite=overwrite)

    run_ranks(gw.local_group(len(states)), exchange)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("takers", [[0], [0, 2]])
@pytest.mark.parametrize("make", [of, numbered])
def test_hand_over_takers_receive_the_state_of_the_giver_in_place(
    make: Callable[[int], Any], takers: list[int], overwrite: bool
) -> None:
    states = [make(rank) for rank in range(4)]
    arrays = [state["w"] for state in states]
    hand_over(states, takers, overwrite=overwrite)
    for rank in takers:
        assert State(states[rank]).digest() == State(make(1)).digest()
    assert State(states[3]).digest() == State(make(3)).digest(), "who takes no part keeps its own"
    assert all(state["w"] is array for state, array in zip(states, arrays, strict=True)), "others may refer to it"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", [of, numbered])
def test_hand_over_wrong_digest_raises_state_lost(make: Callable[[int], Any], overwrite: bool) -> None:
    with pytest.raises(gw.StateLost, match=r"from rank 1 has digest [0-9a-f]{32}, expected feed"):
        hand_over([make(0), make(1)], [0], overwrite=overwrite, digest="feed")


@pytest.mark.parametrize("overwrite", [False, True])
def test_hand_over_state_changed_by_loading_raises_state_lost(overwrite: bool) -> None:
    with pytest.raises(gw.StateLost, match="from rank 1 has digest"):
        hand_over([Rounding(0), Rounding(1)], [0], overwrite=overwrite)
