"""Runs the coordinator, which serves a job's membership with gRPC.

It is embedded in rank 0, started by a launcher, or started alone with `gradwire coordinator`.
"""

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
from gradwire.membership.coordinator.admission_rules import DEFAULT_LEASE
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

LEAST_LEASE, MOST_LEASE = 0.5, 86_400.0  # seconds
_LIMITS = Limits()
_CALLS = 8  # concurrent calls on one connection
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 * 1024),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.max_concurrent_streams", _CALLS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),  # launchers ping the coordinator
]


class Coordinator:
    """Serves the membership of one job at `host`:`port`. Port 0 chooses a free one.

    The first generation has `size` members. With a `minimum` or a `maximum` the job is elastic: it continues after
    losses, and further members may join. With a `journal`, a coordinator that is restarted on the same file continues
    where the previous one ended, with the `lease` that it is given.
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
        retire: Callable[[Path], None] = lambda path: None,
        credentials: Credentials | None = None,
        lease: float = DEFAULT_LEASE,
        lasting: bool = False,
        failed: Callable[[JournalError], None] = lambda error: None,
        limits: Limits = _LIMITS,
    ) -> None:
        """Prepare the coordinator; `start` starts it.

        `failed` is called once if the journal cannot be written. After that no call is answered any more. Without
        `durable`, the journal is not flushed to the disk: it survives a crash of the coordinator, but perhaps not one
        of the machine. `retire` is called with the journal's path before it is opened and after it is closed, so that
        it can move the journal of an ended job aside. A member that sends no heartbeat for `lease` seconds is removed,
        and the others are told.
        `lasting`: the coordinator serves until the job ends, so the members of a static job send heartbeats, too.
        `limits` are the limits of connections.
        """
        self._host, self._port = host, port
        self._insecure = insecure
        self._credentials = credentials
        self._covered: dict[tuple[str, ...], set[str]] = {}  # cache: the members that each certificate covers
        if credentials is not None and job not in (None, credentials.job):
            raise ConfigError(f"the certificate is for job {credentials.job}, and this is job {job}")
        name = job or (credentials.job if credentials is not None else secrets.token_hex(8))
        if not LEAST_LEASE <= lease <= MOST_LEASE:
            raise ConfigError(f"a lease has {LEAST_LEASE:g} to {MOST_LEASE:g} seconds, not {lease:g}")
        membership = Membership(
            name, new_run(), start=size, minimum=minimum, maximum=maximum, lease=lease, lasting=lasting
        )
        self._health = Health()
        self._report_failure = failed
        self._limits = limits
        self._servicer = CoordinatorServicer(
            membership,
            CoordinatorSeal(secret),
            caller_refusal=self._objection,
            proved=lambda caller: caller.proved(),
            failed=self._failed,
            seconds_between_heartbeats=limits.seconds_between_heartbeats,
        )
        self._named = job is not None or credentials is not None
        self._journal_file, self._durable, self._journal = journal, durable, contextlib.ExitStack()
        self._retire = retire
        self._resumed = False
        self._server: Any = None
        self._pid = 0

    @property
    def address(self) -> str:
        """The address for clients: "host:port", or "[host]:port" for an IPv6 address."""
        return join(self._host, self._port)

    @property
    def job(self) -> str:
        """The job's name, random if none was given."""
        return self._servicer.membership.terms.job

    @property
    def run(self) -> bytes:
        """The id of this run of the job. With a journal it stays the same after a restart."""
        return self._servicer.membership.terms.run

    @property
    def resumed(self) -> str:
        """What the coordinator resumed from its journal, for messages; empty if it began a new run."""
        membership = self._servicer.membership
        if not self._resumed:
            return ""
        members = membership.roster.size()
        what = f"run {self.run.hex()} at generation {membership.generation}"
        return f"{what} with {members} {'member' if members == 1 else 'members'}"

    def start(self) -> None:
        """Start listening. When this returns, workers can register."""
        endpoint = resolve(self._host, self._port)[0]
        if not endpoint.loopback and not self._insecure and self._credentials is None:
            raise ConfigError(
                f"other machines could reach a coordinator at {self.address}, and its connections are not encrypted: "
                "give it certificates (GRADWIRE_TLS_CA, _CERT and _KEY; `gradwire certs` creates them), "
                "listen on 127.0.0.1, or pass insecure=True (GRADWIRE_INSECURE=1) in a network that you trust"
            )
        self._proxy = ConnectionProxy(endpoint, self._limits)
        try:
            self._open_journal()
            self._serve()
        except BaseException:
            self._proxy.close()
            self._journal.close()
            raise

    def _open_journal(self) -> None:
        if self._journal_file is None:
            return
        from gradwire.membership.coordinator.journal import Journal  # loads SQLite

        name = self.job
        self._retire(self._journal_file)
        journal = self._journal.enter_context(Journal(self._journal_file, durable=self._durable))
        self._resumed = self._servicer.resume(journal)
        if self._named and self.job != name:
            raise ConfigError(f"the journal {self._journal_file} belongs to job {self.job}, and this is job {name}")

    def _serve(self) -> None:
        calls = THREADS + _CALLS * self._limits.unproven  # so that unproven connections cannot occupy members' threads
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
                f"the coordinator at {self.address} cannot create a socket in the folder for temporary files "
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
        """Stop, after all waiting processes have received a final answer or `grace` seconds have passed. Idempotent."""
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
        if self._journal_file is not None:
            with contextlib.suppress(JournalError):  # the next start tries again, and reports what is wrong
                self._retire(self._journal_file)

    def cut_off(self) -> None:
        """Close the address and all connections without a last answer, as a crash would. For tests."""
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
        """Return why a caller may not make calls for members; None if its certificate covers them."""
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
    """Wraps the servicer for gRPC, so that each call's context has the client's address instead of the proxy's."""

    def __init__(self, servicer: CoordinatorServicer, proxy: ConnectionProxy) -> None:
        self._servicer, self._proxy = servicer, proxy

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        answer = getattr(self._servicer, method)
        return lambda request, context: answer(request, _Caller(context, self._proxy))


class _Caller:
    """The context of a call that came through the proxy."""

    def __init__(self, context: Any, proxy: ConnectionProxy) -> None:
        self._context, self._proxy = context, proxy
        self._connection = proxy.find(context.peer())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def peer(self) -> str:
        """Return the client's address, "host:port"."""
        return self._connection.address if self._connection is not None else "a client that has disconnected"

    def proved(self) -> None:
        """Record that the call has proved the job's secret."""
        if self._connection is not None:
            self._proxy.proved(self._connection)
