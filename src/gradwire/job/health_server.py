"""Serves the standard health check `grpc.health.v1` in a worker's process, at an address of its own.

Only this module loads gRPC in a worker, and only a worker that asks for it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from gradwire.errors import ConfigError, TransportError
from gradwire.membership.coordinator.health import Health
from gradwire.membership.endpoints import join, resolve, split
from gradwire.membership.grpc_import import grpc
from gradwire.security.credentials import Credentials

_WATCHERS = 4
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port that another process uses is an error, not a port to share
    ("grpc.max_receive_message_length", 1024),
    ("grpc.max_metadata_size", 8 * 1024),
]


class HealthServer:
    """Answers health checks at "host:port"; port 0 takes a free port. Callers need no secret.

    With certificates a caller needs one of the job. Without them, the address must be on this machine unless
    `insecure`.
    """

    def __init__(self, address: str, credentials: Credentials | None, *, insecure: bool) -> None:
        host, port = split(address)
        endpoint = resolve(host, port)[0]
        if not (endpoint.loopback or insecure or credentials):
            raise ConfigError(
                f"other machines could reach the health check at {address}, and it is not encrypted: set certificates, "
                "use 127.0.0.1, or pass insecure=True if you trust the network"
            )
        self._health = Health(_WATCHERS, services=("",))
        self._pid = os.getpid()
        self._pool = ThreadPoolExecutor(_WATCHERS + 2, thread_name_prefix="gradwire-health")
        self._server = grpc.server(self._pool, options=_OPTIONS, maximum_concurrent_rpcs=4 * _WATCHERS)
        self._server.add_generic_rpc_handlers((self._health.handler(),))
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(str(endpoint))
            else:
                bound = self._server.add_secure_port(str(endpoint), credentials.grpc_server())
        except RuntimeError as error:
            self._pool.shutdown()
            raise TransportError(f"the health check cannot listen at {address}: {error}") from error
        self.address = join(host, bound)
        self._server.start()

    def set(self, serving: bool) -> None:
        """Report from now on whether the worker serves."""
        self._health.set(serving)

    def close(self) -> None:
        """Report to watchers that the worker no longer serves, and stop. It does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        self._health.close()
        self._server.stop(grace=1.0).wait()
        self._pool.shutdown()
