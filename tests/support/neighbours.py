"""Runs the steps of `Sharing`, with any function that gathers values of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire.transports.shm.shared_memory import SharedMemory, Sharing


def share(
    rank: int, hosts: Sequence[object], wanted: bool, gather: Callable[[Any], list[Any]], deadline: float
) -> tuple[SharedMemory | None, tuple[bool, ...]]:
    """Return the shared memory of a rank, and for each rank whether it shares memory."""
    with Sharing(rank, hosts, wanted) as sharing:
        dialled = gather(sharing.dial(gather(sharing.offer()), deadline))
        return sharing.keep(gather(sharing.answer(dialled)))
