"""This rank's connections with all others of its generation: who dials whom, and when to stop waiting."""

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

EXPECTED_SECONDS = 3.0  # of waiting for a rank to dial, after which to look whether it is still there


class Connection:
    """The served links of a rank, from the first to the last; of each pair of ranks the higher one dials."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        cut_off: Callable[[], Iterable[int]] = tuple,
        resources: Iterable[Resource] = (),
    ) -> None:
        """`cut_off` are the world ranks with which links are to end on purpose."""
        self.identity = identity
        self.transport = transport
        rounds = GatherRounds(identity.size)
        self.service = ServiceThread(identity, transport, rounds, cut_off)
        self.failure = self.service.failure
        self.control = self.service.control
        self.control_gather = ControlGather(self.failure, rounds)
        self.lifetime = Lifetime(self.service, (transport, *resources))

    def open_control_links(self, deadline: float) -> None:
        """Begin to serve, and dial the control links to the ranks below."""
        self.service.start()
        below = range(self.identity.rank)
        self.connect_all(below, CONTROL_CHANNEL, deadline, "init", self.service.add_control_link)

    def await_control_links(self, deadline: float) -> None:
        """Wait for the ranks above to have dialled. One that is lost meanwhile ends the wait."""
        look_at = time.monotonic() + EXPECTED_SECONDS
        above = range(self.identity.rank + 1, self.identity.size)
        while missing := self.service.unconnected(above):
            self.service.await_connected(above, CHECK_SECONDS)
            self.failure.check("init")
            now, name = time.monotonic(), self.identity.names[missing[0]]
            if now >= deadline:
                raise NoConnection(f"{name} did not connect in time", peer=missing[0])
            if now >= look_at:
                look_at = now + EXPECTED_SECONDS
                if not self.transport.listens(missing[0]):
                    reason = ConnectionRefusedError(f"nobody listens any more where {name} did")
                    raise NoConnection(f"{name} has registered and then ended", peer=missing[0]) from reason

    def connect(self, peer: int, channel: int, deadline: float, operation: str) -> Link:
        """A link to a world rank; fails as soon as it is known that the rank has left or the generation is broken."""
        made: list[Link] = []
        self.connect_all([peer], channel, deadline, operation, made.append)
        return made[0]

    def connect_all(
        self, peers: Sequence[int], channel: int, deadline: float, operation: str, made: Callable[[Link], None]
    ) -> None:
        """The same, to several ranks at a time; `made` gets each link as soon as it is there."""

        def check() -> None:
            self.failure.check(operation)
            for peer in peers:
                if self.control.has_left(peer):
                    raise self.failure.lost(peer, operation, f" during {operation}")

        check()
        try:
            self.transport.dial_all(peers, channel, deadline, made, check)
        except NoConnection as error:
            if error.peer is not None:
                self.failure.await_reason(error.peer)
            check()
            raise

    # -- showing that this rank lives ---------------------------------------------------------------------------------

    def start_heartbeats(self, own: HeartbeatProfile, arena: OwnArena | None) -> None:
        """Show the others that this rank lives, in memory that some of them may come to see."""
        self.lifetime.add_resource(self.service.lifeline)
        self.service.lifeline.begin(own.native, arena)

    def share_memory(self, shared: SharedMemory) -> None:
        """Watch the processes of the ranks with which this one shares memory."""
        self.lifetime.add_resource(shared)
        self.failure.use_memory(shared)
        self.service.watch_processes(shared)

    def connect_lifeline(self, shared: SharedMemory | None, deadline: float) -> None:
        """Show the ranks that share no memory with this one that it lives, too."""

        def dial(peer: int) -> Link:
            return self.connect(peer, LIFELINE_CHANNEL, deadline, "init")

        self.service.lifeline.connect(shared, self.identity.size, self.transport, dial)
