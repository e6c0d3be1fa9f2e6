"""The composition root: who am I, where are the others, and the group that connects us."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradwire.collectives import Table, tuning_table
from gradwire.generation.establish import Endpoint, establish
from gradwire.generation.generation import Generation
from gradwire.group import WORLD, Group, collective_channel
from gradwire.host import native_core
from gradwire.identity import Identity, new_run
from gradwire.job import process_hooks
from gradwire.job.config import DEFAULT_TIMEOUT, JobConfig, resolve
from gradwire.job.member_session import Agree, MemberSession
from gradwire.liveness.call_log import call_site
from gradwire.topology import Topology
from gradwire.transports.tcp.transport import TcpTransport

if TYPE_CHECKING:
    from gradwire.job.thread_job import ThreadJob
    from gradwire.transports.local import LocalTransport

log = logging.getLogger("gradwire")


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
    "shm" insists that all do. Addresses beyond this machine need certificates, or `insecure=True`.

    A process is in one job at a time: `init` raises `ConfigError` while the group of an earlier `init` is open. The
    error gives the file and line of that earlier call.

    >>> import gradwire as gw
    >>> with gw.init() as group:
    ...     group.rank, group.size
    (0, 1)
    """
    process_hooks.check_not_initialised()
    site = call_site()
    config = resolve(rank, size, address, transport=transport, timeout=timeout, insecure=insecure)
    if config.size == 1 and config.address is None and not config.elastic:
        return process_hooks.keep(alone(config.timeout), site)
    deadline = time.monotonic() + config.timeout
    if native_core.native is None and (reason := native_core.why_pure()) and not native_core.is_unwanted():
        log.warning("collectives run in Python, which is slower: gradwire has no native core here, %s", reason)
    return MemberSession(config, connect_member, initialised_at=site).take(deadline)


def alone(timeout: float) -> Group:
    """The group of a job of one."""
    from gradwire.transports.local import Hub

    identity = Identity(new_run(), 1, 0, ("rank 0 (this process)",), Topology.single(1))
    endpoint = Endpoint(identity, Hub(1).transports[0])
    table = tuning_table.load(os.environ)
    return connect_in_process([endpoint], table, timeout, time.monotonic() + timeout)[0]


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
    return thread_job(DEFAULT_TIMEOUT).begin(n)


def loopback_pair() -> tuple[Group, Group]:
    """Two ranks of this process connected by TCP on 127.0.0.1 and free ports, for tests; one for each thread.

    >>> import gradwire as gw
    >>> one, two = gw.loopback_pair()
    >>> one.size, two.rank
    (2, 1)
    >>> one.close(); two.close()
    """
    transports = [TcpTransport("127.0.0.1") for _ in range(2)]
    run, key = new_run(), secrets.token_bytes(32)
    addresses = [transport.address for transport in transports]
    names = tuple(f"rank {rank} (this process, {host}:{port})" for rank, (host, port) in enumerate(addresses))
    endpoints = []
    for rank, transport in enumerate(transports):
        transport.assemble(rank=rank, addresses=addresses, job=run, generation=1, key=key, cores=0.0)
        identity = Identity(run, 1, rank, names, Topology.single(2))
        endpoints.append(Endpoint(identity, transport))
    table = tuning_table.load(os.environ)
    one, two = connect_in_process(endpoints, table, DEFAULT_TIMEOUT, time.monotonic() + DEFAULT_TIMEOUT)
    return one, two


# -- putting the parts together ---------------------------------------------------------------------------------------


def member_session(config: JobConfig, agree: Agree | None = None) -> MemberSession:
    """A session of this process in the job of a configuration."""
    return MemberSession(config, connect_member, agree)


def thread_job(timeout: float, on_call: Callable[[str, LocalTransport], None] | None = None) -> ThreadJob:
    """A job whose members are threads of this process; `on_call` gets a member's id and transport at each call."""
    from gradwire.job.thread_job import ThreadJob  # loads the coordinator's state machine

    return ThreadJob(timeout, connect_in_process, on_call)


def connect_member(endpoint: Endpoint, config: JobConfig, deadline: float) -> Group:
    """Connect this process with all other ranks; the group of them."""
    generations = establish(
        [endpoint],
        world_channel=collective_channel(WORLD),
        deadline=deadline,
        wanted_transport=config.transport,
        peer_timeout=config.peer_timeout,
        begun=process_hooks.track,
    )
    return _world(generations[0], config.timeout)


def connect_in_process(endpoints: Sequence[Endpoint], table: Table, timeout: float, deadline: float) -> list[Group]:
    """Connect ranks of this process, where all others are as well; the group of each."""
    channel = collective_channel(WORLD)
    generations = establish(endpoints, world_channel=channel, deadline=deadline, table=table, begun=process_hooks.track)
    return [_world(generation, timeout) for generation in generations]


def _world(generation: Generation, timeout: float) -> Group:
    return Group(generation, range(generation.identity.size), WORLD, timeout, generation.world_links)
