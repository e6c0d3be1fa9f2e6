"""`DistributedDataParallel.join`: ranks that run out of data before others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gradwire.errors import NotFinite
from gradwire.group import Group
from gradwire.training.contract import broadcast_named

if TYPE_CHECKING:
    from gradwire.training.state import State


class UnevenReducer(Protocol):
    """What exchanges gradients of ranks that may be without data: `Reducer`."""

    uneven: bool  # whether ranks may be without data: then weights are told in each backward

    def sit_out(self) -> bool:
        """Take part in an exchange without data; False if no rank had any."""


@dataclass(frozen=True)
class Replica:
    """What joining needs of a model that is the same on all ranks: a `DistributedDataParallel`."""

    group: Callable[[], Group]  # of the present generation
    reducer: UnevenReducer
    meet: Callable[[], None]  # makes sure that all ranks have the same model
    arrays: Callable[[], dict[str, Any]]  # all that ranks hold alike
    zero_grad: Callable[[], None]


@contextlib.contextmanager
def joined(model: Replica, states: Sequence[Any]) -> Iterator[None]:
    """See `DistributedDataParallel.join`."""
    from gradwire.training.state import State  # loaded by those who join

    travelling = [State(one) for one in states]  # complains now about what cannot be sent
    reducer, rounds = model.reducer, 0
    model.meet()
    reducer.uneven = True
    try:
        yield
        model.zero_grad()
        while _sat_out(reducer):
            model.zero_grad()
            rounds += 1
    finally:
        reducer.uneven = False
    group = model.group()
    waited = group.all_gather_values(rounds)
    if any(waited):
        last = waited.index(0)
        broadcast_named(group, model.arrays(), root=last)
        for state in travelling:
            broadcast_state(group, state, last)


def _sat_out(reducer: UnevenReducer) -> bool:
    """Whether others had data. What is wrong with theirs is theirs to mind: they may leave the step out, and go on."""
    try:
        return reducer.sit_out()
    except NotFinite:
        return True


def first_with_data(group: Group, has_data: bool) -> int:
    """The lowest rank that has data, or 0."""
    lowest = int(group.all_reduce(group.rank if has_data else group.size, op="min"))
    return lowest % group.size


def broadcast_state(group: Group, state: State, root: int) -> None:
    """Let all ranks have the root's."""
    from gradwire.training.state import memory_for

    skeleton, leaves = state.take_apart()
    size = group.broadcast_value(len(skeleton), root)
    head = np.frombuffer(bytearray(skeleton), np.uint8) if group.rank == root else np.empty(size, np.uint8)
    group.broadcast(head, root)
    if group.rank != root:
        leaves = memory_for(head.tobytes())
    for leaf in leaves:
        group.broadcast(leaf, root)
    if group.rank != root:
        state.put_together(head.tobytes(), leaves)
