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
    """The links of one rank to the other ranks of a group. It dials lower ranks and accepts links from higher ranks."""

    def __init__(
        self,
        generation: Generation,
        members: Sequence[int],
        channel: int,
        topology: Topology,
        links: Iterable[Link],
    ) -> None:
        """`links` are links to lower ranks that are already dialled, on this channel."""
        self.topology = topology
        self.rank = members.index(generation.identity.rank)
        self._generation = generation
        self._members = tuple(members)  # world ranks, by rank in the group
        self._channel = channel
        self._links = {self._members.index(link.peer): link for link in links}

    @property
    def is_native(self) -> bool:
        """Whether the native core runs this group's schedules. The core does not support TLS and gRPC."""
        alarm = self._generation.failure.alarm
        plain = not self._uses_tls and not self._generation.transport.relayed
        return len(self._members) > 1 and plain and native_core.available() and isinstance(alarm, Descriptor)

    @property
    def _uses_tls(self) -> bool:
        """Whether messages of this group are encrypted. They are not if all of them go through shared memory.

        The answer is the same on all ranks.
        """
        in_memory = len(self.topology.hosts) == 1 and self._generation.shares(self._members[0])
        return self._generation.transport.encrypted and not in_memory

    @property
    def shares_memory(self) -> bool:
        """Whether some of this group's messages to this rank go through shared memory."""
        shared = self._generation.shared
        return shared is not None and self.is_native and any(world in shared.peers for world in self._members)

    @property
    def hosts_share(self) -> bool:
        """Whether ranks of the same host share memory, on all hosts.

        The answer must be the same on all ranks. It is, because the ranks agreed during set-up which of them share
        memory.
        """
        neighbours = [ranks for ranks in self.topology.hosts if len(ranks) > 1]
        shares = [self._generation.shares(self._members[rank]) for ranks in neighbours for rank in ranks]
        return bool(shares) and all(shares) and not self._uses_tls

    @property
    def all_share(self) -> bool:
        """Whether all ranks of the group share the memory of one host."""
        return self.hosts_share and len(self.topology.hosts) == 1

    def dial(self, deadline: float) -> None:
        """Dial the links to the lower ranks. The higher ranks dial the others; `accept` waits for them."""
        below = self._members[: self.rank]
        self._generation.connection.connect_all(below, self._channel, deadline, "subgroup", self._add)

    def _add(self, link: Link) -> None:
        self._links[self._members.index(link.peer)] = link

    def accept(self, wait: OperationWait) -> None:
        """Wait until all higher ranks have dialled their links."""
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
        """Return an executor that runs schedules over these links, through shared memory where the core can use it."""
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
        """Close all links, including links from higher ranks that are not accepted yet or arrive later."""
        for link in list(self._links.values()):
            link.close()
        self._generation.transport.adopt(self._channel, lambda link: link.close())
