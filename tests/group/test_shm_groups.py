"""Groups of processes that share memory: which ranks share it, when it is freed, how a death is noticed."""

from __future__ import annotations

import ctypes
import gc
import os
import re

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import GroupInternals, parts_of
from gradwire.host import native_core
from gradwire.transports.shm.arena import RESERVED
from support.processes import Here, StartJob, place
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

pytestmark = pytest.mark.skipif(not native_core.available(), reason="only the core reads shared memory")

MIB = 1 << 20


def sees_others(here: Here) -> None:
    group = gw.init()
    shared = parts_of(group).generation.shared
    assert shared is not None
    here.send(
        able=[group.capabilities.transport, group.capabilities.registered],
        sharing=parts_of(group).generation.sharing,
        peers=sorted(shared.peers),
        watched=sorted(shared.pidfds),
        calls=GroupInternals(group).calls_made,
    )
    x = group.empty(1000, "int64")
    x[:] = np.arange(1000) * (group.rank + 1)
    offset = shared.own.offset_of(x.ctypes.data, x.nbytes)
    seen = []
    for peer, at in enumerate(group.all_gather_values(offset)):
        if peer != group.rank:
            theirs = (ctypes.c_int64 * 1000).from_address(shared.peers[peer].address + at)
            seen.append(theirs[1])
    group.barrier()
    with open("/proc/self/maps") as file:
        named = [line for line in file if "/dev/shm" in line]
    here.send(seen=seen, named=named, sum=int(group.all_reduce(x)[1]))


def test_shm_group_ranks_of_a_host_can_read_each_others_arrays(job: StartJob) -> None:
    with job(sees_others, 3) as ranks:
        for rank in ranks:
            others = [peer for peer in range(3) if peer != rank.number]
            expected = {"able": ["shm", True], "sharing": [True] * 3, "peers": others, "watched": others, "calls": 0}
            assert rank.receive() == expected
            assert rank.receive() == {"seen": [peer + 1 for peer in others], "named": [], "sum": 6}
        assert [rank.ended() for rank in ranks] == [0, 0, 0]
        assert [rank.output() for rank in ranks] == [""] * 3


def shares_with(here: Here, hosts: list[str], transports: list[str]) -> None:
    rank = int(os.environ["GRADWIRE_RANK"])
    os.environ["GRADWIRE_HOST"] = hosts[rank]
    try:
        group = gw.init(transport=transports[rank])
    except gw.UnsupportedOp as error:
        here.send_error(error)
        return
    shared = parts_of(group).generation.shared
    inner = group.subgroup([0, 1]) if rank < 2 else None
    here.send(
        sharing=parts_of(group).generation.sharing,
        peers=sorted(shared.peers) if shared else None,
        transports=[one.capabilities.transport for one in (group, inner) if one],
        sum=int(group.all_reduce(np.ones(5, np.int32))[0]),
    )


def test_shm_is_used_only_between_ranks_of_the_same_host(job: StartJob) -> None:
    with job(shares_with, 3, ["a", "a", "b"], ["auto"] * 3) as ranks:
        sharing = [True, True, False]
        assert ranks[0].receive() == {"sharing": sharing, "peers": [1], "transports": ["tcp", "shm"], "sum": 3}
        assert ranks[1].receive() == {"sharing": sharing, "peers": [0], "transports": ["tcp", "shm"], "sum": 3}
        assert ranks[2].receive() == {"sharing": sharing, "peers": None, "transports": ["tcp"], "sum": 3}


@pytest.mark.parametrize(
    ("hosts", "transports"), [(["a", "b", "c"], ["auto"] * 3), (["a"] * 3, ["auto", "tcp", "auto"])]
)
def test_shm_is_not_used_across_hosts_or_if_a_rank_asks_for_tcp(
    job: StartJob, hosts: list[str], transports: list[str]
) -> None:
    with job(shares_with, 3, hosts, transports) as ranks:
        for rank in ranks:
            said = rank.receive()
            assert (said["sharing"], said["peers"], said["sum"]) == ([False] * 3, None, 3)
            assert set(said["transports"]) == {"tcp"}


def test_init_with_transport_shm_on_one_host_shares_memory(job: StartJob) -> None:
    with job(shares_with, 3, ["a"] * 3, ["shm"] * 3) as ranks:
        assert all(rank.receive()["sharing"] == [True] * 3 for rank in ranks)


@pytest.mark.parametrize("transports", [["shm"] * 3, ["auto", "shm", "tcp"]])
def test_init_with_transport_shm_across_hosts_raises_on_all_ranks(job: StartJob, transports: list[str]) -> None:
    with job(shares_with, 3, ["a", "a", "b"], transports) as ranks:
        for rank in ranks:
            said = rank.receive()
            assert (said["error"], said["operation"]) == ("UnsupportedOp", "init")
            insists = transports.index("shm")
            assert re.match(rf"rank {insists} asks for transport 'shm', but ranks \[2\] cannot", said["text"])
        assert [rank.ended() for rank in ranks] == [0, 0, 0]
        assert [rank.output() for rank in ranks] == [""] * 3


def used() -> int:
    """Return the bytes of memory that all arenas mapped by this process use."""
    arenas = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:gradwire"):
            status = os.stat(path)
            arenas[status.st_ino] = status.st_blocks * 512
    return sum(arenas.values())


def allocates(here: Here) -> None:
    group = gw.init()
    group.barrier()
    here.send(ready=True)
    here.receive()  # no rank allocates memory now
    if group.rank == 0:
        before = used()
        x = group.empty((4, MIB), "uint8")
        x[:] = 1
        full, view = used() - before, x[1:, ::2]
        del x
        gc.collect()
        kept = used() - before
        del view
        gc.collect()
        small = [group.empty(100, "bfloat16") for _ in range(1000)]
        aligned = all(one.ctypes.data % 64 == 0 for one in small)
        here.send(full=full, kept=kept, left=used() - before, aligned=aligned, none=group.empty((0, 3)).shape)
        last = group.empty(3)
        group.close()
        last[:] = 4  # its memory is usable
        after = group.empty(3)
        after[:] = 5
        here.send(last=last.tolist(), after=after.tolist())
    here.receive()


def test_empty_memory_of_freed_arrays_is_returned(job: StartJob) -> None:
    with job(allocates, 2) as ranks:
        assert all(rank.receive()["ready"] for rank in ranks)
        ranks[0].send()
        expected = {"full": 4 * MIB, "kept": 4 * MIB, "left": 0, "aligned": True, "none": [0, 3]}
        assert ranks[0].receive() == expected
        assert ranks[0].receive() == {"last": [4.0] * 3, "after": [5.0] * 3}


def keeps_links_in_a_hidden_child(here: Here, victim: int) -> None:
    group = gw.init()
    if group.rank == victim:
        libc = ctypes.PyDLL(None)
        if libc.fork() == 0:  # like a C library: Python's fork handlers do not run, and the child keeps every link open
            libc.pause()
    x = np.ones(4)
    group.barrier()
    here.send(ready=True)
    try:
        while True:
            group.all_reduce(x, op="mean")  # here
    except gw.GradwireError as error:
        here.send_error(error)
        here.receive()


@pytest.mark.parametrize("victim", [0, 2])
def test_peer_lost_is_raised_although_a_child_of_the_dead_rank_holds_its_links(job: StartJob, victim: int) -> None:
    with job(keeps_links_in_a_hidden_child, 3, victim) as ranks:
        assert all(rank.receive()["ready"] for rank in ranks)
        ranks[victim].signal()
        for rank in ranks:
            if rank.number != victim:
                said = rank.receive()
                assert (said["error"], said["culprit"], said["operation"]) == ("PeerLost", victim, "all_reduce")
                where = re.escape(place(keeps_links_in_a_hidden_child, "# here"))
                died = rf"rank {victim} \(host \S+, pid {ranks[victim].pid}\) died( during all_reduce #\d+, {where})?"
                assert re.fullmatch(died, said["text"]), said["text"]


def leaves_first(here: Here) -> None:
    group = gw.init()
    inner = group.subgroup([0, 1])
    x = np.full(5000, 7.0 - 7 * group.rank)
    if group.rank == 0:
        inner.broadcast(x)
        inner.close()
    group.barrier()
    if group.rank == 1:
        inner.broadcast(x)
        inner.close()
    group.barrier()
    shared = parts_of(group).generation.shared
    assert shared is not None
    shared.own.sweep()
    here.send(sum=x.sum().item(), kept=shared.own.retired)


def test_broadcast_by_a_rank_that_closed_the_subgroup_still_arrives(job: StartJob) -> None:
    with job(leaves_first, 2) as ranks:
        assert [rank.receive() for rank in ranks] == [{"sum": 35000.0, "kept": 0}] * 2


def forks_with_arrays(here: Here) -> None:
    group = gw.init()
    x = group.empty(1000)
    x[:] = group.rank + 1
    child = os.fork()
    if child == 0:
        del x
        gc.collect()
        group.empty(1000)[:] = -1
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    shared = parts_of(group).generation.shared
    assert shared is not None
    here.send(status=status, sum=x.sum().item(), offset=shared.own.offset_of(x.ctypes.data, x.nbytes))
    group.barrier()


def test_forked_child_does_not_change_the_shared_memory_of_its_parent(job: StartJob) -> None:
    with job(forks_with_arrays, 2) as ranks:
        for rank in ranks:
            said = rank.receive()
            assert (said["status"], said["sum"]) == (0, 1000.0 * (rank.number + 1))
            assert said["offset"] >= RESERVED
