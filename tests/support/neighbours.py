"""The steps by which ranks of a host come to share memory, with any way to tell all others what each gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire.transports.shm.shared_memory import SharedMemory, Sharing


def share(
    rank: int, hosts: Sequence[object], wanted: bool, tell_all: Callable[[Any], list[Any]], deadline: float
) -> tuple[SharedMemory | None, tuple[bool, ...]]:
    """What a rank shares in the end, and which ranks do."""
    with Sharing(rank, hosts, wanted) as sharing:
        dialled = tell_all(sharing.dial(tell_all(sharing.offer()), deadline))
        return sharing.keep(tell_all(sharing.answer(dialled)))
