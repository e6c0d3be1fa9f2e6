"""A process's place in a job, for its life: it performs what `SessionProtocol` asks for, with sockets."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import secrets
import socket
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
from gradwire.host import machine, native_core
from gradwire.identity import Identity
from gradwire.job import process_hooks
from gradwire.job.address import Address
from gradwire.job.config import JobConfig
from gradwire.job.environments import torchrun
from gradwire.job.session_protocol import Failure, Past, Register, Repeat, Request, SessionProtocol, SetUp
from gradwire.membership import Assembly, Member
from gradwire.membership.client.news_pipe import NewsReader
from gradwire.membership.closed_listener import ClosedListener
from gradwire.membership.endpoints import resolve as endpoints
from gradwire.security import tokens
from gradwire.security.credentials import Credentials
from gradwire.security.secret import derive
from gradwire.topology import Topology
from gradwire.transports.tcp.transport import TcpTransport

if TYPE_CHECKING:
    from gradwire.membership.client.worker_lease import Lease
    from gradwire.membership.coordinator.service import Coordinator
    from gradwire.membership.sealing import WorkerSeal
    from gradwire.membership.types import News

log = logging.getLogger("gradwire")

HOST = "GRADWIRE_HOST"  # overrides the identity of this machine: several "hosts" on one, for tests
LEAVE_SECONDS = 1.0  # for the coordinator to hear that a member has left
TELL_SECONDS = 5.0  # between two lines about what a member waits for

Agree = Callable[[str | None, float], str]
"""The address at which the ranks meet, from the one that offers it, within so many seconds."""
Connect = Callable[[Endpoint, JobConfig, float], Group]
"""Connects this rank with the others before a deadline, and returns the group of all."""


class MemberSession:
    """What stays the same from one generation to the next: the member's id, the coordinator, the secret."""

    def __init__(
        self,
        config: JobConfig,
        connect: Connect,
        agree: Agree | None = None,
        initialised_at: tuple[CodeType, int] | None = None,
    ) -> None:
        """`agree` is how ranks tell each other where to meet, where the address in the configuration is taken.

        `initialised_at` is the user's call of `gw.init`; None if the session was not made by `gw.init`.
        """
        assert config.address is not None
        self.config = config
        self._connect = connect
        self._initialised_at = initialised_at
        self._address = config.address
        self._agree = agree or self._agree_under_torchrun
        if config.address_taken:  # by torchrun's store, through which the ranks agree on another port
            here = agree is None and torchrun.on_one_host(os.environ)
            self._address = Address("127.0.0.1" if here else config.address.host, 0)
        self._credentials = Credentials.from_environ(os.environ)
        self._secret = self._secret_for(self._address)
        self._id = config.member or _new_id(self._credentials)
        self._job = config.job or (self._credentials.job if self._credentials else None)
        self._seal: WorkerSeal | None = None  # for all registrations, from the first one on
        self._succession = threading.Lock()
        self._protocol = SessionProtocol(config.elastic)
        self._news = _news_pipe() if config.elastic else None
        self._lease: Lease | None = None

    def _secret_for(self, address: Address) -> bytes | tokens.Token:
        """What to prove at an address, if it is one that this process may go to."""
        loopback = address.is_loopback()
        if not loopback and not self.config.insecure and self._credentials is None:
            raise ConfigError(
                f"{address} is beyond this machine, and links are not encrypted: make certificates with "
                "`gradwire certs` and set GRADWIRE_TLS_CA, GRADWIRE_TLS_CERT and GRADWIRE_TLS_KEY, or pass "
                "insecure=True (GRADWIRE_INSECURE=1) if you trust the network in between"
            )
        return tokens.secret_or_token(os.environ, loopback)

    def take(self, deadline: float) -> Group:
        """The group of the next generation. In an elastic job members that are lost meanwhile are done without."""
        joining = _Joining(self, deadline)
        drive(self._protocol.next_generation(), joining.perform)
        assert joining.group is not None
        return process_hooks.keep(joining.group, self._initialised_at)

    def next(self, generation: Generation, timeout: float) -> Group:
        """Leave a generation, broken or not, and take part in the next; who asks late gets the present one."""
        with self._succession:
            present = process_hooks.current()
            if generation.identity.number < self._protocol.generation and present is not None:
                return present
            deadline = time.monotonic() + timeout
            broken = not generation.control.intact
            leave = self._leave(generation)
            del generation
            if not broken:  # then this can be done while the next one comes together
                leaving = threading.Thread(target=_logged(leave), name="gradwire-leave", daemon=True)
                leaving.start()
                try:
                    return self.take(deadline)
                finally:
                    leaving.join()
            leave()
            gc.collect()  # the error and the frames that raised it refer to each other, and to arrays in shared memory
            return self.take(deadline)

    def _leave(self, generation: Generation) -> Callable[[], None]:
        """Remember for the coordinator whom this process could not reach; what this returns ends the generation."""
        membership, stood_still = generation.membership, generation.lifeline.standstill.lately(time.monotonic())
        stranger = membership is not None and membership.lacks_state
        self._protocol.leave(generation.failure.unreachable(), stranger=stranger, stood_still=stood_still)
        if membership is not None:
            membership.go_on()
        return generation.close

    # -- what the protocol asks for -----------------------------------------------------------------------------------

    def register(self, past: Past, transport: TcpTransport, deadline: float) -> Assembly | Failure:
        """The next generation, from the coordinator."""
        try:
            return self._ask(past, transport, deadline)
        except BaseException as error:
            transport.close()
            if isinstance(error, GradwireError):
                return Failure(error)
            raise

    def set_up(self, request: SetUp, transport: TcpTransport, deadline: float) -> Group | Failure:
        """The group of a generation, when its members are connected."""
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
        return TcpTransport(_own_address(self._address), self._credentials)

    def _elastic_membership(self, joined: bool) -> ElasticMembership:
        """How this member gets to the generation after the one that it has registered for."""
        if self._news is not None:
            news, cuts = self._own_news(self._news.latest), self._news.cuts
            return ElasticMembership(self.next, self.give_up, joined=joined, news=news, cuts=cuts)
        if self._lease is None:  # nobody speaks for this worker
            from gradwire.membership.client.worker_lease import Lease

            self._lease = Lease(
                str(self._address), self._id, run=self._protocol.run, secret=self._secret, credentials=self._credentials
            )
            self._lease.start()
        lease = self._lease
        lease.enter(self._protocol.run)
        news = self._own_news(lambda: lease.news)
        return ElasticMembership(self.next, self.give_up, joined=joined, news=news)

    def _own_news(self, latest: Callable[[], News | None]) -> Callable[[], News | None]:
        """The latest news, unless it is of another run."""

        def own() -> News | None:
            news = latest()
            return news if self._protocol.concerns(news) else None

        return own

    # -- finding the others -------------------------------------------------------------------------------------------

    def _ask(self, past: Past, transport: TcpTransport, deadline: float) -> Assembly:
        from gradwire.membership.client import requests
        from gradwire.membership.sealing import WorkerSeal

        config = self.config
        self._seal = self._seal or WorkerSeal(self._secret)
        with self._coordinator() as coordinator:
            left = max(0.1, deadline - time.monotonic())
            if config.address_taken:
                agreed = self._agree(coordinator.address if coordinator else None, left)
                self._address = Address.parse(agreed, "the address that the ranks agreed on")
                self._secret_for(self._address)  # checks it too: the ranks' store proves nothing
            first = past.generation == 0
            self._place = self._member(transport, config.rank if first else None)
            return requests.register(
                str(self._address),
                self._place,
                size=config.size if first else None,
                secret=self._secret,
                job=self._job,
                timeout=left,
                **asdict(past),
                transport=config.transport if config.transport == "shm" or native_core.available() else "tcp",
                credentials=self._credentials,
                waiting=_WaitReporter(),
                seal=self._seal,
            )

    def give_up(self, finished: bool) -> None:
        """Tell the coordinator that this member has left for good, and whether all work is done."""
        from gradwire.membership.client import requests

        if self._lease is not None:
            self._lease.close()
        with contextlib.suppress(GradwireError):
            requests.unregister(
                str(self._address),
                self._place,
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
        """Rank 0 of a job that nobody else serves is its own coordinator, until all have come."""
        config = self.config
        if config.role != "coordinator":
            return contextlib.nullcontext()
        from gradwire.membership.coordinator.service import Coordinator

        assert config.size is not None
        if not isinstance(self._secret, bytes):
            raise ConfigError("a join token is for joining: who serves the rendezvous needs the job's secret itself")
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
        """Who comes to the coordinator's address after all have come is told so, as long as rank 0 lives."""
        if self.config.role != "coordinator":
            return []
        reason = f"all {self.config.size} ranks of the job there have come"
        with contextlib.suppress(OSError):  # somebody was quicker to take the port: then they answer there
            return [ClosedListener(endpoints(self._address.host, self._address.port)[0], reason)]
        return []

    def _member(self, transport: TcpTransport, rank: int | None) -> Member:
        host, port = transport.address
        return Member(
            id=self._id,
            rank=rank,
            host=os.environ.get(HOST) or machine.identity(),
            hostname=os.environ.get(HOST) or socket.gethostname(),
            pid=os.getpid(),
            address=str(Address(host, port)),
            started=machine.process_started(),
        )

    # -- becoming a generation ----------------------------------------------------------------------------------------

    def _assemble(self, assembly: Assembly, transport: TcpTransport, joined: bool) -> Endpoint:
        members = assembly.members
        topology = Topology.of([member.host for member in members])
        places = [_place_of(rank, member) for rank, member in enumerate(members)]
        neighbours = sum(member.host == members[assembly.rank].host for member in members)
        transport.assemble(
            rank=assembly.rank,
            addresses=[(place.host, place.port) for place in places],
            job=assembly.run,
            generation=assembly.generation,
            key=self._link_key(assembly),
            cores=machine.usable_cores() / neighbours,
            members=[member.id for member in members],
        )
        names = tuple(str(member) for member in members)
        identity = Identity(assembly.run, assembly.generation, assembly.rank, names, topology)
        ids = tuple(member.id for member in members)
        membership = self._elastic_membership(joined) if self.config.elastic else None
        return Endpoint(identity, transport, ids, membership, tuple(self._closed_listeners()))

    def _link_key(self, assembly: Assembly) -> bytes:
        if isinstance(self._secret, bytes):
            return derive(self._secret, "links", assembly.run)
        assert assembly.link_key is not None  # told to whoever came with a join token
        return assembly.link_key


class _Joining:
    """One way into the next generation: performs what the protocol asks for, until `group` is there."""

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
                log.warning("generation %d did not come about: %s", generation, error)
        return None


def _place_of(rank: int, member: Member) -> Address:
    try:
        return Address.parse(member.address, f"the address of {member}")
    except ConfigError as error:
        raise ConfigError(str(error), peer=rank) from error


def _logged(act: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            act()
        except Exception:
            log.exception("the generation that was left could not be closed")

    return run


class _WaitReporter:
    """Tells in the log what a member waits for, when that is new or has lasted."""

    def __init__(self) -> None:
        self._told: tuple[str, float] = ("", 0.0)

    def __call__(self, reason: str) -> None:
        now, kind = time.monotonic(), re.sub(r"\d+", "", reason)  # a count-down is nothing new
        if kind != self._told[0] or now - self._told[1] >= TELL_SECONDS:
            self._told = (kind, now)
            log.info("waiting: %s", reason)


@functools.cache
def _news_pipe() -> NewsReader | None:
    """The pipe of this process's launcher, which it reads for its whole life."""
    return NewsReader.from_environ()


def _new_id(credentials: Credentials | None) -> str:
    """An id for the life of this process, one that its certificate covers."""
    mine = secrets.token_hex(8)
    return f"{credentials.member}/{mine}" if credentials else mine


def _own_address(coordinator: Address) -> str:
    """The address of this machine by which the coordinator's network reaches it."""
    for host in coordinator.resolve():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, coordinator.port or 9))  # sends nothing: it only asks for the route
            return str(probe.getsockname()[0])
    raise ConfigError(f"there is no way from this machine to {coordinator}")
