"""The agreement between ranks of several processes before the first call.

They agree on the tuning table, on which ranks share memory, and on how each rank sends heartbeats.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gradwire.collectives import Table, tuning_table
from gradwire.errors import ConfigError, UnsupportedOp
from gradwire.generation.connection import Connection
from gradwire.host import native_core
from gradwire.identity import PROTOCOL, Identity
from gradwire.liveness.lifeline import HeartbeatProfile
from gradwire.transports.shm.shared_memory import SharedMemory, Sharing


class Entry(NamedTuple):
    """The first message of a rank: protocol version, run, wanted transport, tuning table (of rank 0 only), heartbeat
    profile, and an offer to share memory."""

    protocol: int
    run: str
    wish: str
    table: Any
    profile: Any
    offer: Any

    @classmethod
    def of(cls, rank: int, fields: object, identity: Identity) -> Entry:
        """Return the entry of a rank; raise `ConfigError` with that rank as `peer` if it does not fit this rank."""
        name = identity.names[rank]
        match fields:
            case [int(protocol), str(run), str(wish), table, profile, offer]:
                if protocol != PROTOCOL:
                    text = f"{name} uses set-up protocol {protocol}, and this rank uses {PROTOCOL}"
                    raise ConfigError(f"{text}: install the same version of gradwire on all machines", peer=rank)
                if run != identity.run.hex():
                    raise ConfigError(
                        f"{name} is in run {run[:32]}, and this rank is in {identity.run.hex()}", peer=rank
                    )
                return cls(protocol, run, wish, table, profile, offer)
        raise ConfigError(
            f"{name} uses another set-up protocol: install the same version of gradwire on all machines", peer=rank
        )


class Agreement(NamedTuple):
    """The result of the handshake."""

    table: Table  # the tuning table, which decides the algorithms
    shared: SharedMemory | None  # with the other ranks of this rank's host
    sharing: tuple[bool, ...]  # by world rank: whether it shares memory with the others on its host


def agree(
    connection: Connection,
    wanted_transport: str,
    peer_timeout: float,
    deadline: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Agreement:
    """Run the handshake. All ranks of the job call it together, once their control links are open.

    `meanwhile` is called while the first messages of the other ranks are in transit.
    """
    identity = connection.identity
    if identity.size == 1:
        meanwhile()
        return Agreement(tuning_table.load(os.environ), None, (False,))
    table = tuning_table.load(os.environ) if identity.rank == 0 else None

    def begin_gather(value: Any) -> Callable[[], list[Any]]:
        return connection.control_gather.begin_gather(value, "init", max(0.1, deadline - time.monotonic()))

    encoded = table and tuning_table.encode(table)
    own = HeartbeatProfile.own(peer_timeout)
    hosts = [identity.topology.host_of(rank) for rank in range(identity.size)]
    with Sharing(identity.rank, hosts, wanted_transport != "tcp" and native_core.available()) as offers:
        first = Entry(PROTOCOL, identity.run.hex(), wanted_transport, encoded, own.to_wire(), offers.offer())
        collect = begin_gather(list(first))
        meanwhile()
        entries = [Entry.of(rank, entry, identity) for rank, entry in enumerate(collect())]
        agreed_table = _table(entries[0].table)
        collect = begin_gather(offers.dial([entry.offer for entry in entries], deadline))
        connection.start_heartbeats(own, offers.arena)
        complete = offers.answer(collect())
        shared, sharing = offers.keep(begin_gather(complete)())
        if shared is not None:
            connection.share_memory(shared)
    _check_wanted(sharing, [entry.wish for entry in entries])
    connection.connect_lifeline(shared, deadline)
    if len(identity.topology.hosts) > 1 or not all(sharing):  # some ranks open lifeline links: wait for them
        begin_gather(None)()
    # From here on every rank sends heartbeats, so their absence means something.
    connection.service.lifeline.watch([HeartbeatProfile.from_wire(entry.profile) for entry in entries])
    connection.service.wake()
    if connection.transport.relayed:  # the memory carries heartbeats only
        return Agreement(agreed_table, None, (False,) * identity.size)
    return Agreement(agreed_table, shared, sharing)


def _table(value: Any) -> Table:
    """Return rank 0's tuning table. All ranks use it: with different tables they would choose different algorithms."""
    try:
        return tuning_table.decode(value)
    except ValueError as error:
        raise ConfigError(
            f"the tuning table of rank 0 cannot be used here ({error}): install the same version of gradwire on all "
            "machines",
            peer=0,
        ) from error


def _check_wanted(sharing: tuple[bool, ...], wishes: list[str]) -> None:
    """Raise if a rank asked for transport "shm" and some ranks do not share memory; without it they use sockets."""
    missing = [rank for rank, shares in enumerate(sharing) if not shares]
    if "shm" in wishes and missing:  # raised on every rank, so that each rank knows the reason
        insisting = [rank for rank, wish in enumerate(wishes) if wish == "shm"]
        raise UnsupportedOp(
            f"rank {insisting[0]} asks for transport 'shm', but ranks {missing} cannot share memory: they need the "
            "native core and other ranks on the same host. 'auto' shares memory where it can and uses TCP elsewhere",
            operation="init",
            peer=max(*insisting, *missing),  # new members have the highest ranks: the others can continue without
        )
