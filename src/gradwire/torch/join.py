"""`DistributedDataParallel.join`: training when some ranks run out of data before others."""

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
    """Exchanges gradients when some ranks may have no data; implemented by `Reducer`."""

    uneven: bool  # whether ranks may have no data; then the ranks exchange weights in each backward pass

    def sit_out(self) -> bool:
        """Take part in an exchange without data. Return False if no rank had data."""


@dataclass(frozen=True)
class Replica:
    """The parts of a `DistributedDataParallel` that `joined` needs."""

    group: Callable[[], Group]  # returns the group of the current generation
    reducer: UnevenReducer
    check_model: Callable[[], None]  # checks that all ranks have the same model
    arrays: Callable[[], dict[str, Any]]  # returns all replicated arrays
    zero_grad: Callable[[], None]


@contextlib.contextmanager
def joined(model: Replica, states: Sequence[Any]) -> Iterator[None]:
    """Implement `DistributedDataParallel.join`."""
    from gradwire.training.state import State  # imported here, because most programs do not use join

    replicated = [State(one) for one in states]  # raises now if a state cannot be sent
    reducer, rounds = model.reducer, 0
    model.check_model()
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
    rounds_without_data = group.all_gather_values(rounds)
    if any(rounds_without_data):
        last = rounds_without_data.index(0)
        broadcast_named(group, model.arrays(), root=last)
        for state in replicated:
            broadcast_state(group, state, last)


def _sat_out(reducer: UnevenReducer) -> bool:
    """Take part in an exchange without data, and return whether other ranks had data.

    A `NotFinite` error is left to the ranks with data: they may skip the step and continue.
    """
    try:
        return reducer.sit_out()
    except NotFinite:
        return True


def first_with_data(group: Group, has_data: bool) -> int:
    """Return the lowest rank that has data, or 0 if there is none. All ranks call it."""
    lowest = int(group.all_reduce(group.rank if has_data else group.size, op="min"))
    return lowest % group.size


def broadcast_state(group: Group, state: State, root: int) -> None:
    """Copy the root's state to all ranks."""
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
