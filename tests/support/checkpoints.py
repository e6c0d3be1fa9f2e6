"""Writes checkpoints as the ranks of a job would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.training.checkpoints import Checkpoint, CheckpointFolder, Head
from gradwire.training.fence import Fence
from gradwire.training.state import State, names_in


def fence_of(run: int = 1, generation: int = 1) -> Fence:
    """A fence whose run has this number."""
    return Fence(run.to_bytes(16, "big"), generation)


def write_parts(
    folder: CheckpointFolder,
    state: Mapping[str, Any],
    step: int,
    fence: Fence | None = None,
    ranks: int = 2,
    shards: Sequence[Mapping[str, Any]] = (),
) -> Head:
    """Write the parts of all ranks, and return what `publish` needs. Rank r writes every array r, r + ranks, …"""
    fence = fence or fence_of()
    replicated = State(dict(state))
    structure, leaves = replicated.take_apart()
    names = names_in(structure)
    for rank in range(ranks):
        shard = None
        if shards:
            shard_structure, shard_leaves = State(dict(shards[rank])).take_apart()
            shard = (shard_structure, list(zip(names_in(shard_structure), shard_leaves, strict=True)))
        own = list(zip(names, leaves, strict=True))[rank::ranks]
        folder.draft(step, fence).write_part(rank, own, shard=shard)
    return Head(step, fence, ranks, structure, tuple(names), replicated.digest())


def write_checkpoint(
    path: Path,
    state: Mapping[str, Any],
    step: int,
    fence: Fence | None = None,
    ranks: int = 2,
    keep: int = 1000,
    shards: Sequence[Mapping[str, Any]] = (),
) -> Checkpoint:
    """Claim the folder, and write and publish a checkpoint."""
    folder, fence = CheckpointFolder(path, keep), fence or fence_of()
    folder.claim(fence)
    head = write_parts(folder, state, step, fence, ranks, shards)
    return folder.draft(step, fence).publish(head)
