"""The backend of torch.distributed: each collective gives what Gloo gives, in the same processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP wants it: once, before ranks are forked
import torch.distributed as dist
from torch.distributed import ReduceOp

import gradwire as gw
from processes import Here, StartJob
from processes import job_fixture as job_fixture
from processes import zygote_fixture as zygote_fixture

Group = Any
VERY_LONG = 100.0  # seconds: a bound for what takes a few, on a machine that is busy


def join(here: Here, file: str, rank: int, size: int, seconds: float = 60) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gradwire", f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )


def environ_of(size: int) -> Callable[[int], dict[str, str]]:
    return lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}


def run(job: StartJob, body: Callable[..., None], size: int, place: Path, *args: Any) -> list[dict[str, Any]]:
    """What each rank of a job told before it ended well."""
    with job(body, size, str(place / "store"), *args, environ=environ_of(size)) as ranks:
        told = [rank.hear(VERY_LONG) for rank in ranks]
        for rank in ranks:
            assert rank.ended() == 0, rank.output()
    return told


def me() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# -- everything, beside Gloo -------------------------------------------------------------------------------------------


def everything(here: Here, file: str) -> None:
    rank, size = me()
    join(here, file, rank, size)
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    compared = [name for name, call in calls(rank, size) if same(name, call, ours, gloo)]
    dist.destroy_process_group()
    here.tell(compared=compared)


def same(name: str, call: Callable[[Group], Any], ours: Group, gloo: Group) -> bool:
    mine, theirs = call(ours), call(gloo)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, msg=lambda text: f"{name}: {text}")
    return True


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) * 7 % 5 + rank + 1).to(dtype)


def calls(rank: int, size: int) -> Iterator[tuple[str, Callable[[Group], Any]]]:
    yield from reductions(rank)
    yield from of_lists(rank, size)
    yield from of_single_tensors(rank, size)
    yield from of_objects(rank, size)


def reductions(rank: int) -> Iterator[tuple[str, Callable[[Group], Any]]]:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
    for dtype in kinds:
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            yield f"all_reduce {dtype} {op}", partial(all_reduced, rank, dtype, op)
    for op in ("BAND", "BOR", "BXOR"):
        yield f"all_reduce {op}", partial(all_reduced, rank, torch.int32, op)

    def strided(group: Group) -> torch.Tensor:
        x = numbers(rank, 12).reshape(3, 4)
        if group is dist.group.WORLD:
            dist.all_reduce(x.t()[::2], group=group)  # Gloo takes none with gaps
        else:
            part = x.t()[::2].contiguous()
            dist.all_reduce(part, group=group)
            x.t()[::2] = part
        return x

    yield "all_reduce, strided", strided

    def waited(group: Group) -> Any:
        xs = [numbers(rank, 1000), numbers(rank, 50_000), numbers(rank, 3)]
        works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
        futures = [work.get_future() for work in works]
        doubled = futures[1].then(lambda future: future.value()[0] * 2).wait()
        for work in works:
            work.wait()
        assert all(work.is_completed() for work in works)
        return [*xs, doubled, *(future.wait()[0] for future in futures)]

    yield "all_reduce, async", waited

    def reduced(group: Group) -> Any:
        x = numbers(rank, 5)
        dist.reduce(x, 1, group=group)
        return x if rank == 1 else None  # elsewhere undefined

    yield "reduce", reduced

    def sparse(group: Group) -> Any:
        x = torch.sparse_coo_tensor([[0, 2, rank]], torch.tensor([1.0, 2.0, rank + 1.0]), (5,))
        dist.all_reduce(x, group=group)
        return x.to_dense()

    yield "all_reduce, sparse", sparse


def all_reduced(rank: int, dtype: torch.dtype, op: str, group: Group) -> torch.Tensor:
    x = numbers(rank, 10, dtype)
    dist.all_reduce(x, getattr(ReduceOp, op), group=group)
    return x


def of_lists(rank: int, size: int) -> Iterator[tuple[str, Callable[[Group], Any]]]:
    def all_gather(group: Group) -> Any:
        outs = [torch.zeros(2, 3) for _ in range(size)]
        dist.all_gather(outs, numbers(rank, 6).reshape(2, 3), group=group)
        together = torch.zeros(size, 4, dtype=torch.bool)
        dist.all_gather(list(together.unbind()), torch.full((4,), rank == 1), group=group)
        return [*outs, together]

    yield "all_gather", all_gather

    def gather(group: Group) -> Any:
        outs = [torch.zeros(4) for _ in range(size)] if rank == 1 else None
        dist.gather(numbers(rank, 4), outs, dst=1, group=group)
        return outs

    yield "gather", gather

    def scatter(group: Group) -> Any:
        out = torch.zeros(4, dtype=torch.bfloat16)
        parts = [numbers(part, 4, torch.bfloat16) for part in range(size)] if rank == 1 else None
        dist.scatter(out, parts, src=1, group=group)
        return out

    yield "scatter", scatter

    def reduce_scatter(group: Group) -> Any:
        out = torch.zeros(3)
        dist.reduce_scatter(out, [numbers(rank + part, 3) for part in range(size)], group=group)
        return out

    yield "reduce_scatter", reduce_scatter

    def all_to_all(group: Group) -> Any:
        if group is not dist.group.WORLD:  # Gloo has no lists for it
            return [numbers(part, rank + 1) * (rank + 1) for part in range(size)]
        outs = [torch.zeros(rank + 1) for _ in range(size)]
        dist.all_to_all(outs, [numbers(rank, part + 1) * (part + 1) for part in range(size)], group=group)
        return outs

    yield "all_to_all", all_to_all


def of_single_tensors(rank: int, size: int) -> Iterator[tuple[str, Callable[[Group], Any]]]:
    def broadcast(group: Group) -> Any:
        x = numbers(rank, 5, torch.float64)
        dist.broadcast(x, 1, group=group)
        return x

    yield "broadcast", broadcast

    def all_gather(group: Group) -> Any:
        out = torch.zeros(2 * size, 3)
        dist.all_gather_single(out, numbers(rank, 6).reshape(2, 3), group=group)
        return out

    yield "all_gather_single", all_gather

    def reduce_scatter(group: Group) -> Any:
        out = torch.zeros(2)
        dist.reduce_scatter_single(out, numbers(rank, 2 * size), group=group)
        return out

    yield "reduce_scatter_single", reduce_scatter

    def all_to_all(group: Group) -> Any:
        out = torch.zeros(size, 2)
        dist.all_to_all_single(out, numbers(rank, 2 * size).reshape(size, 2), group=group)
        rows = [(rank + part) % 2 + 1 for part in range(size)]
        uneven = torch.zeros(sum(rows), 2)
        dist.all_to_all_single(uneven, numbers(rank, 2 * sum(rows)).reshape(-1, 2), rows, rows, group=group)
        return [out, uneven]

    yield "all_to_all_single", all_to_all

    def barrier(group: Group) -> None:
        dist.barrier(group)
        dist.barrier(group, async_op=True).wait()

    yield "barrier", barrier


def of_objects(rank: int, size: int) -> Iterator[tuple[str, Callable[[Group], Any]]]:
    def objects(group: Group) -> Any:
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, {"rank": rank, "data": list(range(rank * 10))}, group=group)
        told = [{"from": 1}, "text"] if rank == 1 else [None, None]
        dist.broadcast_object_list(told, src=1, group=group)
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object((rank, "x" * rank), gathered, dst=0, group=group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, src=0, group=group)
        assert everyones[1]["rank"] == 1
        assert told[0] == {"from": 1}
        assert mine == [rank]
        assert gathered is None or gathered[2] == (2, "xx")

    yield "objects", objects


def test_each_call_gives_what_gloo_gives(job: StartJob, tmp_path: Path) -> None:
    told = run(job, everything, 3, tmp_path)
    assert all(one == told[0] for one in told)
    assert len(told[0]["compared"]) > 40


# -- what Gloo has not -------------------------------------------------------------------------------------------------


def beyond(here: Here, file: str) -> None:
    rank, size = me()
    join(here, file, rank, size)
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
    here.tell(
        mean=mean.tolist(),
        whole=whole.tolist(),
        scaled=scaled.tolist(),
        part=part.tolist(),
        ragged=[one.tolist() for one in ragged],
        eighths=eighths.float().tolist(),
        coalesced=[one.flatten().tolist() for one in coalesced],
    )
    dist.destroy_process_group()


def test_ops_and_shapes_that_gloo_has_not(job: StartJob, tmp_path: Path) -> None:
    for one in run(job, beyond, 2, tmp_path):
        assert one == {
            "mean": [1.5, 3.0],
            "whole": [-4, 4],  # towards zero
            "scaled": [1.0, 1.0],
            "part": [0.5, 0.5],
            "ragged": [[0.0], [1.0, 1.0]],
            "eighths": [1.0] * 4,
            "coalesced": [[1.0] * 3, [1] * 4],
        }


# -- groups ------------------------------------------------------------------------------------------------------------


def groups(here: Here, file: str) -> None:
    rank, size = me()
    join(here, file, rank, size)
    sums = []
    pair, other = dist.new_group([0, 2]), dist.new_group([0, 2])
    if rank != 1:
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in (pair, other)[:: 1 - rank]]
        for work in works:  # rank 2 calls them the other way around: the groups have an order each
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
    join(here, file, rank, size)  # the same store serves again
    again = torch.ones(1)
    dist.all_reduce(again)
    world = dist.group.WORLD
    dist.destroy_process_group()
    world.shutdown()  # what is closed is closed
    world.abort()
    try:
        world.allreduce([torch.ones(1)]).wait()
    except gw.Closed:
        here.tell(sums=sums, turned=[int(one) for one in outs], again=int(again), backend=backend, named=bool(name))


def test_groups_of_groups_and_a_second_beginning(job: StartJob, tmp_path: Path) -> None:
    told = run(job, groups, 3, tmp_path)
    expected = {"turned": [2, 0, 1], "again": 3, "backend": "gradwire", "named": True}
    assert told == [{"sums": sums, **expected} for sums in ([2], [], [2])]


# -- messages ----------------------------------------------------------------------------------------------------------


def messages(here: Here, file: str) -> None:
    rank, size = me()
    join(here, file, rank, size)
    large = 100_000  # elements: more than travel without a recv to take them
    peer = 1 - rank
    mine, theirs = torch.full((large,), float(rank)), torch.full((large,), -1.0)
    sent = [dist.isend(mine + tag, peer, tag=tag) for tag in (1, 2)]  # both send first
    dist.recv(theirs, peer, tag=2)  # and take them in the other order
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
    here.tell(first=first, second=second[0].item(), source=source, batch=theirs[0].item())
    dist.barrier()
    dist.destroy_process_group()


def test_messages_cross_and_come_in_any_order(job: StartJob, tmp_path: Path) -> None:
    zero, one = run(job, messages, 2, tmp_path)
    assert zero == {"first": 2.0, "second": 3.0, "source": 1, "batch": 3.0}
    assert one == {"first": 1.0, "second": 2.0, "source": None, "batch": 0.0}


# -- failures ----------------------------------------------------------------------------------------------------------


def train(here: Here, file: str) -> None:
    rank, size = me()
    join(here, file, rank, size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
    try:
        for step in range(1_000_000):
            if step == 3:
                here.tell(training=True)
            model(torch.randn(8, 64)).sum().backward()
            model.zero_grad()
    except gw.PeerLost as error:
        here.tell_error(error)
    try:
        dist.all_reduce(torch.ones(1))
    except ConnectionError as error:
        here.tell_error(error)
    dist.destroy_process_group()


def test_a_killed_rank_is_an_error_of_the_others_in_plain_ddp(job: StartJob, tmp_path: Path) -> None:
    with job(train, 3, str(tmp_path / "store"), environ=environ_of(3)) as ranks:
        for rank in ranks:
            assert rank.hear(VERY_LONG)["training"]
        killed = ranks[1].signal()
        for rank in (ranks[0], ranks[2]):
            told = rank.hear()
            assert told["error"] == "PeerLost", told
            assert told["culprit"] == 1
            assert told["at"] - killed < 5.0  # a second at most, on a machine that is not busy
            assert rank.hear()["error"] == "PeerLost"
            assert rank.ended() == 0, rank.output()


def late(here: Here, file: str) -> None:
    rank, size = me()
    join(here, file, rank, size)
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
        here.tell(error=str(error))
        here.hear()
    else:
        here.tell(error="none")
        here.hear()
    dist.destroy_process_group()


def test_a_timeout_of_torch_is_one_of_ours(job: StartJob, tmp_path: Path) -> None:
    with job(late, 2, str(tmp_path / "store"), environ=environ_of(2)) as ranks:
        assert "0.2 s" in ranks[0].hear(VERY_LONG)["error"]
        for rank in ranks:
            rank.tell()
            assert rank.ended() == 0, rank.output()


# -- torch's side ------------------------------------------------------------------------------------------------------


def test_torch_knows_the_name_without_an_import_and_imports_nothing_of_ours() -> None:
    script = (
        "import sys, torch, torch.distributed as dist; "
        "assert dist.Backend.GRADWIRE == 'gradwire' and dist.Backend.backend_capability['gradwire'] == ['cpu']; "
        "assert dist.Backend.default_device_backend_map['cpu'] == 'gloo'; "
        "assert 'gradwire' not in sys.modules; "
        "import gradwire.torch"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_nothing_that_goes_wrong_in_torch_at_registration_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import gradwire_autoload

    monkeypatch.setattr(dist.Backend, "backend_list", None)
    gradwire_autoload.register()
