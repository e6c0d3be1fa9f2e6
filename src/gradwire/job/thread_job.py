"""Run a job whose members are threads of this process, through all its generations and without a coordinator."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from gradwire.collectives import Table, tuning_table
from gradwire.drive import drive
from gradwire.errors import GradwireError, InvalidSize, Refused, Timeout
from gradwire.generation.elastic_membership import ElasticMembership
from gradwire.generation.establish import Endpoint
from gradwire.generation.generation import Generation
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.identity import Identity, new_run
from gradwire.job.session_protocol import Failure, Past, Register, Repeat, Request, SessionProtocol, SetUp
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.types import Assembly, Claim, Member, News, Refusal
from gradwire.topology import Topology
from gradwire.transports.local import Hub, LocalTransport

POLL_SECONDS = 0.05  # between two checks whether the next generation has formed
MAX_MEMBERS = 1024

Connect = Callable[[Sequence[Endpoint], Table, float, float], list[Group]]
"""Connects ranks. The arguments are the endpoints, the tuning table, the timeout of the groups, and a deadline."""


class ThreadJob:
    """What the members share: the coordinator's state machine, and a hub of links for each generation."""

    def __init__(
        self, timeout: float, connect: Connect, on_call: Callable[[str, LocalTransport], None] | None = None
    ) -> None:
        """`on_call` is called with the member's id and transport at the start of each call that a member makes."""
        self._timeout = timeout
        self._connect = connect
        self._on_call = on_call
        self._run = new_run()
        self._changed = threading.Condition()
        self._hubs: dict[int, Hub] = {}
        self._table = tuning_table.load(os.environ)
        self._sequence = itertools.count(1)
        self._sessions: dict[str, SessionProtocol] = {}  # by member
        self._current: dict[str, Group] = {}  # by member, for members that have left the first generation

    def begin(self, n: int) -> list[Group]:
        """Form the first generation of n members and return their groups."""
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidSize(f"a group needs at least 1 rank, not {n!r}")
        self._membership = Membership(
            "threads", self._run, start=n, minimum=1, maximum=MAX_MEMBERS, lease=math.inf, settle=0.01
        )
        members = [_member(secrets.token_hex(4), rank) for rank in range(n)]
        claims = [Claim(member, n, None, _session(member), next(self._sequence)) for member in members]
        for claim in claims:
            self._membership.register(claim, time.monotonic())
        entering = [self._session_of(member.id).next_generation() for member in members]
        endpoints = []
        for claim, protocol in zip(claims, entering, strict=True):  # collect all endpoints, then connect them together
            next(protocol)
            assembly = self._membership.outcome(claim, time.monotonic())
            assert isinstance(assembly, Assembly)
            request = protocol.send(assembly)
            assert isinstance(request, SetUp)
            endpoints.append(self._endpoint(request))
        groups = self._connect(endpoints, self._table, self._timeout, time.monotonic() + self._timeout)
        for protocol in entering:
            next(protocol, None)
        return groups

    def join(self) -> Group:
        """Add a member. Blocks until a generation with it forms, and returns its group."""
        return self._join_next(secrets.token_hex(4), self._timeout)

    def _session_of(self, member: str) -> SessionProtocol:
        return self._sessions.setdefault(member, SessionProtocol(elastic=True))

    def _next(self, generation: Generation, timeout: float) -> Group:
        member = generation.member_ids[generation.identity.rank]
        current = self._current.get(member)
        if (
            current is not None
            and current.generation > generation.identity.number
            and not GroupInternals(current).is_closed
        ):
            return current  # the member has already joined a later generation
        membership = generation.membership
        assert membership is not None
        unreachable = generation.failure.unreachable()
        self._session_of(member).leave(unreachable, lacks_state=membership.lacks_state, stood_still=False)
        membership.go_on()
        generation.close()
        return self._join_next(member, timeout)

    def _join_next(self, member: str, timeout: float) -> Group:
        deadline, made = time.monotonic() + timeout, list[Group]()

        def perform(request: Request) -> Assembly | Failure | None:
            match request:
                case Register(past):
                    return self._register(_member(member, None), past, deadline)
                case SetUp():
                    return self._set_up(request, deadline, made)
                case Repeat(_, error):
                    if time.monotonic() >= deadline:
                        raise error
                    return None

        try:
            drive(self._session_of(member).next_generation(), perform)
        except BaseException:
            self.leave(member)
            raise
        self._current[member] = made[0]
        return made[0]

    def _set_up(self, request: SetUp, deadline: float, made: list[Group]) -> Failure | None:
        assert request.within is not None
        endpoint, deadline = self._endpoint(request), min(deadline, time.monotonic() + request.within)
        try:
            made += self._connect([endpoint], self._table, self._timeout, deadline)
        except GradwireError as error:
            assert endpoint.membership is not None
            return Failure(error, endpoint.membership.unreachable)
        return None

    def _register(self, member: Member, past: Past, deadline: float) -> Assembly | Failure:
        with self._changed:
            while True:
                now = time.monotonic()
                claim = Claim(member, None, None, _session(member), next(self._sequence), **asdict(past))
                outcome = self._membership.register(claim, now)
                self._membership.changes()
                if isinstance(outcome, Assembly):
                    self._changed.notify_all()
                    return outcome
                if isinstance(outcome, Refusal):
                    return Failure(Refused(outcome.reason, operation="recover"))
                if now >= deadline:
                    return Failure(Timeout(f"no next generation formed in time: {outcome.reason}", operation="recover"))
                self._changed.wait(POLL_SECONDS)

    def _endpoint(self, request: SetUp) -> Endpoint:
        assembly = request.assembly
        members = assembly.members
        ids = tuple(member.id for member in members)
        hub = self._hubs.setdefault(assembly.generation, self._hub(ids))
        names = tuple(f"rank {rank} (a thread of this process)" for rank in range(len(members)))
        identity = Identity(assembly.run, assembly.generation, assembly.rank, names, Topology.single(len(members)))
        leave = partial(self.leave, ids[assembly.rank])
        membership = ElasticMembership(self._next, leave, joined=request.joined, news=self.news)
        return Endpoint(identity, hub.transports[assembly.rank], ids, membership)

    def _hub(self, ids: tuple[str, ...]) -> Hub:
        on_call = self._on_call
        if on_call is None:
            return Hub(len(ids))
        return Hub(len(ids), lambda transport: on_call(ids[transport.rank], transport))

    def current_group(self, member: str) -> Group | None:
        """Return the group of a member's current generation, or None if that is still the first one."""
        return self._current.get(member)

    def leave(self, member: str, finished: bool = False) -> None:
        """Remove a member that has closed its group and does not join the next generation."""
        self._current.pop(member, None)
        self._sessions.pop(member, None)
        with self._changed:
            self._membership.gone([member], time.monotonic())
            self._changed.notify_all()

    def news(self) -> News:
        """Return what a coordinator would report: how many members there are, and how many wait to join."""
        with self._changed:
            return self._membership.heartbeat((), time.monotonic())


def _member(identity: str, rank: int | None) -> Member:
    return Member(identity, rank, "here", "here", os.getpid(), "thread")


def _session(member: Member) -> bytes:
    return member.id.encode().ljust(16)
