"""The torch.distributed backend: each collective gives the result of Gloo in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from support.backend_ranks import meet, run
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

Group = Any


def everything(here: Here, file: str) -> None:
    rank, size = meet(file)
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    compared = [name for name, call in calls(rank, size) if same(name, call, ours, gloo)]
    dist.destroy_process_group()
    here.send(compared=compared)


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
            dist.all_reduce(x.t()[::2], group=group)  # Gloo does not support tensors with gaps
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
        return x if rank == 1 else None  # undefined on the other ranks

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
        if group is not dist.group.WORLD:  # Gloo does not support lists for it
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
        objects_sent = [{"from": 1}, "text"] if rank == 1 else [None, None]
        dist.broadcast_object_list(objects_sent, src=1, group=group)
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object((rank, "x" * rank), gathered, dst=0, group=group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, src=0, group=group)
        assert everyones[1]["rank"] == 1
        assert objects_sent[0] == {"from": 1}
        assert mine == [rank]
        assert gathered is None or gathered[2] == (2, "xx")

    yield "objects", objects


def test_backend_each_collective_gives_the_result_of_gloo(job: StartJob, tmp_path: Path) -> None:
    reports = run(job, everything, 3, tmp_path)
    assert all(one == reports[0] for one in reports)
    assert len(reports[0]["compared"]) > 40
