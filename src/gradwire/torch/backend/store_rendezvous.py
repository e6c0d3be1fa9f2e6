"""How the ranks of a torch process group find each other: through the store that torch gives them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from gradwire.errors import NoConnection
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.host import machine
from gradwire.job import init
from gradwire.job.address import Address
from gradwire.job.config import INSECURE, TRANSPORT, resolve
from gradwire.job.environments.torchrun import HOST as MASTER
from gradwire.job.member_session import HOST
from gradwire.wire import fingerprint

MEETING_SECONDS = 30.0  # at least, however short the timeout of each call is
_UNUSED_PORT = 1  # the ranks agree on another one
_LOOPBACK = "127.0.0.1"


def meet(store: Any, rank: int, size: int, timeout: float) -> Group:
    """Join a job of so many ranks whose processes share this store; all of them call it.

    On one host the user's own secret admits them. Beyond it they need what `gw.init` needs: a token and certificates,
    or `GRADWIRE_INSECURE=1`.
    """
    if size == 1:
        return init.single_rank_group(timeout)
    deadline = time.monotonic() + max(timeout, MEETING_SECONDS)
    # A store may serve one group after another under the same name: each rank counts its own.
    board = _StoreKeys(store, f"gradwire/{store.add(f'gradwire/{rank}', 1)}", size)
    board.write(f"host/{rank}", os.environ.get(HOST) or machine.identity())
    hosts = {board.read(f"host/{other}", f"rank {other} has not come") for other in range(size)}
    place = _LOOPBACK if len(hosts) == 1 else _master(store)

    def agree(offered: str | None, timeout: float) -> str:
        if offered is not None:
            board.write("address", offered)
        return board.read("address", "rank 0 has not told where to meet")

    heeded = {name: value for name in (TRANSPORT, INSECURE) if (value := os.environ.get(name))}
    config = resolve(rank, size, Address(place, _UNUSED_PORT), timeout=timeout, environ=heeded)
    return init.member_session(dataclasses.replace(config, address_taken=True), agree).join_next(
        max(deadline, time.monotonic() + 1.0)
    )


def part(world: Group, ranks: Sequence[int], name: str, times: int, timeout: float) -> Group:
    """A group of some ranks of the world, in this order; the name and how often it was used tell it from others."""
    return GroupInternals(world).form(tuple(ranks), fingerprint("torch", name, times), timeout)


class _StoreKeys:
    """What ranks tell each other in a store."""

    def __init__(self, store: Any, prefix: str, size: int) -> None:
        self._store, self._prefix, self._size = store, prefix, size

    def write(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def read(self, key: str, otherwise: str) -> str:
        try:
            return str(self._store.get(f"{self._prefix}/{key}").decode())
        except RuntimeError as error:  # what torch raises, whatever went wrong
            raise NoConnection(f"{otherwise}, as far as torch's store knows: {error}") from error


def _master(store: Any) -> str:
    """The host of rank 0 as the others know it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get(MASTER)
    if not host:
        raise NoConnection(
            f"the ranks are on several hosts, and neither torch's store nor {MASTER} tells that of rank 0"
        )
    return str(host)
