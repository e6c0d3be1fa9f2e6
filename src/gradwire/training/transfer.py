"""Copies the state of one rank to others: in chunks, in a temporary subgroup, with a check of the digest."""

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

CHUNK = 16 << 20  # bytes, for several takers: the broadcast pipelines a large message from taker to taker
CHUNK_FOR_ONE = 1 << 20  # bytes, for one taker: the chunk is still in its CPU caches when the digest is computed


def hand_over(group: Group, state: State, giver: int, takers: Sequence[int], digest: str, *, overwrite: bool) -> int:
    """Copy the giver's state to the takers, and return the number of bytes. The giver and all takers call it.

    `digest` is the digest of the giver's state. With `overwrite`, a taker may receive into its own arrays; it then
    loses its own state if the transfer fails. Raise `StateLost` if the state cannot be received.
    """
    members = sorted([giver, *takers])
    root, internals = members.index(giver), GroupInternals(group)
    with contextlib.closing(internals.form(members, -internals.gathers)) as subgroup:
        if group.rank == giver:
            return _send(subgroup, state, root)
        return _receive(subgroup, state, root, giver, digest, overwrite)


def _send(subgroup: Group, state: State, root: int) -> int:
    skeleton, leaves = state.take_apart()
    head = np.frombuffer(skeleton, np.uint8)
    subgroup.broadcast(np.array([head.size], np.int64), root)
    _broadcast_chunks(subgroup, [head, *leaves], root)
    return head.size + sum(leaf.nbytes for leaf in leaves)


def _receive(subgroup: Group, state: State, root: int, giver: int, digest: str, overwrite: bool) -> int:
    length = int(subgroup.broadcast(np.zeros(1, np.int64), root)[0])
    if not 0 < length <= MAX_SKELETON:
        raise StateLost(f"rank {giver} announced a state description of {length} bytes, which is invalid", peer=giver)
    head = np.empty(length, np.uint8)
    _broadcast_chunks(subgroup, [head], root)
    skeleton = head.tobytes()
    own = state.own_memory(skeleton) if overwrite else None
    try:
        leaves = own or memory_for(skeleton)
    except ValueError as error:
        raise StateLost(f"this rank cannot load the state of rank {giver}: {error}", peer=giver) from error
    arrived = digest_of(skeleton)
    _broadcast_chunks(subgroup, leaves, root, arrived.update if own else _ignore_chunk)
    state.put_together(skeleton, leaves)
    # If the state was loaded into other memory, the copy must be checked too.
    found = arrived.hexdigest() if own and state.lies_in(own) else state.digest()
    if found != digest:
        raise StateLost(f"the state received from rank {giver} has digest {found}, expected {digest}", peer=giver)
    return length + sum(leaf.nbytes for leaf in leaves)


def _ignore_chunk(chunk: memoryview) -> None:
    """Ignore a chunk: the digest is computed later."""


def _broadcast_chunks(
    subgroup: Group,
    parts: Sequence[Array],
    root: int,
    on_chunk: Callable[[memoryview], object] = _ignore_chunk,
) -> None:
    """Broadcast the root's bytes in chunks, so that a large state needs no longer timeout than a small one.

    `on_chunk` is called with each chunk after it has arrived.
    """
    length = CHUNK_FOR_ONE if subgroup.size == 2 else CHUNK
    for part in parts:
        if not part.size:
            continue
        flat = np.frombuffer(arrays.raw(part.reshape(-1)), np.uint8)
        for start in range(0, flat.size, length):
            chunk = flat[start : start + length]
            subgroup.broadcast(chunk, root)
            on_chunk(chunk.data)
