"""Create groups: `gw.init` for a process of a job, `gw.local_group` and `gw.loopback_pair` for threads.

This module is the composition root: it creates the configuration, the member session and the links, and connects them.
"""

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
    config: JobConfig | None = None,
) -> Group:
    """Join the job and return the group of all its ranks.

    The call blocks until all ranks have joined, or in an elastic job until the next generation has formed. Each setting
    comes from the first of these sources that has it: the argument, `config`, the `GRADWIRE_*` variables, the variables
    of the launcher (torchrun, Slurm, Open MPI, or another launcher that uses PMI), the file that `GRADWIRE_CONFIG`
    names. If neither rank nor size is found, the job has one rank.

    - `rank`, `size`: this process's rank, from 0, and the number of ranks in the job.
    - `address`: "host:port" where the ranks meet. Rank 0 listens there, unless `gradwire run` or `gradwire coordinator`
      already does.
    - `transport`: how ranks exchange data. With "auto", ranks on one host use shared memory where possible, and all
      other pairs of ranks use TCP. With "tcp", all ranks use TCP. With "shm", all ranks must share memory, otherwise
      every rank raises `UnsupportedOp`. With "grpc", all ranks use gRPC streams, which is slower, for networks that
      only forward HTTP/2.
    - `timeout`: seconds for joining, and the default for each blocking call of the group.
    - `insecure`: allow plaintext links to other machines. By default an address outside of this machine needs the
      certificates that `gradwire certs` makes, and `ConfigError` is raised without them.
    - `config`: these and other settings as an object, see `JobConfig`.

    Errors:

    - `ConfigError`: the settings are wrong. Nothing was started.
    - `NoConnection`: no process answers at the address.
    - `Refused`: the job does not accept this process, for example because another process has its rank.
    - `Timeout`: not all ranks have joined in time. The message names the missing ranks.

    A process is in one job at a time: `init` raises `ConfigError` while the group of an earlier `init` is open. The
    error gives the file and line of that earlier call.

    >>> import gradwire as gw
    >>> with gw.init() as group:
    ...     group.rank, group.size
    (0, 1)
    """
    process_hooks.check_not_initialised()
    site = call_site()
    found = resolve(rank, size, address, transport=transport, timeout=timeout, insecure=insecure, config=config)
    if found.size == 1 and found.address is None and not found.elastic:
        return process_hooks.set_current(single_rank_group(found.timeout), site)
    deadline = time.monotonic() + found.timeout
    if native_core.native is None and (reason := native_core.why_pure()) and not native_core.is_unwanted():
        log.warning("collectives run in Python, which is slower: gradwire has no native core here, %s", reason)
    return MemberSession(found, connect_member, initialised_at=site).join_next(deadline)


def single_rank_group(timeout: float) -> Group:
    """Return the group of a job that has one rank."""
    from gradwire.transports.local import Hub

    identity = Identity(new_run(), 1, 0, ("rank 0 (this process)",), Topology.single(1))
    endpoint = Endpoint(identity, Hub(1).transports[0])
    table = tuning_table.load(os.environ)
    return connect_in_process([endpoint], table, timeout, time.monotonic() + timeout)[0]


def local_group(n: int) -> list[Group]:
    """Return n groups, one per rank, for n threads of this process. Useful for tests.

    The ranks communicate in memory, without sockets or processes, and raise the same errors as a real job. Start one
    thread per group: a collective blocks until all ranks have called it.

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
    """Return the groups of two ranks of this process, which communicate over TCP on 127.0.0.1. Useful for tests.

    Use each group on a thread of its own: a collective blocks until both ranks have called it.

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


# -- construction -----------------------------------------------------------------------------------------------------


def member_session(config: JobConfig, agree: Agree | None = None) -> MemberSession:
    """Return a session of this process in the job that `config` describes."""
    return MemberSession(config, connect_member, agree)


def thread_job(timeout: float, on_call: Callable[[str, LocalTransport], None] | None = None) -> ThreadJob:
    """Return a job whose members are threads of this process.

    `on_call` is called with the member's id and transport at the start of each call that a member makes.
    """
    from gradwire.job.thread_job import ThreadJob  # imported late: it loads the coordinator's state machine

    return ThreadJob(timeout, connect_in_process, on_call)


def connect_member(endpoint: Endpoint, config: JobConfig, deadline: float) -> Group:
    """Connect this process to all other ranks and return the group of all ranks."""
    generations = establish(
        [endpoint],
        world_channel=collective_channel(WORLD),
        deadline=deadline,
        wanted_transport=config.transport,
        peer_timeout=config.peer_timeout,
        begun=process_hooks.track,
    )
    return _world_group(generations[0], config.timeout)


def connect_in_process(endpoints: Sequence[Endpoint], table: Table, timeout: float, deadline: float) -> list[Group]:
    """Connect ranks that are all in this process and return one group per rank."""
    channel = collective_channel(WORLD)
    generations = establish(endpoints, world_channel=channel, deadline=deadline, table=table, begun=process_hooks.track)
    return [_world_group(generation, timeout) for generation in generations]


def _world_group(generation: Generation, timeout: float) -> Group:
    return Group(generation, range(generation.identity.size), WORLD, timeout, generation.world_links)
