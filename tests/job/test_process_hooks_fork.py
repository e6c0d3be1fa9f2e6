"""Forked children of a rank drop its links at once, and cannot disturb the rank."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import gradwire as gw
from gradwire import events
from gradwire.transports.fork_safe_sockets import Sockets
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture


def tcp_sockets() -> int:
    """Return how many descriptors of this process are TCP sockets."""
    inodes = {
        line.split()[9]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    }
    return sum(target[8:-1] in inodes for target in descriptors() if target.startswith("socket:["))


def descriptors() -> list[str]:
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the descriptor of the listing itself
    return targets


def outcomes_of_calls(group: gw.Group) -> dict[str, str]:
    """Call each method of an inherited group, and return "returned" or the error by name of the method."""
    x = np.zeros(1 << 20)
    calls = {
        "all_reduce": lambda: group.all_reduce(x),
        "barrier": group.barrier,
        "send": lambda: group.send(x, (group.rank + 1) % group.size),
        "recv": lambda: group.recv(x),
        "stream": lambda: group.stream().all_reduce(x).wait(),
        "subgroup": lambda: group.subgroup(range(group.size)).barrier(),
        "abort": lambda: group.abort("not mine to abort"),
        "close": group.close,
        "again": group.barrier,
    }
    results = {}
    for name, call in calls.items():
        try:
            call()
            results[name] = "returned"
        except gw.GradwireError as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


CLOSED = "Closed: this process was forked from a rank: the group belongs to the parent"
INHERITED = {
    **dict.fromkeys(("all_reduce", "barrier", "send", "recv", "stream", "subgroup", "again"), CLOSED),
    **dict.fromkeys(("abort", "close"), "returned"),
}


def forks(here: Here, when: str) -> None:
    closed = gw.loopback_pair()  # closed groups must not disturb the fork hooks
    for one in closed:
        one.close()
    group = gw.init()
    inner = group.subgroup(range(group.size))
    inner.barrier()
    group.send(np.zeros(1), (group.rank + 1) % group.size)
    group.recv(np.zeros(1))
    helper = None
    if when == "during a call":
        helper = threading.Thread(target=inner.all_reduce, args=(np.ones(1 << 16),))
        if group.rank == 0:  # the other ranks call it after the fork
            begun = threading.Event()
            unsubscribe = events.subscribe(lambda event: begun.set())
            helper.start()
            begun.wait(30)
            unsubscribe()
    before = tcp_sockets()
    child = os.fork()
    if child == 0:
        results = {"world": outcomes_of_calls(group), "inner": outcomes_of_calls(inner)}
        here.send(child=results, sockets=tcp_sockets())
        sys.exit(0)  # exit handlers run in the child too
    _, status = os.waitpid(child, 0)
    if helper is not None:
        if group.rank != 0:
            helper.start()
        helper.join()
    here.send(status=status, before=before, after=tcp_sockets(), sum=group.all_reduce(1), inner=inner.all_reduce(1))


@pytest.mark.parametrize("when", ["idle", "during a call"])
def test_forked_child_has_no_links_and_its_groups_are_closed(job: StartJob, when: str) -> None:
    with job(forks, 3, when) as ranks:
        for rank in ranks:
            results = rank.receive()
            assert results["child"] == {"world": INHERITED, "inner": INHERITED}
            assert results["sockets"] == 0
        for rank in ranks:
            results = rank.receive()
            assert (results["status"], results["sum"], results["inner"]) == (0, 3, 3)
            assert results["before"] == results["after"] > 6, "the parent must keep its sockets"
        assert [rank.ended() for rank in ranks] == [0, 0, 0]
        assert [rank.output() for rank in ranks] == [""] * 3


def uses_pools(here: Here) -> None:
    group = gw.init()
    context = multiprocessing.get_context("fork")
    sums = []
    for _ in range(3):
        with context.Pool(2) as pool:
            work = group.stream().all_reduce(np.ones(1 << 16))
            batch = pool.map(abs, range(-4, 0))
            sums.append(group.all_reduce(sum(batch)))
            work.wait()
    here.send(sums=sums)


def test_pools_of_forked_processes_work_beside_collectives(job: StartJob) -> None:
    with job(uses_pools, 2) as ranks:
        for rank in ranks:
            assert rank.receive()["sums"] == [20, 20, 20]
        assert [rank.ended() for rank in ranks] == [0, 0]


def starts_programs(here: Here) -> None:
    group = gw.init()
    group.barrier()
    # With close_fds=False, only their close-on-exec flag keeps the descriptors out of the new program.
    command = ["sh", "-c", "ls -l /proc/$$/fd >&2"]
    listing = subprocess.run(command, close_fds=False, stderr=subprocess.PIPE, text=True, check=True).stderr
    inherited = [line for line in listing.splitlines() if re.search(r"\b([3-9]|\d\d+) -> (socket|pipe|anon)", line)]
    here.send(inherited=inherited, sum=group.all_reduce(1))


def test_started_programs_inherit_no_descriptors(job: StartJob) -> None:
    with job(starts_programs, 2) as ranks:
        for rank in ranks:
            assert rank.receive() == {"inherited": [], "sum": 2}


def test_fork_waits_until_a_new_socket_is_registered() -> None:
    """A child that is forked after the socket was accepted and before it was registered would keep it open."""
    forked, accepting, made = threading.Event(), threading.Event(), threading.Event()

    class SlowListener:
        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            accepting.set()
            made.wait(10)
            return socket.socket(), ("127.0.0.1", 1)

    def accept() -> None:
        Sockets().accept(SlowListener())[0].close()  # type: ignore[arg-type]

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        forked.set()

    threads = [threading.Thread(target=accept), threading.Thread(target=fork)]
    threads[0].start()
    assert accepting.wait(60)
    threads[1].start()
    assert not forked.wait(0.1)
    made.set()
    assert forked.wait(60)
    for thread in threads:
        thread.join()


def test_forked_child_finds_groups_of_threads_closed() -> None:
    groups = gw.local_group(2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            groups[0].barrier()
        except gw.Closed:
            os.write(write, b"closed")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 6) == b"closed"
    os.close(read)
    os.close(write)
    threads = [threading.Thread(target=group.barrier) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for group in groups:
        group.close()
