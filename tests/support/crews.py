"""Crews: groups over every transport that are used for many tasks, with one thread for each rank.

A transport is part of the conformance suite if it is in `TRANSPORTS`, by a function from a topology to the groups of
its ranks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gradwire.collectives import tuning_table
from gradwire.errors import GradwireError
from gradwire.generation.establish import Endpoint
from gradwire.group import Group
from gradwire.host import native_core
from gradwire.identity import Identity
from gradwire.job.config import JobConfig
from gradwire.job.init import connect_in_process, connect_member
from gradwire.topology import Topology
from gradwire.transports.base import Transport
from gradwire.transports.grpc.transport import GrpcTransport
from gradwire.transports.local import Hub
from gradwire.transports.tcp.transport import TcpTransport
from support.tls_files import MEMBERS, credentials

T = TypeVar("T")
TIMEOUT = 60.0
ONE_SIZE = ("tls", "grpc")  # one size is enough: they change the links only, and other transports test the schedules


def local_ranks(topology: Topology) -> list[Group]:
    """Return groups like those of `gw.local_group`, with any topology."""
    return _connected(_endpoints(topology, Hub(topology.size).transports))


def tcp_ranks(topology: Topology) -> list[Group]:
    """Return groups like those of `gw.loopback_pair`, with any topology: sockets between threads of one process."""
    return _connected(tcp_endpoints(topology))


def tls_ranks(topology: Topology) -> list[Group]:
    """Return groups that use TLS."""
    groups = _connected(tcp_endpoints(topology, tls=True))
    assert not any(group.capabilities.native for group in groups)
    return groups


def grpc_ranks(topology: Topology) -> list[Group]:
    """Return groups that use gRPC, with TLS between an odd number of ranks, and send heartbeats."""
    groups = agreed(tcp_endpoints(topology, tls=topology.size % 2 == 1, kind=GrpcTransport), "grpc")
    for group in groups:
        able = group.capabilities
        assert (able.transport, able.native, able.registered) == ("grpc", False, False)
    return groups


def shm_ranks(topology: Topology) -> list[Group]:
    """Return groups whose ranks share memory on one host, and use sockets between hosts."""
    groups = agreed(tcp_endpoints(topology))
    assert all(group.capabilities.registered for group in groups if _has_neighbours(group))
    return groups


def tcp_endpoints(topology: Topology, tls: bool = False, kind: type[TcpTransport] = TcpTransport) -> list[Endpoint]:
    """Return ranks that use TCP, or another kind of transport, and are not connected yet."""
    run, key = secrets.token_bytes(16), secrets.token_bytes(32)
    members = MEMBERS[: topology.size]
    transports = [kind("127.0.0.1", credentials(member) if tls else None) for member in members]
    addresses = [transport.address for transport in transports]
    for rank, transport in enumerate(transports):
        transport.assemble(rank=rank, addresses=addresses, job=run, generation=1, key=key, cores=0.0, members=members)
    return _endpoints(topology, transports, run)


def agreed(endpoints: Sequence[Endpoint], transport: str = "auto") -> list[Group]:
    """Connect ranks like those of several processes: they share memory where they can, and send heartbeats."""
    config, deadline = JobConfig(timeout=TIMEOUT, transport=transport), time.monotonic() + TIMEOUT
    with ThreadPoolExecutor(len(endpoints)) as threads:
        return list(threads.map(lambda endpoint: connect_member(endpoint, config, deadline), endpoints))


def _endpoints(topology: Topology, transports: Sequence[Transport], run: bytes | None = None) -> list[Endpoint]:
    names = tuple(f"rank {rank} (a thread of this test)" for rank in range(topology.size))
    run = run or secrets.token_bytes(16)
    return [Endpoint(Identity(run, 1, rank, names, topology), transport) for rank, transport in enumerate(transports)]


def _connected(endpoints: Sequence[Endpoint]) -> list[Group]:
    return connect_in_process(endpoints, tuning_table.load(os.environ), TIMEOUT, time.monotonic() + TIMEOUT)


def _has_neighbours(group: Group) -> bool:
    return len(group.topology.hosts[group.topology.host_of(group.rank)]) > 1


TRANSPORTS: dict[str, Callable[[Topology], list[Group]]] = {
    "local": local_ranks,
    "tcp": tcp_ranks,
}
if native_core.available():  # without the core there is no shared memory
    TRANSPORTS["shm"] = shm_ranks
TRANSPORTS["tls"] = tls_ranks
TRANSPORTS["grpc"] = grpc_ranks


def sizes(*numbers: int) -> list[tuple[str, int]]:
    """Return every transport with each number of ranks. TLS and gRPC get only the first: they change only the links."""
    return [(name, number) for name in TRANSPORTS for number in (numbers[:1] if name in ONE_SIZE else numbers)]


class Crew:
    """The groups of all ranks, with a thread for each. `run` gives all of them the same task."""

    def __init__(self, make: Callable[[], list[Group]]) -> None:
        self._make = make
        self._begin()

    def _begin(self) -> None:
        self.groups = self._make()
        self._usable = True
        self._tasks: list[queue.SimpleQueue[Callable[[], None] | None]] = [queue.SimpleQueue() for _ in self.groups]
        self._threads = [
            threading.Thread(target=self._work, args=(tasks,), name=f"rank {rank}", daemon=True)
            for rank, tasks in enumerate(self._tasks)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def size(self) -> int:
        return len(self.groups)

    def inside(self, ranks: Sequence[int] | None = None) -> str:
        """Return the transport between ranks of one host, among these ranks."""
        chosen = range(self.size) if ranks is None else ranks
        hosts = [self.topology.host_of(rank) for rank in chosen]
        sharing = any(group.capabilities.registered for group in self.groups)
        return "shm" if sharing and len(set(hosts)) < len(hosts) else "tcp"

    @property
    def topology(self) -> Topology:
        return self.groups[0].topology

    @staticmethod
    def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            task()

    def run(self, fn: Callable[[Group], T], *, timeout: float = TIMEOUT) -> list[T]:
        """Run fn(group) on every rank and return the results in rank order.

        The first failure is raised, with the others as notes. A failure aborts the crew's groups, so that no rank waits
        for the rank that failed; the next task gets new groups.
        """
        if not self._usable:
            self.close()
            self._begin()
        results: dict[int, T] = {}
        failures: list[tuple[int, BaseException]] = []
        done = threading.Semaphore(0)

        def task(rank: int, group: Group) -> None:
            try:
                results[rank] = fn(group)
            except BaseException as error:
                failures.append((rank, error))
                with contextlib.suppress(GradwireError):
                    group.abort(f"a test failed with {error!r}")
            finally:
                done.release()

        for rank, group in enumerate(self.groups):
            self._tasks[rank].put(lambda rank=rank, group=group: task(rank, group))  # type: ignore[misc]
        deadline = time.monotonic() + timeout
        finished = all(done.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in self.groups)
        if failures or not finished:
            self._usable = False
            raise self._explained(failures, results)
        return [results[rank] for rank in range(self.size)]

    def _explained(self, failures: Sequence[tuple[int, BaseException]], results: dict[int, Any]) -> BaseException:
        ended = {*results, *(rank for rank, _ in failures)}
        stuck = [f"rank {rank} is still at\n{self._stack(rank)}" for rank in range(self.size) if rank not in ended]
        if not failures:
            return AssertionError("not done in time: " + "\n".join(stuck))
        (rank, first), *others = failures
        first.add_note(f"raised on rank {rank}")
        for note in (*(f"then on rank {rank}: {error!r}" for rank, error in others), *stuck):
            first.add_note(note)
        return first

    def _stack(self, rank: int) -> str:
        frame = sys._current_frames().get(self._threads[rank].ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(its end)"

    def close(self) -> None:
        """Close all groups and end the threads."""
        for group in self.groups:
            group.close()
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join(TIMEOUT)


@contextlib.contextmanager
def crew_of(transport: str, topology: Topology) -> Iterator[Crew]:
    crew = Crew(lambda: TRANSPORTS[transport](topology))
    try:
        yield crew
    finally:
        crew.close()
