"""Gives a worker node the group of its generation: a listener from the registration on, links on request."""

from __future__ import annotations

import os
import threading
import time

from gradwire.errors import Closed, ConfigError, GradwireError
from gradwire.generation.establish import Endpoint
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.job import data_links
from gradwire.job.address import Address
from gradwire.job.config import JobConfig
from gradwire.job.init import connect_member
from gradwire.membership import Assembly
from gradwire.security.credentials import Credentials
from gradwire.security.tokens import Token
from gradwire.transports.tcp.transport import TcpTransport


class NodeGroup:
    """The group of one generation after the other. `listen` begins with the next one."""

    def __init__(self, config: JobConfig, secret: bytes | Token, credentials: Credentials | None) -> None:
        """`config` has the coordinator's address, and the timeouts and the transport of the groups."""
        self._config, self._secret, self._credentials = config, secret, credentials
        self._transport: TcpTransport | None = None  # listens for the other nodes; a group takes it over
        self._group: Group | None = None
        # Why there is no group. `listen` changes that.
        self._error: GradwireError | None = ConfigError(
            "this worker node was given an endpoint, so it brings its own data plane and has no group"
        )
        self._listened = 0  # how often `listen` and `close` were called
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def listen(self) -> str:
        """End the group of the last generation, and return the address at which this node listens for the next one."""
        self.close()
        address = self._config.address
        assert address is not None
        self._error = None
        self._transport = data_links.new_transport(self._config.transport, address, self._credentials)
        return data_links.address_of(self._transport)

    def connect(self, assembly: Assembly) -> Group:
        """Return the group of a generation. The first call connects the links to all other nodes."""
        with self._lock:
            if self._group is not None:
                return self._group
            if self._error is not None:
                raise self._error
            number, transport, self._transport = self._listened, self._transport, None
            assert transport is not None
            self._error = Closed("connecting the group of this worker node was interrupted")
            try:
                group = self._connected(assembly, transport)
            except BaseException as error:
                transport.close()
                if isinstance(error, GradwireError) and number == self._listened:
                    self._error = error
                raise
            if number != self._listened:
                group.close()
                raise Closed("this worker node was closed while it connected its group")
            self._group = group
            return group

    def _connected(self, assembly: Assembly, transport: TcpTransport) -> Group:
        identity = data_links.assemble(assembly, transport, self._secret)
        ids = tuple(member.id for member in assembly.members)
        return connect_member(Endpoint(identity, transport, ids), self._config, time.monotonic() + self._config.timeout)

    def unreachable(self) -> tuple[str, ...]:
        """Return the ids of the members that this node itself could not reach through its group."""
        return () if self._group is None else GroupInternals(self._group).unreachable_members()

    def close(self) -> None:
        """Close the group and the listener. Idempotent. A thread that connects a group meanwhile closes that group."""
        self._listened += 1
        self._error = Closed("this worker node has closed its group; `rejoin` enters the next generation")
        group, self._group = self._group, None
        transport, self._transport = self._transport, None
        if group is not None:
            group.close()
        if transport is not None:
            if self._pid == os.getpid():
                transport.close()
            else:
                transport.abandon()


def config_of(address: str, *, transport: str, timeout: float, insecure: bool) -> JobConfig:
    """Return the configuration of a node's groups. The ranks of a group come from the coordinator, not from here."""
    from gradwire.job.config import resolve

    found = resolve(0, 1, address, transport=transport, timeout=timeout, insecure=insecure)
    return JobConfig(
        address=Address.parse(address),
        transport=found.transport,
        timeout=found.timeout,
        peer_timeout=found.peer_timeout,
        insecure=found.insecure,
        served=True,
    )
