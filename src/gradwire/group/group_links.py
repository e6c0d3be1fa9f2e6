"""The links between the ranks of a group, and the executor that uses them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import cast

from gradwire.errors import NoConnection
from gradwire.executors.native import Descriptor, NativeExecutor
from gradwire.executors.python import CallHeader, PythonExecutor
from gradwire.generation.generation import Generation
from gradwire.generation.waiting import OperationWait
from gradwire.host import native_core
from gradwire.topology import Topology
from gradwire.transports.base import Link


class GroupLinks:
    """The links of one rank to the others of a group: it dials those below it and accepts those above."""

    def __init__(
        self,
        generation: Generation,
        members: Sequence[int],
        channel: int,
        topology: Topology,
        links: Iterable[Link],
    ) -> None:
        """`links` to lower ranks were dialled already, on this channel."""
        self.topology = topology
        self.rank = members.index(generation.identity.rank)
        self._generation = generation
        self._members = tuple(members)  # world ranks, by rank in the group
        self._channel = channel
        self._links = {self._members.index(link.peer): link for link in links}

    @property
    def is_native(self) -> bool:
        """Whether the native core carries out this group's schedules. It does not speak TLS."""
        alarm = self._generation.failure.alarm
        plain = not self._speaks_tls
        return len(self._members) > 1 and plain and native_core.available() and isinstance(alarm, Descriptor)

    @property
    def _speaks_tls(self) -> bool:
        """Whether messages of this group are encrypted: not if all of them go through memory. Alike on all ranks."""
        in_memory = len(self.topology.hosts) == 1 and self._generation.shares(self._members[0])
        return self._generation.transport.encrypted and not in_memory

    @property
    def shares_memory(self) -> bool:
        """Whether some of this group's messages to this rank go through memory."""
        shared = self._generation.shared
        return shared is not None and self.is_native and any(world in shared.peers for world in self._members)

    @property
    def hosts_share(self) -> bool:
        """Whether ranks of the same host share memory, on all hosts.

        All ranks must see this alike; they do, since they have agreed on who shares memory.
        """
        families = [ranks for ranks in self.topology.hosts if len(ranks) > 1]
        shares = [self._generation.shares(self._members[rank]) for ranks in families for rank in ranks]
        return bool(shares) and all(shares) and not self._speaks_tls

    @property
    def all_share(self) -> bool:
        """Whether all ranks of the group share the memory of one host."""
        return self.hosts_share and len(self.topology.hosts) == 1

    def dial(self, deadline: float) -> None:
        """Open the links to the lower ranks; those of the higher ones come by themselves."""
        below = self._members[: self.rank]
        self._generation.connection.connect_all(below, self._channel, deadline, "subgroup", self._add)

    def _add(self, link: Link) -> None:
        self._links[self._members.index(link.peer)] = link

    def accept(self, wait: OperationWait) -> None:
        """Wait until the higher ranks have opened theirs."""
        for rank in range(self.rank + 1, len(self._members)):
            while rank not in self._links:
                try:
                    soon = time.monotonic() + 0.1
                    self._links[rank] = self._generation.transport.accept(self._members[rank], self._channel, soon)
                except NoConnection:
                    if self._generation.control.has_left(self._members[rank]):
                        raise wait.lost(self._members[rank]) from None
                    wait.wait((), ())

    def executor(self, call: CallHeader) -> PythonExecutor | NativeExecutor:
        """What carries out schedules over these links; with the core, through memory where that is shared."""
        if not self.is_native:
            return PythonExecutor(self._links.__getitem__)
        generation, shared = self._generation, self._generation.shared
        executor = NativeExecutor(call, len(self._members), cast(Descriptor, generation.failure.alarm))
        for rank, link in self._links.items():
            executor.connect(rank, self._members[rank], link)  # type: ignore[arg-type]
        if shared is not None and self.shares_memory:
            arenas = {rank: shared.peers[world] for rank, world in enumerate(self._members) if world in shared.peers}
            executor.share(shared.own, arenas)
        return executor

    def close(self) -> None:
        """Close all links, and those of higher ranks that nobody has accepted yet, or that come later."""
        for link in list(self._links.values()):
            link.close()
        self._generation.transport.adopt(self._channel, lambda link: link.close())
