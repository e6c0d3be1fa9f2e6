"""One numbered membership at work: what its groups use, connected and agreed on when it is made.

A generation connects this rank with all others, and knows whether it is sound. Groups belong to it; when it breaks they
all do, on all ranks, with one error. `establish` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.generation.connection import Connection
from gradwire.generation.elastic_membership import ElasticMembership
from gradwire.generation.handshake import Agreement
from gradwire.transports.base import Link


class Generation:
    """This rank's part in one membership."""

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
        self.table = agreement.table  # by which algorithms are chosen
        self.shared = agreement.shared  # memory, with the other ranks on this rank's host
        self.sharing = agreement.sharing  # by world rank: whether it shares memory with the others on its host
        self.member_ids = member_ids  # by rank, for the coordinator
        self.membership = membership  # None: it is fixed, and no generation follows
        self.world_links = tuple(world_links)  # to the ranks below, for the group of all ranks

    def shares(self, world: int) -> bool:
        """Whether a world rank shares memory with all others on its host."""
        return self.sharing[world]

    def close(self) -> None:
        """Say goodbye and let go of everything; idempotent."""
        self.lifetime.close()
