"""The coordinator: the membership behind gRPC, embedded in rank 0, in a launcher, or alone (`gradwire coordinator`)."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradwire.errors import ConfigError, JournalError, TransportError
from gradwire.identity import new_run
from gradwire.membership.coordinator.connection_limits import Limits
from gradwire.membership.coordinator.health import Health
from gradwire.membership.coordinator.proxy import ConnectionProxy
from gradwire.membership.coordinator.servicer import THREADS, CoordinatorServicer
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.endpoints import join, resolve
from gradwire.membership.grpc_import import grpc
from gradwire.membership.sealing import CoordinatorSeal
from gradwire.membership.types import LARGEST_JOB
from gradwire.membership.v1 import gradwire_pb2_grpc as rpc
from gradwire.security.credentials import Credentials

log = logging.getLogger("gradwire.membership")

_LIMITS = Limits()
_CALLS = 8  # at a time on one connection
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 * 1024),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.max_concurrent_streams", _CALLS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),  # launchers make sure that we are there
]


class Coordinator:
    """Serves the membership of one job at `host`:`port`; port 0 takes a free one.

    The first generation has `size` members. With a `minimum` or a `maximum` the job is elastic: it goes on after
    losses, and others may join. With a `journal` what it knows outlives it: started again on the same file, it goes on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        size: int,
        secret: bytes,
        job: str | None = None,
        insecure: bool = False,
        minimum: int | None = None,
        maximum: int | None = None,
        journal: Path | None = None,
        durable: bool = True,
        credentials: Credentials | None = None,
        lease: float = 10.0,
        failed: Callable[[JournalError], None] = lambda error: None,
        limits: Limits = _LIMITS,
    ) -> None:
        """`failed` is called, once, if the journal cannot be written: from then on nobody is told anything. Without
        `durable` nobody waits until it is on the disk either: it outlives the coordinator, but perhaps not the machine.
        `limits` are those of connections.
        """
        self._host, self._port = host, port
        self._insecure = insecure
        self._credentials = credentials
        self._covered: dict[tuple[str, ...], set[str]] = {}  # members by certificate, as found out before
        if credentials is not None and job not in (None, credentials.job):
            raise ConfigError(f"the certificate is for job {credentials.job}, and this is job {job}")
        name = job or (credentials.job if credentials is not None else secrets.token_hex(8))
        membership = Membership(name, new_run(), start=size, minimum=minimum, maximum=maximum, lease=lease)
        self._health = Health()
        self._report_failure = failed
        self._limits = limits
        self._servicer = CoordinatorServicer(
            membership,
            CoordinatorSeal(secret),
            vouched=self._objection,
            proved=lambda caller: caller.proved(),
            failed=self._failed,
            seconds_between_heartbeats=limits.seconds_between_heartbeats,
        )
        self._named = job is not None or credentials is not None
        self._journal_file, self._durable, self._journal = journal, durable, contextlib.ExitStack()
        self._server: Any = None
        self._pid = 0

    @property
    def address(self) -> str:
        """Where it can be reached: "host:port", or "[host]:port" for an IPv6 address."""
        return join(self._host, self._port)

    @property
    def job(self) -> str:
        """The job's name, made up if none was given."""
        return self._servicer.membership.terms.job

    @property
    def run(self) -> bytes:
        """The id of this run of the job, which a journal carries over a restart."""
        return self._servicer.membership.terms.run

    def start(self) -> None:
        """Listen; returns when workers can register."""
        endpoint = resolve(self._host, self._port)[0]
        if not endpoint.loopback and not self._insecure and self._credentials is None:
            raise ConfigError(
                f"a coordinator at {self.address} could be reached from other machines, and it does not encrypt: "
                "give it certificates (GRADWIRE_TLS_CA, _CERT and _KEY; `gradwire certs` makes them), "
                "listen on 127.0.0.1, or pass insecure=True (GRADWIRE_INSECURE=1) in a network that you trust"
            )
        self._proxy = ConnectionProxy(endpoint, self._limits)
        try:
            self._take_journal()
            self._serve()
        except BaseException:
            self._proxy.close()
            self._journal.close()
            raise

    def _take_journal(self) -> None:
        if self._journal_file is None:
            return
        from gradwire.membership.coordinator.journal import Journal  # loads SQLite

        name = self.job
        self._servicer.resume(self._journal.enter_context(Journal(self._journal_file, durable=self._durable)))
        if self._named and self.job != name:
            raise ConfigError(f"the journal {self._journal_file} is of job {self.job}, and this is job {name}")

    def _serve(self) -> None:
        calls = THREADS + _CALLS * self._limits.unproven  # what strangers can begin leaves the members' share alone
        self._pool = ThreadPoolExecutor(calls, thread_name_prefix="gradwire-coordinator")
        server = grpc.server(self._pool, options=_OPTIONS, maximum_concurrent_rpcs=calls)
        callers = _Callers(self._servicer, self._proxy)
        rpc.add_MembershipServicer_to_server(callers, server)  # type: ignore[no-untyped-call]
        server.add_generic_rpc_handlers((self._health.handler(),))
        try:
            if self._credentials is None:
                server.add_insecure_port(self._proxy.inner)
            else:
                server.add_secure_port(self._proxy.inner, self._credentials.grpc_server())
        except RuntimeError as error:
            raise TransportError(
                f"the coordinator at {self.address} cannot make a socket in the folder for temporary files "
                f"({tempfile.gettempdir()}): {error}"
            ) from error
        server.start()
        self._proxy.start()
        self._port = self._proxy.port
        self._clock = threading.Thread(target=self._servicer.keep_time, name="gradwire-coordinator-clock", daemon=True)
        self._clock.start()
        self._health.set(True)
        self._server, self._pid = server, os.getpid()

    def stop(self, grace: float = 5.0) -> None:
        """Stop listening, when all who wait have been told how it ended (at most `grace` seconds). Idempotent."""
        server, self._server = self._server, None
        if server is None or self._pid != os.getpid():  # a forked child must not touch its parent's server
            return
        self._health.close()
        self._servicer.close(grace)
        self._clock.join()
        self._proxy.refuse()
        server.stop(grace=1.0).wait()
        self._proxy.close()
        self._pool.shutdown()
        self._journal.close()

    def cut_off(self) -> None:
        """Close the address and all connections and tell nobody anything, as if this had crashed. For tests."""
        self._proxy.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _failed(self, error: JournalError) -> None:
        self._health.set(False)
        self._report_failure(error)

    def _objection(self, context: Any, names: Iterable[str]) -> str | None:
        """Why a caller may not speak for members: its certificate must cover them."""
        if self._credentials is None:
            return None
        identities = self._credentials.names_of(context.auth_context())
        covered = self._covered.setdefault(identities, set())
        for name in names:
            if name in covered:
                continue
            reason = self._credentials.caller_refusal(context.auth_context(), name)
            if reason is not None:
                return reason
            if len(covered) >= LARGEST_JOB:
                covered.clear()
            covered.add(name)
        return None


class _Callers:
    """The servicer, as gRPC calls it: each call's context names the client's own address, not the proxy's."""

    def __init__(self, servicer: CoordinatorServicer, proxy: ConnectionProxy) -> None:
        self._servicer, self._proxy = servicer, proxy

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        answer = getattr(self._servicer, method)
        return lambda request, context: answer(request, _Caller(context, self._proxy))


class _Caller:
    """The context of a call that came by way of the proxy."""

    def __init__(self, context: Any, proxy: ConnectionProxy) -> None:
        self._context, self._proxy = context, proxy
        self._connection = proxy.find(context.peer())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def peer(self) -> str:
        """Where the client is: "host:port"."""
        return self._connection.address if self._connection is not None else "a client that has gone"

    def proved(self) -> None:
        """The call has proved the job's secret."""
        if self._connection is not None:
            self._proxy.proved(self._connection)
