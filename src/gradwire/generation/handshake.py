"""What ranks in several processes agree on before the first call: the table that algorithms are chosen by, which ranks
share memory, and how each shows that it lives."""

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
    """What a rank sends first: the version of this protocol, its run, the transport that it asks for, its tuning table
    if it is rank 0, its profile, and an offer to share memory."""

    protocol: int
    run: str
    wish: str
    table: Any
    profile: Any
    offer: Any

    @classmethod
    def of(cls, rank: int, told: object, identity: Identity) -> Entry:
        """The entry of a rank; `ConfigError` blames that rank for one that others cannot work with."""
        name = identity.names[rank]
        match told:
            case [int(protocol), str(run), str(wish), table, profile, offer]:
                if protocol != PROTOCOL:
                    text = f"{name} uses set-up protocol {protocol}, and this rank uses {PROTOCOL}"
                    raise ConfigError(f"{text}: install the same gradwire on all machines", peer=rank)
                if run != identity.run.hex():
                    raise ConfigError(f"{name} is in run {run[:32]}, and this rank in {identity.run.hex()}", peer=rank)
                return cls(protocol, run, wish, table, profile, offer)
        raise ConfigError(
            f"{name} sets up a generation in another way: install the same gradwire on all machines", peer=rank
        )


class Agreement(NamedTuple):
    """What all ranks of a generation know when it begins."""

    table: Table  # by which algorithms are chosen
    shared: SharedMemory | None  # with the other ranks on this rank's host
    sharing: tuple[bool, ...]  # by world rank: whether it shares memory with the others on its host


def agree(
    connection: Connection,
    wanted_transport: str,
    peer_timeout: float,
    deadline: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Agreement:
    """Agree on everything; all ranks of the job call it together, when they have control links.

    `meanwhile` is something to do while the others' first messages are on their way.
    """
    identity = connection.identity
    if identity.size == 1:
        meanwhile()
        return Agreement(tuning_table.load(os.environ), None, (False,))
    table = tuning_table.load(os.environ) if identity.rank == 0 else None

    def tell(value: Any) -> Callable[[], list[Any]]:
        return connection.control_gather.begin_gather(value, "init", max(0.1, deadline - time.monotonic()))

    encoded = table and tuning_table.encode(table)
    own = HeartbeatProfile.own(peer_timeout)
    hosts = [identity.topology.host_of(rank) for rank in range(identity.size)]
    with Sharing(identity.rank, hosts, wanted_transport != "tcp" and native_core.available()) as offers:
        first = Entry(PROTOCOL, identity.run.hex(), wanted_transport, encoded, own.to_wire(), offers.offer())
        hear = tell(list(first))
        meanwhile()
        entries = [Entry.of(rank, told, identity) for rank, told in enumerate(hear())]
        agreed_table = _table(entries[0].table)
        hear = tell(offers.dial([entry.offer for entry in entries], deadline))
        connection.start_heartbeats(own, offers.arena)
        complete = offers.answer(hear())
        shared, sharing = offers.keep(tell(complete)())
        if shared is not None:
            connection.share_memory(shared)
    _check_wanted(sharing, [entry.wish for entry in entries])
    connection.connect_lifeline(shared, deadline)
    if len(identity.topology.hosts) > 1 or not all(sharing):  # then some ranks have links to make
        tell(None)()
    connection.service.lifeline.watch([HeartbeatProfile.from_wire(entry.profile) for entry in entries])  # all beat
    connection.service.wake()
    return Agreement(agreed_table, shared, sharing)


def _table(value: Any) -> Table:
    """Rank 0's table is everybody's: ranks that choose by different ones would not understand each other."""
    try:
        return tuning_table.decode(value)
    except ValueError as error:
        raise ConfigError(f"rank 0's tuning cannot be used here, {error}: is it the same gradwire?", peer=0) from error


def _check_wanted(sharing: tuple[bool, ...], wishes: list[str]) -> None:
    """Ranks that cannot or will not share memory go on with sockets, unless a rank insists on memory."""
    missing = [rank for rank, shares in enumerate(sharing) if not shares]
    if "shm" in wishes and missing:  # an error on every rank, so that none has to guess why others left
        insisting = [rank for rank, wish in enumerate(wishes) if wish == "shm"]
        raise UnsupportedOp(
            f"rank {insisting[0]} asks for transport 'shm', and ranks {missing} cannot share memory: they need "
            "the native core, and others on the same host; 'auto' shares memory where it can and uses TCP elsewhere",
            operation="init",
            peer=max(*insisting, *missing),  # newcomers have the highest ranks: the others can go on without
        )
