"""Opens this rank's links with all other ranks of its generation: which rank dials, and when to stop waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from gradwire.errors import NoConnection
from gradwire.generation.control_gather import ControlGather, GatherRounds
from gradwire.generation.lifetime import Lifetime
from gradwire.generation.service_thread import ServiceThread
from gradwire.identity import Identity
from gradwire.liveness.lifeline import HeartbeatProfile
from gradwire.transports.base import CHECK_SECONDS, CONTROL_CHANNEL, LIFELINE_CHANNEL, Link, Resource, Transport
from gradwire.transports.shm.shared_memory import OwnArena, SharedMemory

EXPECTED_SECONDS = 3.0  # while waiting for a rank to dial: interval between checks whether it still listens


class Connection:
    """The links of one rank that the service thread serves. In each pair of ranks the higher rank dials."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        cut_off: Callable[[], Iterable[int]] = tuple,
        resources: Iterable[Resource] = (),
    ) -> None:
        """`cut_off` returns the world ranks whose links fault injection cuts. `resources` close with the generation."""
        self.identity = identity
        self.transport = transport
        rounds = GatherRounds(identity.size)
        self.service = ServiceThread(identity, transport, rounds, cut_off)
        self.failure = self.service.failure
        self.control = self.service.control
        self.control_gather = ControlGather(self.failure, rounds)
        self.lifetime = Lifetime(self.service, (transport, *resources))

    def open_control_links(self, deadline: float) -> None:
        """Start the service thread, and dial the control links to the lower ranks."""
        self.service.start()
        below = range(self.identity.rank)
        self.connect_all(below, CONTROL_CHANNEL, deadline, "init", self.service.add_control_link)

    def await_control_links(self, deadline: float) -> None:
        """Wait until all higher ranks have dialled. Raise if one of them is lost meanwhile."""
        check_at = time.monotonic() + EXPECTED_SECONDS
        above = range(self.identity.rank + 1, self.identity.size)
        while missing := self.service.unconnected(above):
            self.service.await_connected(above, CHECK_SECONDS)
            self.failure.check("init")
            now, name = time.monotonic(), self.identity.names[missing[0]]
            if now >= deadline:
                raise NoConnection(f"{name} did not connect in time", peer=missing[0])
            if now >= check_at:
                check_at = now + EXPECTED_SECONDS
                if not self.transport.listens(missing[0]):
                    reason = ConnectionRefusedError(f"the address of {name} refuses connections")
                    raise NoConnection(f"{name} registered and then ended", peer=missing[0]) from reason

    def connect(self, peer: int, channel: int, deadline: float, operation: str) -> Link:
        """Return a new link to a world rank. Raise as soon as that rank has left or the generation is broken."""
        made: list[Link] = []
        self.connect_all([peer], channel, deadline, operation, made.append)
        return made[0]

    def connect_all(
        self, peers: Sequence[int], channel: int, deadline: float, operation: str, made: Callable[[Link], None]
    ) -> None:
        """Open links to several world ranks at the same time. `made` gets each link as soon as it is open."""

        def check() -> None:
            self.failure.check(operation)
            for peer in peers:
                if self.control.has_left(peer):
                    raise self.failure.lost(peer, operation, self.failure.during(operation))

        check()
        try:
            self.transport.dial_all(peers, channel, deadline, made, check)
        except NoConnection as error:
            if error.peer is not None:
                self.failure.await_reason(error.peer)
            check()
            raise

    # -- liveness -----------------------------------------------------------------------------------------------------

    def start_heartbeats(self, own: HeartbeatProfile, arena: OwnArena | None) -> None:
        """Start this rank's heartbeats, in the memory that other ranks of the host may map later."""
        self.lifetime.add_resource(self.service.lifeline)
        self.service.lifeline.begin(own.native, arena)

    def share_memory(self, shared: SharedMemory) -> None:
        """Use shared memory, and watch the processes of the ranks that share it."""
        self.lifetime.add_resource(shared)
        self.failure.use_memory(shared)
        self.service.watch_processes(shared)

    def connect_lifeline(self, shared: SharedMemory | None, deadline: float) -> None:
        """Open heartbeat links with the ranks that share no memory with this one."""

        def dial(peer: int) -> Link:
            return self.connect(peer, LIFELINE_CHANNEL, deadline, "init")

        self.service.lifeline.connect(shared, self.identity.size, self.transport, dial)
