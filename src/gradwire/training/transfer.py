"""Transfers state from one rank to others: in chunks, in a group of their own, digest-checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import StateLost
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.training.state import MAX_SKELETON, State, digest_of, memory_for

CHUNK = 16 << 20  # of many takers: they pass a large message on while it comes
CHUNK_FOR_ONE = 1 << 20  # of one: it is still in the processor's caches when it is looked at


def hand_over(group: Group, state: State, giver: int, takers: Sequence[int], digest: str, *, overwrite: bool) -> int:
    """Make the takers' state the giver's, whose digest was told before; how many bytes that were. They all call it.

    With `overwrite` a taker may lose its own state when this breaks.
    """
    members = sorted([giver, *takers])
    root, internals = members.index(giver), GroupInternals(group)
    with contextlib.closing(internals.form(members, -internals.gathers)) as circle:
        if group.rank == giver:
            return _give(circle, state, root)
        return _take(circle, state, root, giver, digest, overwrite)


def _give(circle: Group, state: State, root: int) -> int:
    skeleton, leaves = state.take_apart()
    head = np.frombuffer(skeleton, np.uint8)
    circle.broadcast(np.array([head.size], np.int64), root)
    _spread(circle, [head, *leaves], root)
    return head.size + sum(leaf.nbytes for leaf in leaves)


def _take(circle: Group, state: State, root: int, giver: int, digest: str, overwrite: bool) -> int:
    length = int(circle.broadcast(np.zeros(1, np.int64), root)[0])
    if not 0 < length <= MAX_SKELETON:
        raise StateLost(f"rank {giver} announces a state whose description has {length} bytes", peer=giver)
    head = np.empty(length, np.uint8)
    _spread(circle, [head], root)
    skeleton = head.tobytes()
    own = state.own_memory(skeleton) if overwrite else None
    try:
        leaves = own or memory_for(skeleton)
    except ValueError as error:
        raise StateLost(f"the state of rank {giver} cannot be taken in here: {error}", peer=giver) from error
    arrived = digest_of(skeleton)
    _spread(circle, leaves, root, arrived.update if own else _no_look)
    state.put_together(skeleton, leaves)
    # What was copied once more may differ from what has arrived.
    found = arrived.hexdigest() if own and state.lies_in(own) else state.digest()
    if found != digest:
        raise StateLost(f"the state that came from rank {giver} has the digest {found}, not {digest}", peer=giver)
    return length + sum(leaf.nbytes for leaf in leaves)


def _no_look(chunk: memoryview) -> None:
    """For chunks that are looked at later."""


def _spread(circle: Group, parts: Sequence[Array], root: int, look: Callable[[memoryview], object] = _no_look) -> None:
    """The root's bytes to all, in chunks: so that a large state needs no longer timeout than a small one.

    `look` is called with each chunk as it comes, while the next one is on its way.
    """
    length = CHUNK_FOR_ONE if circle.size == 2 else CHUNK
    for part in parts:
        if not part.size:
            continue
        flat = np.frombuffer(arrays.raw(part.reshape(-1)), np.uint8)
        for start in range(0, flat.size, length):
            chunk = flat[start : start + length]
            circle.broadcast(chunk, root)
            look(chunk.data)
