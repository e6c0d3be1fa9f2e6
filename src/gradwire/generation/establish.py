"""`establish`: connects the ranks of this process with all others, and returns their generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.collectives import Table
from gradwire.errors import ConfigError, UnsupportedOp
from gradwire.generation import handshake
from gradwire.generation.connection import Connection
from gradwire.generation.elastic_membership import ElasticMembership
from gradwire.generation.generation import Generation
from gradwire.generation.handshake import Agreement
from gradwire.generation.lifetime import Lifetime
from gradwire.identity import Identity
from gradwire.liveness.detector import PEER_SECONDS
from gradwire.transports.base import Link, Resource, Transport


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A rank of this process, before it is connected."""

    identity: Identity
    transport: Transport
    member_ids: tuple[str, ...] = ()  # by rank, for the coordinator
    membership: ElasticMembership | None = None  # None: the membership is fixed
    resources: tuple[Resource, ...] = ()  # closed with the generation

    def cut_off(self) -> list[int]:
        """Return the world ranks of the members whose links fault injection cuts."""
        cuts = self.membership.cuts() if self.membership is not None else ()
        peers = [self.member_ids.index(member) for member in cuts if member in self.member_ids]
        return [peer for peer in peers if peer != self.identity.rank]


def establish(
    endpoints: Sequence[Endpoint],
    *,
    world_channel: int,
    deadline: float,
    table: Table | None = None,
    wanted_transport: str = "auto",
    peer_timeout: float = PEER_SECONDS,
    begun: Callable[[Lifetime], None] = lambda lifetime: None,
) -> list[Generation]:
    """Connect ranks of this process with all others, and return their generations.

    If it fails, everything is closed, and the other ranks learn the reason.

    Args:
        endpoints: The ranks of this process.
        world_channel: The channel of the group of all ranks. Its links are dialled here too.
        deadline: The `time.monotonic()` by which all ranks must be connected.
        table: The tuning table, if all ranks are in this process. Such ranks do not share memory and need no
            heartbeats, so there is nothing to agree on. Without a table, the ranks agree on the table, shared memory
            and heartbeats over their control links, and each rank needs a call of its own on its own thread.
        wanted_transport: The transport that the user asked for.
        peer_timeout: How many seconds ranks on other hosts may be silent.
        begun: Called with each generation's lifetime before any link is opened.
    """
    if table is None and len(endpoints) != 1:
        raise ValueError("without a tuning table, each rank needs a call of its own")
    connections = [Connection(one.identity, one.transport, one.cut_off, one.resources) for one in endpoints]
    world_links: list[list[Link]] = [[] for _ in endpoints]

    def dial_world() -> None:
        for connection, links in zip(connections, world_links, strict=True):
            below = range(connection.identity.rank)
            connection.connect_all(below, world_channel, deadline, "subgroup", links.append)

    try:
        for connection in connections:
            begun(connection.lifetime)
            connection.open_control_links(deadline)
        for connection in connections:
            connection.await_control_links(deadline)
        if table is not None:
            dial_world()
            agreements = [Agreement(table, None, (False,) * one.identity.size) for one in endpoints]
        else:
            agreements = [handshake.agree(connections[0], wanted_transport, peer_timeout, deadline, dial_world)]
    except BaseException as error:
        for endpoint, connection in zip(endpoints, connections, strict=True):
            _give_up(connection, endpoint.membership, error)
        raise
    made = zip(connections, agreements, endpoints, world_links, strict=True)
    return [_generation(connection, agreement, endpoint, links) for connection, agreement, endpoint, links in made]


def _generation(
    connection: Connection, agreement: Agreement, endpoint: Endpoint, world_links: Sequence[Link]
) -> Generation:
    membership = endpoint.membership
    if membership is not None:  # not earlier: closing a generation that could not be set up must not leave the job
        connection.lifetime.add_resource(membership)
    return Generation(connection, agreement, endpoint.member_ids, membership, world_links)


def _give_up(connection: Connection, membership: ElasticMembership | None, error: BaseException) -> None:
    if membership is not None:
        membership.set_up_failed(connection.failure.unreachable())
    if is_known_to_others(error, elastic=membership is not None):
        connection.lifetime.close()
    else:
        connection.lifetime.give_up(error)


def is_known_to_others(error: BaseException, *, elastic: bool) -> bool:
    """Whether the other ranks know why the set-up failed here, without a report of this rank.

    `UnsupportedOp` is raised on every rank. In an elastic job `ConfigError` is raised on every rank too, or only on the
    rank at fault, and the other ranks continue without it.
    """
    return isinstance(error, UnsupportedOp) or (elastic and isinstance(error, ConfigError))
