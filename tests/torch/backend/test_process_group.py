"""The torch.distributed backend: operations beyond Gloo, subgroups, messages, failures and registration in torch."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP needs it: import it once, before ranks are forked
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import gradwire as gw
from gradwire.torch.backend.work import Handle
from support.backend_ranks import environ_of, meet, run
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

# -- operations that Gloo does not support -----------------------------------------------------------------------------


def uses_ops_beyond_gloo(here: Here, file: str) -> None:
    rank, size = meet(file)
    mean = torch.tensor([1.0, 2.0]) * (rank + 1)
    dist.all_reduce(mean, ReduceOp.AVG)
    whole = torch.tensor([-3 * (rank + 1), 4])
    dist.all_reduce(whole, ReduceOp.AVG)
    scaled = torch.ones(2)
    dist.all_reduce(scaled, ReduceOp.PREMUL_SUM(0.5))
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, torch.ones(2 * size), ReduceOp.PREMUL_SUM(0.25))
    ragged = [torch.zeros(n + 1) for n in range(size)]
    dist.all_gather(ragged, torch.full((rank + 1,), float(rank)))
    eighths = torch.full((4,), rank).to(torch.float8_e4m3fn)
    dist.broadcast(eighths, 1)
    group = dist.group.WORLD
    coalesced = [torch.full((3,), float(rank)), torch.full((2, 2), rank)]
    group.allreduce_coalesced(coalesced).wait()
    here.send(
        mean=mean.tolist(),
        whole=whole.tolist(),
        scaled=scaled.tolist(),
        part=part.tolist(),
        ragged=[one.tolist() for one in ragged],
        eighths=eighths.float().tolist(),
        coalesced=[one.flatten().tolist() for one in coalesced],
    )
    dist.destroy_process_group()


def test_backend_ops_and_shapes_beyond_gloo_give_correct_results(job: StartJob, tmp_path: Path) -> None:
    for one in run(job, uses_ops_beyond_gloo, 2, tmp_path):
        assert one == {
            "mean": [1.5, 3.0],
            "whole": [-4, 4],  # rounded towards zero
            "scaled": [1.0, 1.0],
            "part": [0.5, 0.5],
            "ragged": [[0.0], [1.0, 1.0]],
            "eighths": [1.0] * 4,
            "coalesced": [[1.0] * 3, [1] * 4],
        }


def fails_to_init(here: Here, file: str) -> None:
    try:
        meet(file)
    except gw.GradwireError as error:
        here.send_error(error)


@pytest.mark.parametrize("size", [1, 2])
def test_init_process_group_transport_not_built_raises_unsupported_op(job: StartJob, tmp_path: Path, size: int) -> None:
    environ = environ_of(size)
    with job(
        fails_to_init,
        size,
        str(tmp_path / "store"),
        environ=lambda rank: environ(rank) | {"GRADWIRE_TRANSPORT": "mpi"},
    ) as ranks:
        for rank in ranks:
            report = rank.receive()
            assert report["error"] == "UnsupportedOp"
            assert "'mpi' (from GRADWIRE_TRANSPORT) is not available yet: use 'auto', 'shm', 'tcp'" in report["text"]


# -- groups ------------------------------------------------------------------------------------------------------------


def groups(here: Here, file: str) -> None:
    rank, size = meet(file)
    sums = []
    pair, other = dist.new_group([0, 2]), dist.new_group([0, 2])
    if rank != 1:
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in (pair, other)[:: 1 - rank]]
        for work in works:  # rank 2 calls them in the opposite order, because each group has its own order
            work.wait()
        x = torch.tensor([rank])
        dist.broadcast(x, src=2, group=pair)
        sums.append(int(x))
        dist.destroy_process_group(other)
    from torch.distributed.distributed_c10d import _new_group_with_tag

    turned = _new_group_with_tag([2, 0, 1], sort_ranks=False)
    outs = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(outs, torch.tensor([float(rank)]), group=turned)
    alone = [dist.new_group([one]) for one in range(size)][rank]
    dist.all_reduce(torch.ones(1), group=alone)
    backend, name = dist.get_backend(pair) if rank != 1 else "gradwire", turned.group_name
    dist.destroy_process_group()
    meet(file)  # the same store is used again
    again = torch.ones(1)
    dist.all_reduce(again)
    world = dist.group.WORLD
    dist.destroy_process_group()
    world.shutdown()  # closing again does nothing
    world.abort()
    try:
        world.allreduce([torch.ones(1)]).wait()
    except gw.Closed:
        here.send(sums=sums, turned=[int(one) for one in outs], again=int(again), backend=backend, named=bool(name))


def test_new_group_subgroups_and_a_second_init_process_group_work(job: StartJob, tmp_path: Path) -> None:
    reports = run(job, groups, 3, tmp_path)
    expected = {"turned": [2, 0, 1], "again": 3, "backend": "gradwire", "named": True}
    assert reports == [{"sums": sums, **expected} for sums in ([2], [], [2])]


# -- messages ----------------------------------------------------------------------------------------------------------


def messages(here: Here, file: str) -> None:
    rank, _ = meet(file)
    large = 100_000  # elements: more than are sent before the receiver calls recv
    peer = 1 - rank
    mine, theirs = torch.full((large,), float(rank)), torch.full((large,), -1.0)
    sent = [dist.isend(mine + tag, peer, tag=tag) for tag in (1, 2)]  # both ranks send first
    dist.recv(theirs, peer, tag=2)  # and receive in the opposite order
    second = theirs.clone()
    work = dist.irecv(theirs, peer, tag=1)
    first = work.get_future().wait()[0][0].item()
    for one in sent:
        one.wait()
    assert all(one.is_completed() for one in sent)
    anyone = torch.zeros(3, dtype=torch.bfloat16)
    source = dist.recv(anyone) if rank == 0 else dist.send(torch.ones(3, dtype=torch.bfloat16), 0)
    batch = [
        dist.P2POp(dist.irecv, theirs, peer),
        dist.P2POp(dist.isend, mine * 3, peer),
    ]
    for one in dist.batch_isend_irecv(batch):
        one.wait()
    here.send(first=first, second=second[0].item(), source=source, batch=theirs[0].item())
    dist.barrier()
    dist.destroy_process_group()


def test_isend_both_ranks_send_first_and_recv_in_any_order_works(job: StartJob, tmp_path: Path) -> None:
    zero, one = run(job, messages, 2, tmp_path)
    assert zero == {"first": 2.0, "second": 3.0, "source": 1, "batch": 3.0}
    assert one == {"first": 1.0, "second": 2.0, "source": None, "batch": 0.0}


# -- unusual callers ---------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[Any]):  # type: ignore[misc]  # torch is Any to mypy
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Any:
        return torch.tensor(float(place))


def calls_unusually(here: Here, file: str) -> None:
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,
    )  # imported here, because it warns about deprecated parts of torch

    rank, size = meet(file)
    gathered = funcol.all_gather_tensor(torch.full((2,), float(rank)), 0, dist.group.WORLD)
    dist.all_reduce(gathered)  # the input may still be incomplete
    spread = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (size,)), [Shard(0)])
    sharded = ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(2)) for _ in range(2)], torch.optim.Adam)
    refused = []
    for call in (
        lambda: dist.all_reduce(spread),
        lambda: gw.elastic({"weights": spread}),
        lambda: gw.elastic({"optimizer": sharded}),
    ):
        try:
            call()
        except gw.GradwireError as error:
            refused.append(type(error).__name__)
    loaded = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
    total = sum(one for batch in loaded for one in batch)
    dist.all_reduce(total)
    here.send(gathered=gathered.tolist(), refused=refused, total=float(total))
    world = dist.group.WORLD
    dist.barrier()
    world.abort()
    world.abort()  # a second abort is harmless
    try:
        dist.barrier()
    except (gw.Aborted, gw.PeerLost) as error:
        here.send_error(error)
    dist.destroy_process_group()


def test_backend_unusual_tensors_forked_loaders_and_a_second_abort_are_handled(job: StartJob, tmp_path: Path) -> None:
    with job(calls_unusually, 2, str(tmp_path / "store"), environ=environ_of(2)) as ranks:
        for rank in ranks:
            report = rank.receive()
            assert report["gathered"] == [0.0, 0.0, 2.0, 2.0]
            assert report["refused"] == ["ArrayError", "ArrayError", "ConfigError"]
            assert report["total"] == 2 * sum(range(8))
        for rank in ranks:
            assert rank.receive()["error"] in ("Aborted", "PeerLost")
            assert rank.ended() == 0, rank.output()


# -- failures ----------------------------------------------------------------------------------------------------------


def train(here: Here, file: str) -> None:
    meet(file)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
    try:
        for step in range(1_000_000):
            if step == 3:
                here.send(training=True)
            model(torch.randn(8, 64)).sum().backward()
            model.zero_grad()
    except gw.PeerLost as error:
        here.send_error(error)
    try:
        dist.all_reduce(torch.ones(1))
    except ConnectionError as error:
        here.send_error(error)
    dist.destroy_process_group()


def test_torch_ddp_killed_rank_raises_peer_lost_on_the_others(job: StartJob, tmp_path: Path) -> None:
    with job(train, 3, str(tmp_path / "store"), environ=environ_of(3)) as ranks:
        for rank in ranks:
            assert rank.receive()["training"]
        ranks[1].signal()
        for rank in (ranks[0], ranks[2]):
            report = rank.receive()
            assert report["error"] == "PeerLost", report
            assert report["culprit"] == 1
            assert rank.receive()["error"] == "PeerLost"
            assert rank.ended() == 0, rank.output()


def misses_a_call(here: Here, file: str) -> None:
    rank, _ = meet(file)
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    error: BaseException | None = None
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        future = work.get_future()
        try:
            future.wait()
        except gw.Timeout as raised:
            error = raised
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is error
        here.send(error=str(error))
        here.receive()
    else:
        here.send(error="none")
        here.receive()
    dist.destroy_process_group()


def test_new_group_timeout_raises_gradwire_timeout(job: StartJob, tmp_path: Path) -> None:
    with job(misses_a_call, 2, str(tmp_path / "store"), environ=environ_of(2)) as ranks:
        assert "0.2 s" in ranks[0].receive()["error"]
        for rank in ranks:
            rank.send()
            assert rank.ended() == 0, rank.output()


# -- registration in torch ---------------------------------------------------------------------------------------------


def test_autoload_registers_the_backend_without_importing_gradwire() -> None:
    script = (
        "import sys, torch, torch.distributed as dist; "
        "assert dist.Backend.GRADWIRE == 'gradwire' and dist.Backend.backend_capability['gradwire'] == ['cpu']; "
        "assert dist.Backend.default_device_backend_map['cpu'] == 'gloo'; "
        "assert 'gradwire' not in sys.modules; "
        "import gradwire.torch"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_autoload_keeps_the_flight_recorder_of_torch_off_gradwire_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 attaches its recorder to the groups of all other backends, and it needs a backend in C++."""
    import gradwire_autoload

    not_attached: set[str] = set()
    monkeypatch.setattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", not_attached, raising=False)
    gradwire_autoload.register()
    assert not_attached == {"gradwire"}


def test_autoload_error_during_registration_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import gradwire_autoload

    monkeypatch.setattr(dist.Backend, "backend_list", None)
    gradwire_autoload.register()


def test_handle_get_future_hurries_the_work_and_returns_its_tensors() -> None:
    here_flags: list[bool] = []
    running = gw.Work("all_reduce", lambda work, here: here_flags.append(here))
    tensors = [torch.ones(2)]
    future = Handle(running, tensors, lambda: None).get_future()
    assert here_flags == [False], "get_future() must start the work on another thread"
    running.run(lambda: None, first_error=True)
    running.call_back()
    assert future.wait() is tensors
