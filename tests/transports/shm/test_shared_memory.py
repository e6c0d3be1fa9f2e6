"""Ranks of one host share memory, all of them or none, whatever other processes send to their sockets."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradwire.host import machine
from gradwire.transports.base import LinkClosed
from gradwire.transports.shm import shared_memory
from gradwire.transports.shm.arena import PAGE, RESERVED, OwnArena
from gradwire.transports.shm.shared_memory import PidfdLink, SharedMemory
from support.neighbours import share
from support.ranks import run_ranks

LONG = 30.0
Offers = list[Any]
Shared = tuple[SharedMemory | None, tuple[bool, ...]]


class ThreadGather:
    """Gathers values of ranks that are threads. `between` is called once, with the values of the first gather."""

    def __init__(self, size: int, between: Callable[[Offers], None] = lambda _: None) -> None:
        self._barrier = threading.Barrier(size)
        self._values: Offers = [None] * size
        self._between = between
        self._times = 0

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        if self._barrier.wait(LONG) == 0:
            self._times += 1
            if self._times == 1:
                self._between(list(self._values))
        self._barrier.wait(LONG)
        values = list(self._values)
        self._barrier.wait(LONG)
        return values

    def abort(self, reason: str) -> None:
        self._barrier.abort()


@contextlib.contextmanager
def sharing(
    hosts: str, unwilling: tuple[int, ...] = (), between: Callable[[Offers], None] = lambda _: None
) -> Iterator[list[Shared]]:
    """Run the steps of `Sharing` on every rank, and return the results. A letter names the host of each rank."""
    gathered = ThreadGather(len(hosts), between)
    numbers = iter(range(len(hosts)))
    lock = threading.Lock()

    def run(_: ThreadGather) -> Shared:
        with lock:
            rank = next(numbers)
        results[rank] = share(
            rank, hosts, rank not in unwilling, lambda value: gathered.gather(rank, value), time.monotonic() + LONG
        )
        return results[rank]

    results: dict[int, Shared] = {}
    run_ranks([gathered] * len(hosts), run, timeout=LONG)
    try:
        yield [results[rank] for rank in range(len(hosts))]
    finally:
        for shared, _ in results.values():
            if shared is not None:
                shared.close()


def descriptors() -> int:
    gc.collect()  # frees descriptors that other tests have left in reference cycles
    return len(os.listdir("/proc/self/fd"))


def test_sharing_ranks_of_a_host_map_each_others_arenas() -> None:
    with sharing("abaa") as results:
        assert {sharing for _, sharing in results} == {(True, False, True, True)}
        assert results[1][0] is None
        everybody = {rank: shared for rank, (shared, _) in enumerate(results) if shared is not None}
        assert {rank: set(shared.peers) for rank, shared in everybody.items()} == {0: {2, 3}, 2: {0, 3}, 3: {0, 2}}
        for rank, shared in everybody.items():
            assert set(shared.pidfds) == set(shared.peers)
            offset = shared.own.allocate(PAGE)
            ctypes.memset(shared.own.address + offset, rank + 1, 1)
        for shared in everybody.values():
            for peer, arena in shared.peers.items():
                assert ctypes.string_at(arena.address + RESERVED, 1) == bytes([peer + 1])


def test_sharing_one_unwilling_rank_prevents_sharing_on_its_host() -> None:
    with sharing("aabbb", unwilling=(3,)) as results:
        assert {sharing for _, sharing in results} == {(True, True, False, False, False)}
        assert [shared is not None for shared, _ in results] == [True, True, False, False, False]


@pytest.mark.parametrize("offer", [None, "name", ["name"], ["\0", "token"], ["g" * 32, "0" * 32], [{}, []], 3])
def test_sharing_malformed_offer_counts_as_no_offer(offer: object) -> None:
    before = descriptors()
    answers: list[Offers] = [[None, offer], [False, True], [False, True]]
    shared, sharing = share(0, "aa", True, lambda _: answers.pop(0), time.monotonic() + LONG)
    assert (shared, sharing) == (None, (False, False))
    assert descriptors() == before


def test_sharing_offer_without_a_listener_ends_without_shared_memory() -> None:
    answers: list[Offers] = [[None, ["0" * 32, "1" * 32]], [False, True], [False, True]]
    shared, sharing = share(0, "aa", True, lambda _: answers.pop(0), time.monotonic() + LONG)
    assert (shared, sharing) == (None, (False, False))


def test_sharing_process_of_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with sharing("aa") as results:
        assert [sharing for _, sharing in results] == [(False, False)] * 2


def greeting(rank: int, token: str, started: int = 0) -> bytes:
    return shared_memory.GREETING.pack(rank, bytes.fromhex(token), started)


def unsealed() -> int:
    descriptor = os.memfd_create("intruder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 20)
    return descriptor


def on_disk() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def sealed() -> int:
    arena = OwnArena()
    return os.dup(arena.descriptor)


# What other processes send to the socket of a rank that has one neighbour, `peer`, and a token.
INTRUDERS: dict[str, Callable[[int, str], tuple[bytes, list[Callable[[], int]]]]] = {
    "sends nothing": lambda peer, token: (b"", []),
    "sends invalid bytes": lambda peer, token: (b"\xff" * 4096, []),
    "sends no memory": lambda peer, token: (greeting(peer, token), []),
    "does not know the token": lambda peer, token: (greeting(peer, "0" * 32), [sealed]),
    "is no neighbour": lambda peer, token: (greeting(77, token), [sealed]),
    "is the rank itself": lambda peer, token: (greeting(1 - peer, token), [sealed]),
    "sends memory it could shrink": lambda peer, token: (greeting(peer, token), [unsealed]),
    "sends a file": lambda peer, token: (greeting(peer, token), [on_disk]),
    "sends too much memory": lambda peer, token: (greeting(peer, token), [sealed, sealed, sealed]),
    "sends a byte too many": lambda peer, token: (greeting(peer, token) + b"!", [sealed]),
}


@pytest.mark.parametrize("intruder", INTRUDERS)
def test_sharing_other_processes_at_the_socket_change_nothing(intruder: str) -> None:
    before = descriptors()
    lines: list[socket.socket] = []

    def connect(offers: Offers) -> None:  # before the neighbours connect
        for rank, (name, token) in enumerate(offers):
            for _ in range(3):
                line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                lines.append(line)
                line.connect(shared_memory.abstract_address(name))
                data, memory = INTRUDERS[intruder](1 - rank, token)
                held = [make() for make in memory]
                if data:
                    socket.send_fds(line, [data], held)
                for descriptor in held:
                    os.close(descriptor)

    with sharing("aa", between=connect) as results:
        for line in lines:
            line.close()
        assert [sharing for _, sharing in results] == [(True, True)] * 2
        for rank, (shared, _) in enumerate(results):
            assert shared is not None
            ctypes.memset(shared.own.address + RESERVED, rank + 1, 1)
        for rank, (shared, _) in enumerate(results):
            assert shared is not None
            assert ctypes.string_at(shared.peers[1 - rank].address + RESERVED, 1) == bytes([2 - rank])
        del shared
    del results
    gc.collect()
    assert descriptors() == before


def test_sharing_neighbour_whose_pid_was_reused_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbour has sent the start time of its process. A process with another start time is not the neighbour."""
    own = machine.process_status(os.getpid())
    assert own is not None
    times = iter([own.started, own.started, own.started, own.started + 1])  # sent by both ranks, then read by both

    def status(pid: int | str) -> machine.ProcessStatus:
        return machine.ProcessStatus("S", next(times))

    before = descriptors()
    monkeypatch.setattr(machine, "process_status", status)
    with sharing("aa") as results:
        assert sorted(len(shared.pidfds) for shared, _ in results if shared is not None) == [0, 1]
    del results
    gc.collect()
    assert descriptors() == before


def test_pidfd_link_only_reports_the_end_of_the_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        shared = SharedMemory(OwnArena(), {}, {3: os.pidfd_open(child.pid)})
        life = PidfdLink(3, shared)
        assert life.fileno() == shared.pidfds[3]
        assert life.receive([memoryview(bytearray(1))]) == 0
        assert not shared.died(3)
        assert not shared.died(4)
        child.kill()
        assert shared.died(3, LONG)
        with pytest.raises(LinkClosed):
            life.receive([memoryview(bytearray(1))])
        life.close()
        assert shared.died(3), "the link must not close the descriptor"
        shared.close()
        shared.close()
        assert life.fileno() == -1
    finally:
        child.kill()
        child.communicate()
