"""Connects the ranks of a torch process group: they exchange their addresses through torch's store."""

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
from gradwire.job import config_file, init, process_hooks
from gradwire.job.address import Address
from gradwire.job.config import INSECURE, TRANSPORT, resolve
from gradwire.job.data_links import HOST
from gradwire.job.environments.torchrun import HOST as MASTER
from gradwire.security import credentials
from gradwire.wire import fingerprint

RENDEZVOUS_SECONDS = 30.0  # the least time for the rendezvous, even if the timeout of a call is shorter
_UNUSED_PORT = 1  # a placeholder: rank 0 chooses the port and sends it through the store
_LOOPBACK = "127.0.0.1"


def join_world(store: Any, rank: int, size: int, timeout: float) -> Group:
    """Join a job of `size` ranks whose processes share this store. All of them call it.

    On one host, the user's own secret authenticates the ranks. On several hosts they need what `gw.init` needs: a token
    and certificates, or `GRADWIRE_INSECURE=1`.
    """
    if size == 1:
        return process_hooks.set_current(init.single_rank_group(timeout))
    deadline = time.monotonic() + max(timeout, RENDEZVOUS_SECONDS)
    # A store may serve several groups, one after the other. Each rank counts them, and the number is part of all keys.
    keys = _StoreKeys(store, f"gradwire/{store.add(f'gradwire/{rank}', 1)}", size)
    keys.write(f"host/{rank}", os.environ.get(HOST) or machine.identity())
    hosts = {keys.read(f"host/{other}", f"rank {other} has not joined") for other in range(size)}
    host = _LOOPBACK if len(hosts) == 1 else _master(store)

    def agree(offered: str | None, timeout: float) -> str:
        if offered is not None:
            keys.write("address", offered)
        return keys.read("address", "rank 0 has not published its address")

    names = (TRANSPORT, INSECURE, credentials.CA, credentials.CERT, credentials.KEY, config_file.FILE)
    environ = {name: value for name in names if (value := os.environ.get(name))}
    config = resolve(rank, size, Address(host, _UNUSED_PORT), timeout=timeout, environ=environ)
    return init.member_session(dataclasses.replace(config, address_taken=True), agree).join_next(
        max(deadline, time.monotonic() + 1.0)
    )


def part(world: Group, ranks: Sequence[int], name: str, times: int, timeout: float) -> Group:
    """Return a group of some ranks of the world, in this order.

    The name, and how many groups have had this name, identify the group.
    """
    return GroupInternals(world).form(tuple(ranks), fingerprint("torch", name, times), timeout)


class _StoreKeys:
    """The keys of one rendezvous in torch's store."""

    def __init__(self, store: Any, prefix: str, size: int) -> None:
        self._store, self._prefix, self._size = store, prefix, size

    def write(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def read(self, key: str, otherwise: str) -> str:
        try:
            return str(self._store.get(f"{self._prefix}/{key}").decode())
        except RuntimeError as error:  # torch raises this for every kind of failure
            raise NoConnection(f"{otherwise}, according to torch's store: {error}") from error


def _master(store: Any) -> str:
    """Return the host of rank 0, as the other ranks can reach it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get(MASTER)
    if not host:
        raise NoConnection(
            f"the ranks are on several hosts, and neither torch's store nor {MASTER} gives the host of rank 0: "
            f"set {MASTER}"
        )
    return str(host)
