"""The composition root: who am I, where are the others, and the group that connects us."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradwire import agreement, core, machine, tuning
from gradwire.config import DEFAULT_TIMEOUT, Address, JobConfig, resolve
from gradwire.environments import torchrun
from gradwire.errors import Broken, Closed, ConfigError, InvalidSize, UnsupportedOp
from gradwire.generation import Generation, Identity
from gradwire.group import WORLD, Group
from gradwire.liveness.verdict import Finding
from gradwire.membership import Assembly, Member
from gradwire.membership.addresses import resolve as endpoints
from gradwire.membership.doorkeeper import Doorkeeper
from gradwire.security.secret import derive, job_secret
from gradwire.topology import Topology
from gradwire.transports.local import Hub
from gradwire.transports.tcp import TcpTransport

if TYPE_CHECKING:
    from gradwire.membership.service import Coordinator

log = logging.getLogger("gradwire")

HOST = "GRADWIRE_HOST"  # overrides the identity of this machine: several "hosts" on one, for tests

_live: weakref.WeakSet[Generation] = weakref.WeakSet()
_hooked = threading.Lock()
_hooks_set = False


def init(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    *,
    transport: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
    insecure: bool = False,
) -> Group:
    """Join the job and return the group of all its ranks, when all of them have come.

    What is None comes from the environment: `GRADWIRE_*`, or the variables of torchrun, Slurm, Open MPI and PMI
    launchers. With nothing said and nothing found the job has one rank. `timeout` holds for the rendezvous and for each
    blocking call that names none. Ranks of one host share memory where they can; with transport "tcp" they do not, and
    "shm" insists that all do. Addresses beyond this machine need `insecure=True`, because links do not encrypt.

    >>> import gradwire as gw
    >>> with gw.init() as group:
    ...     group.rank, group.size
    (0, 1)
    """
    config = resolve(rank, size, address, transport=transport, timeout=timeout, insecure=insecure)
    if config.transport not in ("auto", "shm", "tcp"):
        text = f"transport {config.transport!r} is not built yet; there are 'shm' and 'tcp'"
        raise UnsupportedOp(text, operation="init")
    if config.size == 1 and config.address is None:
        return _local(1, config.timeout)[0]
    deadline = time.monotonic() + config.timeout
    if core.native is None and (reason := core.why_pure()) and not core.is_unwanted():
        log.warning("collectives run in Python, which is slower: gradwire has no native core here, %s", reason)
    return _join(config, deadline)


def local_group(n: int) -> list[Group]:
    """The groups of n ranks in this process, one for each thread that the caller starts: no sockets, same errors.

    >>> import gradwire as gw, threading
    >>> groups = gw.local_group(2)
    >>> sums = []
    >>> threads = [threading.Thread(target=lambda g=g: sums.append(g.all_reduce(g.rank + 1))) for g in groups]
    >>> for thread in threads: thread.start()
    >>> for thread in threads: thread.join()
    >>> sums
    [3, 3]
    >>> for group in groups: group.close()
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidSize(f"a group of {n!r} ranks: there must be at least 1")
    return _local(n, DEFAULT_TIMEOUT)


def _local(n: int, timeout: float) -> list[Group]:
    hub = Hub(n)
    job = int.from_bytes(secrets.token_bytes(8), "little")
    names = tuple(f"rank {rank} (a thread of this process)" for rank in range(n))
    topology = Topology.single(n)
    generations = [Generation(Identity(job, 1, rank, names, topology), hub.transports[rank]) for rank in range(n)]
    return _start(generations, timeout, time.monotonic() + timeout)


def loopback_pair() -> tuple[Group, Group]:
    """Two ranks of this process connected by TCP on 127.0.0.1 and free ports, for tests; one for each thread.

    >>> import gradwire as gw
    >>> one, two = gw.loopback_pair()
    >>> one.size, two.rank
    (2, 1)
    >>> one.close(); two.close()
    """
    transports = [TcpTransport("127.0.0.1") for _ in range(2)]
    run, key = secrets.token_bytes(16), secrets.token_bytes(32)
    addresses = [transport.address for transport in transports]
    names = tuple(f"rank {rank} (this process, {host}:{port})" for rank, (host, port) in enumerate(addresses))
    generations = []
    for rank, transport in enumerate(transports):
        transport.assemble(rank=rank, addresses=addresses, job=run, generation=1, key=key, cores=0.0)
        identity = Identity(int.from_bytes(run[:8], "little"), 1, rank, names, Topology.single(2))
        generations.append(Generation(identity, transport))
    one, two = _start(generations, DEFAULT_TIMEOUT, time.monotonic() + DEFAULT_TIMEOUT)
    return one, two


def _start(generations: Sequence[Generation], timeout: float, deadline: float) -> list[Group]:
    """Connect generations (all ranks of this process) and make their world groups."""
    _set_hooks()
    groups = []
    try:
        for generation in generations:
            _live.add(generation)
            generation.dial(deadline)
        for generation in generations:
            generation.serve(deadline)
            members = range(generation.identity.size)
            groups.append(Group(generation, members, WORLD, timeout))
        for group in groups:
            group._runner.dial(deadline)
        if len(generations) == generations[0].identity.size:  # all ranks are here, and have nothing to settle
            table = tuning.load(os.environ)
            for generation in generations:
                generation.table = table
    except BaseException as error:
        for generation in generations:
            generation.close(_giving_up(generation, error))
        raise
    return groups


def _giving_up(generation: Generation, error: BaseException) -> Finding | None:
    """What the others are told of a rank that ends with an error: nothing new if they know why."""
    if isinstance(error, (Broken, Closed)) or not generation.control.sound:
        return None
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Finding("aborted", reason[:2000], generation.identity.rank)


# -- a rank among processes -------------------------------------------------------------------------------------------


def _join(config: JobConfig, deadline: float) -> Group:
    from gradwire.membership import client

    address = config.address
    assert address is not None
    if config.address_taken:  # by torchrun's store, through which the ranks agree on another port
        address = Address("127.0.0.1" if torchrun.on_one_host(os.environ) else address.host, 0)
    loopback = address.is_loopback()
    if not loopback and not config.insecure:
        raise ConfigError(
            f"{address} is beyond this machine, and links are not encrypted: "
            "pass insecure=True (GRADWIRE_INSECURE=1) if you trust the network in between"
        )
    secret = job_secret(os.environ, loopback)
    transport = TcpTransport(_own_address(address))
    try:
        with _coordinator(config, address, secret) as coordinator:
            member = _member(config, transport)
            left = max(0.1, deadline - time.monotonic())
            if config.address_taken:
                address = _agreed(config, coordinator, left)
            assembly = client.register(
                str(address), member, size=config.size, secret=secret, job=config.job, timeout=left
            )
        generation = _assemble(assembly, transport, secret)
    except BaseException:
        transport.close()
        raise
    generation.belongings += _doorkeepers(config, address)
    group = _start([generation], config.timeout, deadline)[0]
    try:
        agreement.agree(generation, config.transport, deadline)
    except BaseException as error:
        generation.close(None if isinstance(error, UnsupportedOp) else _giving_up(generation, error))
        raise
    return group


def _agreed(config: JobConfig, coordinator: Coordinator | None, timeout: float) -> Address:
    assert config.address is not None
    offered = coordinator.address if coordinator else None
    agreed = torchrun.agree(config.address.host, config.address.port, offered, timeout, os.environ)
    return Address.parse(agreed, "the address in torchrun's store")


def _coordinator(
    config: JobConfig, address: Address, secret: bytes
) -> contextlib.AbstractContextManager[Coordinator | None]:
    """Rank 0 of a job that nobody else serves is its own coordinator, until all have come."""
    if config.role != "coordinator":
        return contextlib.nullcontext()
    from gradwire.membership.service import Coordinator

    return Coordinator(
        address.host, address.port, size=config.size, secret=secret, job=config.job, insecure=config.insecure
    )


def _doorkeepers(config: JobConfig, address: Address) -> list[Doorkeeper]:
    """Who comes to the coordinator's address after all have come is told so, as long as rank 0 lives."""
    if config.role != "coordinator":
        return []
    reason = f"all {config.size} ranks of the job there have come"
    with contextlib.suppress(OSError):  # somebody was quicker to take the port: then they answer there
        return [Doorkeeper(endpoints(address.host, address.port)[0], reason)]
    return []


def _member(config: JobConfig, transport: TcpTransport) -> Member:
    host, port = transport.address
    return Member(
        id=secrets.token_hex(8),
        rank=config.rank,
        host=os.environ.get(HOST) or machine.identity(),
        hostname=os.environ.get(HOST) or socket.gethostname(),
        pid=os.getpid(),
        address=str(Address(host, port)),
    )


def _assemble(assembly: Assembly, transport: TcpTransport, secret: bytes) -> Generation:
    members = assembly.members
    topology = Topology.of([member.host for member in members])
    places = [Address.parse(member.address, f"the address of {member}") for member in members]
    neighbours = sum(member.host == members[assembly.rank].host for member in members)
    transport.assemble(
        rank=assembly.rank,
        addresses=[(place.host, place.port) for place in places],
        job=assembly.run,
        generation=assembly.generation,
        key=derive(secret, "links", assembly.run),
        cores=machine.usable_cores() / neighbours,
    )
    job = int.from_bytes(assembly.run[:8], "little")
    names = tuple(str(member) for member in members)
    return Generation(Identity(job, assembly.generation, assembly.rank, names, topology), transport)


def _own_address(coordinator: Address) -> str:
    """The address of this machine by which the coordinator's network reaches it."""
    for host in coordinator.resolve():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, coordinator.port or 9))  # sends nothing: it only asks for the route
            return str(probe.getsockname()[0])
    raise ConfigError(f"there is no way from this machine to {coordinator}")


# -- the end of the process, and forks of it --------------------------------------------------------------------------


def _set_hooks() -> None:
    global _hooks_set
    with _hooked:
        if not _hooks_set:
            _hooks_set = True
            atexit.register(_say_goodbye)
            os.register_at_fork(after_in_child=_abandon)


def _say_goodbye() -> None:
    """A process that ends has closed its groups; one that ends with an exception has given up, and says why."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for generation in list(_live):
        with contextlib.suppress(Exception):
            generation.close(None if error is None else _giving_up(generation, error))


def _abandon() -> None:
    """A forked child must not keep its parent's connections open: peers would take a dead rank for a living one."""
    for generation in list(_live):
        generation.abandon()
    _live.clear()
