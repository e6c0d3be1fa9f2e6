"""`Generation`: the objects that the groups of one numbered membership use.

`establish` makes it, with all links open and the set-up agreed on. All groups of a generation break together, on all
ranks, with one error.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.generation.connection import Connection
from gradwire.generation.elastic_membership import ElasticMembership
from gradwire.generation.handshake import Agreement
from gradwire.transports.base import Link


class Generation:
    """One rank's side of one numbered membership."""

    def __init__(
        self,
        connection: Connection,
        agreement: Agreement,
        member_ids: tuple[str, ...],
        membership: ElasticMembership | None,
        world_links: Sequence[Link],
    ) -> None:
        self.identity = connection.identity
        self.transport = connection.transport
        self.connection = connection
        self.failure = connection.failure
        self.lifetime = connection.lifetime
        self.service = connection.service
        self.control = connection.control
        self.control_gather = connection.control_gather
        self.lifeline = connection.service.lifeline
        self.mailbox = connection.service.mailbox
        self.table = agreement.table  # the tuning table, which decides the algorithms
        self.shared = agreement.shared  # the memory shared by the ranks of this host, or None
        self.sharing = agreement.sharing  # by world rank: whether it shares memory with the others on its host
        self.member_ids = member_ids  # by rank, for the coordinator
        self.membership = membership  # None: the membership is fixed, and no generation follows
        self.world_links = tuple(world_links)  # to the lower ranks, for the group of all ranks

    def shares(self, world: int) -> bool:
        """Whether a world rank shares memory with all others on its host."""
        return self.sharing[world]

    def close(self) -> None:
        """Say goodbye to the other ranks and close everything. Calling it again has no effect."""
        self.lifetime.close()
