"""State on its way from one rank to another: in chunks over a link of its own, and checked at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import StateLost
from gradwire.group import SETTLING, Group
from gradwire.training.state import MAX_SKELETON, State, memory_for

CHUNK = 4 << 20


@contextlib.contextmanager
def beside(group: Group) -> Iterator[Group]:
    """A group of the same ranks in which they settle things, beside the user's calls."""
    generation, timeout = group._generation, group._timeout
    private = Group(generation, range(generation.identity.size), SETTLING, timeout)
    try:
        private._runner.dial(time.monotonic() + timeout)
        yield private
    finally:
        private.close()


def give(group: Group, state: State, taker: int) -> int:
    """Send the state to a rank; how many bytes that were."""
    skeleton, leaves = state.take_apart()
    head = np.frombuffer(skeleton, np.uint8)
    group.send(np.array([head.size], np.int64), taker)
    for part in (head, *leaves):
        for chunk in _chunks(part):
            group.send(chunk, taker)
    return head.size + sum(leaf.nbytes for leaf in leaves)


def take(group: Group, state: State, giver: int, digest: str) -> int:
    """Become the giver's state, whose digest was told before; how many bytes that were."""
    length = np.zeros(1, np.int64)
    group.recv(length, giver)
    if not 0 < int(length[0]) <= MAX_SKELETON:
        raise StateLost(f"rank {giver} announces a state whose description has {int(length[0])} bytes", peer=giver)
    head = np.empty(int(length[0]), np.uint8)
    _fill(group, head, giver)
    try:
        leaves = memory_for(head.tobytes())
    except ValueError as error:
        raise StateLost(f"the state of rank {giver} cannot be taken in here: {error}", peer=giver) from error
    for leaf in leaves:
        _fill(group, leaf, giver)
    state.put_together(head.tobytes(), leaves)
    if (found := state.digest()) != digest:
        raise StateLost(f"the state that came from rank {giver} has the digest {found}, not {digest}", peer=giver)
    return head.size + sum(leaf.nbytes for leaf in leaves)


def _fill(group: Group, part: Array, giver: int) -> None:
    for chunk in _chunks(part):
        group.recv(chunk, giver)


def _chunks(part: Array) -> Iterator[Array]:
    flat = np.frombuffer(arrays.raw(part.reshape(-1)), np.uint8) if part.size else np.empty(0, np.uint8)
    return (flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK))
