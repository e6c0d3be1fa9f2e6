"""Keep this process in its job from one generation to the next: `MemberSession` runs `SessionProtocol` over sockets."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import CodeType
from typing import TYPE_CHECKING

from gradwire.drive import drive
from gradwire.errors import ConfigError, GradwireError
from gradwire.generation.elastic_membership import ElasticMembership
from gradwire.generation.establish import Endpoint
from gradwire.generation.generation import Generation
from gradwire.group import Group
from gradwire.host import native_core
from gradwire.job import data_links, process_hooks
from gradwire.job.address import Address, check_encrypted
from gradwire.job.config import JobConfig
from gradwire.job.environments import torchrun
from gradwire.job.session_protocol import Failure, Past, Register, Repeat, Request, SessionProtocol, SetUp
from gradwire.membership import Assembly
from gradwire.membership.client.news_pipe import NewsReader
from gradwire.membership.closed_listener import ClosedListener
from gradwire.membership.endpoints import resolve as endpoints
from gradwire.security import tokens
from gradwire.security.secret import with_token
from gradwire.transports.base import Resource
from gradwire.transports.tcp.transport import TcpTransport

if TYPE_CHECKING:
    from gradwire.membership.client.worker_lease import Lease
    from gradwire.membership.coordinator.service import Coordinator
    from gradwire.membership.sealing import WorkerSeal
    from gradwire.membership.types import News

log = logging.getLogger("gradwire")

LEAVE_SECONDS = 1.0  # limit for telling the coordinator that this member leaves
LOG_SECONDS = 5.0  # between two log lines about the same reason for waiting

Agree = Callable[[str | None, float], str]
"""Called with the address that this rank offers (or None) and a timeout; returns the address where all ranks meet."""
Connect = Callable[[Endpoint, JobConfig, float], Group]
"""Connects this rank to the others before a deadline, and returns the group of all ranks."""


class MemberSession:
    """This process as a member of its job: its id, its coordinator and its secret stay the same in all generations."""

    def __init__(
        self,
        config: JobConfig,
        connect: Connect,
        agree: Agree | None = None,
        initialised_at: tuple[CodeType, int] | None = None,
    ) -> None:
        """`agree` lets the ranks agree on an address if a launcher listens at the configured one.

        `initialised_at` is the user's call of `gw.init`; None if the session was not made by `gw.init`.
        """
        assert config.address is not None
        self.config = config
        self._connect = connect
        self._initialised_at = initialised_at
        self._address = config.address
        self._agree = agree or self._agree_under_torchrun
        if config.address_taken:  # torchrun's store listens there; through it the ranks agree on another port
            on_one_host = agree is None and torchrun.on_one_host(os.environ)
            self._address = Address("127.0.0.1" if on_one_host else config.address.host, 0)
        self._credentials = config.tls
        self._secret = self._secret_for(self._address)
        self._id = config.member or data_links.new_id(self._credentials)
        self._job = config.job or (self._credentials.job if self._credentials else None)
        self._seal: WorkerSeal | None = None  # created at the first registration and used for all of them
        self._next_lock = threading.Lock()
        self._protocol = SessionProtocol(config.elastic)
        self._news = _news_pipe() if config.elastic else None
        self._lease: Lease | None = None

    def _secret_for(self, address: Address) -> bytes | tokens.Token:
        """Return the secret to prove at an address. Raise `ConfigError` if this process may not connect to it."""
        check_encrypted(address, insecure=self.config.insecure, credentials=self._credentials)
        return tokens.secret_or_token(with_token(os.environ, self.config.token_file), address.is_loopback())

    def join_next(self, deadline: float) -> Group:
        """Join the next generation and return its group. An elastic job continues without members lost meanwhile."""
        joining = _Joining(self, deadline)
        drive(self._protocol.next_generation(), joining.perform)
        assert joining.group is not None
        return process_hooks.set_current(joining.group, self._initialised_at)

    def next(self, generation: Generation, timeout: float) -> Group:
        """Leave a generation, broken or not, join the next one and return its group.

        If another thread has already joined a later generation, return the current group.
        """
        with self._next_lock:
            current = process_hooks.current()
            if generation.identity.number < self._protocol.generation and current is not None:
                return current
            deadline = time.monotonic() + timeout
            broken = not generation.control.intact
            leave = self._leave(generation)
            del generation
            if not broken:  # an intact generation can close while the next one forms
                leaving = threading.Thread(target=_logged(leave), name="gradwire-leave", daemon=True)
                leaving.start()
                try:
                    return self.join_next(deadline)
                finally:
                    leaving.join()
            leave()
            # The error and the frames that raised it form a reference cycle, which keeps arrays in shared memory alive.
            gc.collect()
            return self.join_next(deadline)

    def _leave(self, generation: Generation) -> Callable[[], None]:
        """Record which members this process could not reach, and return a function that closes the generation."""
        membership, stood_still = generation.membership, generation.lifeline.standstill.lately(time.monotonic())
        lacks_state = membership is not None and membership.lacks_state
        self._protocol.leave(generation.failure.unreachable(), lacks_state=lacks_state, stood_still=stood_still)
        if membership is not None:
            membership.go_on()
        return generation.close

    # -- requests of the protocol -------------------------------------------------------------------------------------

    def register(self, past: Past, transport: TcpTransport, deadline: float) -> Assembly | Failure:
        """Register at the coordinator and return the next generation."""
        try:
            return self._register(past, transport, deadline)
        except BaseException as error:
            transport.close()
            if isinstance(error, GradwireError):
                return Failure(error)
            raise

    def set_up(self, request: SetUp, transport: TcpTransport, deadline: float) -> Group | Failure:
        """Connect the members of a generation and return its group."""
        try:
            endpoint = self._assemble(request.assembly, transport, request.joined)
        except GradwireError as error:
            transport.close()
            return Failure(error)
        if request.within is not None:
            deadline = min(deadline, time.monotonic() + request.within)
        try:
            return self._connect(endpoint, self.config, deadline)
        except BaseException as error:
            if isinstance(error, GradwireError):
                membership = endpoint.membership
                return Failure(error, frozenset() if membership is None else membership.unreachable)
            raise

    def new_transport(self) -> TcpTransport:
        return data_links.new_transport(self.config.transport, self._address, self._credentials)

    def _elastic_membership(self, joined: bool, lease_seconds: float) -> ElasticMembership:
        """Return the functions by which a generation joins its successor, leaves the job and reads the news."""
        if self._news is not None:
            news, cuts = self._news_of_this_run(self._news.latest), self._news.cuts
        else:
            lease = self._renew_lease(lease_seconds)  # no launcher sends heartbeats for this worker
            news, cuts = self._news_of_this_run(lambda: lease.news), frozenset
        return ElasticMembership(
            *(self.next, self.leave_job),
            joined=joined,
            news=news,
            cuts=cuts,
            checkpoint_written=self._checkpoint_written,
        )

    def _checkpoint_written(self, epoch: int) -> None:
        """Report this member's part of a checkpoint to the coordinator. The log shows if that fails."""
        from gradwire.membership.client import requests

        try:
            requests.end_checkpoint(
                str(self._address), self._id, epoch, secret=self._secret, credentials=self._credentials
            )
        except GradwireError as error:
            log.warning("the coordinator does not know that the checkpoint of epoch %d is complete: %s", epoch, error)

    def _renew_lease(self, seconds: float) -> Lease:
        """Send heartbeats for this member from now on."""
        from gradwire.membership.client.worker_lease import Lease

        if self._lease is None:
            self._lease = Lease(
                str(self._address),
                self._id,
                run=self._protocol.run,
                secret=self._secret,
                credentials=self._credentials,
                lease=seconds,
            )
            self._lease.start()
        self._lease.enter(self._protocol.run)
        return self._lease

    def _news_of_this_run(self, latest: Callable[[], News | None]) -> Callable[[], News | None]:
        """Return a function that returns the latest news, or None if the news is about another run."""

        def filtered() -> News | None:
            news = latest()
            return news if self._protocol.concerns(news) else None

        return filtered

    # -- the coordinator ----------------------------------------------------------------------------------------------

    def _register(self, past: Past, transport: TcpTransport, deadline: float) -> Assembly:
        from gradwire.membership.client import requests
        from gradwire.membership.sealing import WorkerSeal

        config = self.config
        self._seal = self._seal or WorkerSeal(self._secret)
        with self._coordinator() as coordinator:
            left = max(0.1, deadline - time.monotonic())
            if config.address_taken:
                agreed = self._agree(coordinator.address if coordinator else None, left)
                self._address = Address.parse(agreed, "the address that the ranks agreed on")
                self._secret_for(self._address)  # raises if the address is not allowed: torchrun's store is not trusted
            first, needs_no_core = past.generation == 0, config.transport in ("shm", "grpc")
            rank = config.rank if first else None
            self._member = data_links.this_process(self._id, rank, data_links.address_of(transport))
            return requests.register(
                str(self._address),
                self._member,
                size=config.size if first else None,
                secret=self._secret,
                job=self._job,
                timeout=left,
                **asdict(past),
                transport=config.transport if needs_no_core or native_core.available() else "tcp",
                credentials=self._credentials,
                waiting=_WaitReporter(),
                seal=self._seal,
            )

    def leave_job(self, finished: bool) -> None:
        """Report to the coordinator that this member leaves the job, and whether all work is done."""
        from gradwire.membership.client import requests

        if self._lease is not None:
            self._lease.close()
        with contextlib.suppress(GradwireError):
            requests.unregister(
                str(self._address),
                self._member,
                secret=self._secret,
                finished=finished,
                run=self._protocol.run,
                timeout=LEAVE_SECONDS,
                credentials=self._credentials,
            )

    def _agree_under_torchrun(self, offered: str | None, timeout: float) -> str:
        assert self.config.address is not None
        return torchrun.agree(self.config.address.host, self.config.address.port, offered, timeout, os.environ)

    def _coordinator(self) -> contextlib.AbstractContextManager[Coordinator | None]:
        """Return the coordinator that rank 0 runs until all ranks have joined, if the job has no separate one."""
        config = self.config
        if config.role != "coordinator":
            return contextlib.nullcontext()
        from gradwire.membership.coordinator.service import Coordinator

        assert config.size is not None
        if not isinstance(self._secret, bytes):
            raise ConfigError("rank 0 serves the rendezvous and needs the job's secret, but it was given a join token")
        host, port = self._address.host, self._address.port
        return Coordinator(
            host,
            port,
            size=config.size,
            secret=self._secret,
            job=self._job,
            insecure=config.insecure,
            credentials=self._credentials,
        )

    def _closed_listeners(self) -> list[ClosedListener]:
        """Return a listener that refuses late processes at the coordinator's address, with the reason.

        It replaces rank 0's coordinator, which stops when all ranks have joined.
        """
        if self.config.role != "coordinator":
            return []
        reason = f"all {self.config.size} ranks of the job there have joined"
        with contextlib.suppress(OSError):  # another process already listens at this port
            return [ClosedListener(endpoints(self._address.host, self._address.port)[0], reason)]
        return []

    # -- the endpoint of a generation ---------------------------------------------------------------------------------

    def _assemble(self, assembly: Assembly, transport: TcpTransport, joined: bool) -> Endpoint:
        identity = data_links.assemble(assembly, transport, self._secret)
        ids = tuple(member.id for member in assembly.members)
        resources: list[Resource] = [*self._closed_listeners()]
        membership = None
        if self.config.elastic:
            membership = self._elastic_membership(joined, assembly.lease)
        elif assembly.lease:  # the coordinator of this static job is there until the job ends
            resources.append(_StaticMembership(self._renew_lease(assembly.lease), self.leave_job))
        return Endpoint(identity, transport, ids, membership, tuple(resources))


class _Joining:
    """One attempt to join the next generation: performs the protocol's requests and holds the resulting `group`."""

    def __init__(self, session: MemberSession, deadline: float) -> None:
        self._session, self._deadline = session, deadline
        self._transport: TcpTransport | None = None
        self.group: Group | None = None

    def perform(self, request: Request) -> Assembly | Failure | None:
        match request:
            case Register(past):
                self._transport = self._session.new_transport()
                return self._session.register(past, self._transport, self._deadline)
            case SetUp():
                assert self._transport is not None
                made = self._session.set_up(request, self._transport, self._deadline)
                if isinstance(made, Failure):
                    return made
                self.group = made
            case Repeat(generation, error):
                if time.monotonic() >= self._deadline:
                    raise error
                log.warning("generation %d could not be set up, trying again: %s", generation, error)
        return None


class _StaticMembership:
    """Renews the lease of a member of a static job while its generation exists, and then leaves the job."""

    def __init__(self, lease: Lease, leave: Callable[[bool], None]) -> None:
        self._lease, self._leave = lease, leave

    def close(self) -> None:
        self._leave(False)

    def abandon(self) -> None:
        self._lease.abandon()


def _logged(act: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            act()
        except Exception:
            log.exception("the previous generation could not be closed")

    return run


class _WaitReporter:
    """Logs why a member waits: when the reason changes, and otherwise every `LOG_SECONDS`."""

    def __init__(self) -> None:
        self._last_logged: tuple[str, float] = ("", 0.0)

    def __call__(self, reason: str) -> None:
        now, kind = time.monotonic(), re.sub(r"\d+", "", reason)  # reasons that differ in numbers only count as equal
        if kind != self._last_logged[0] or now - self._last_logged[1] >= LOG_SECONDS:
            self._last_logged = (kind, now)
            log.info("waiting: %s", reason)


@functools.cache
def _news_pipe() -> NewsReader | None:
    """Return the reader of the launcher's pipe, or None. There is one reader per process."""
    return NewsReader.from_environ()
