"""The torch.distributed backend with tensors of wrong sizes, overlapping tensors and many messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once, before ranks are forked
import torch.distributed as dist
from torch.distributed import ReduceOp

import gradwire as gw
from support.backend_ranks import environ_of, meet, run
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

LONG = 1 << 20  # elements: reading so far beyond a small tensor would crash


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# -- wrong sizes -------------------------------------------------------------------------------------------------------


def uses_wrong_sizes(here: Here, file: str) -> None:
    rank, _ = meet(file)
    output = torch.zeros(16)
    lists = [torch.zeros(3), torch.zeros(1)]
    refused = [
        error_of(lambda: dist.all_to_all_single(output[:2], torch.ones(LONG))),
        error_of(lambda: dist.all_to_all_single(torch.zeros(8), torch.ones(4))),
        error_of(lambda: dist.all_gather([torch.zeros(LONG)] * 2, torch.ones(2))),
        error_of(lambda: dist.all_gather([torch.zeros(2)] * 2, torch.ones(4))),
        error_of(lambda: dist.all_gather_into_tensor(torch.zeros(8), torch.ones(2))),
        error_of(lambda: dist.gather(torch.ones(2), lists if rank == 0 else None)) if rank == 0 else "InvalidSize",
        error_of(lambda: dist.scatter(torch.ones(2), lists if rank == 0 else None)) if rank == 0 else "InvalidSize",
        error_of(lambda: dist.reduce_scatter(torch.ones(3).int(), [torch.ones(2).int()] * 2, ReduceOp.BAND)),
    ]
    mean = torch.tensor([-64, -3, 7, 127], dtype=torch.int8)
    dist.all_reduce(mean, ReduceOp.AVG)
    outputs = [torch.zeros(2) for _ in range(2)] if rank == 0 else None
    gathered = dist.gather(torch.full((2,), float(rank)), outputs, async_op=True).get_future().wait()
    here.send(
        refused=[reason.partition(":")[0] for reason in refused],
        untouched=not output.any(),
        mean=mean.tolist(),
        gathered=[one.tolist() for one in gathered],
    )
    dist.barrier()
    dist.destroy_process_group()


def test_backend_tensors_of_wrong_sizes_raise_before_sending(job: StartJob, tmp_path: Path) -> None:
    reports = run(job, uses_wrong_sizes, 2, tmp_path)
    for one in reports:
        assert one["refused"] == ["InvalidSize"] * 8
        assert one["untouched"]
        assert one["mean"] == [64 - 128, -3, 7, -1]  # 127 + 127 is -2 in 8 bits
    assert [one["gathered"] for one in reports] == [[[0, 0], [1, 1]], []]


def sparse_shapes(here: Here, file: str) -> None:
    rank, _ = meet(file)
    size, at = ((4, 3), (6_000_000, 5_000_000))[rank]
    x = torch.sparse_coo_tensor(torch.tensor([[at]]), torch.ones(1), (size,))
    here.send(refused=error_of(lambda: dist.all_reduce(x)))


def test_all_reduce_sparse_tensors_of_different_shapes_raises_mismatch(job: StartJob, tmp_path: Path) -> None:
    for one in run(job, sparse_shapes, 2, tmp_path):
        assert one["refused"].startswith("CollectiveMismatch")
        assert "float32[4]" in one["refused"] or "float32[6000000]" in one["refused"]


def makes_different_calls(here: Here, file: str) -> None:
    rank, size = meet(file)
    x = torch.ones((2 + rank) * size)
    here.send(refused=error_of(lambda: dist.reduce_scatter_tensor(torch.zeros(2 + rank), x)))


def test_backend_mismatch_names_the_calling_lines_of_both_ranks(job: StartJob, tmp_path: Path) -> None:
    for one in run(job, makes_different_calls, 2, tmp_path):
        assert one["refused"].count(Path(__file__).name) == 2


# -- overlapping tensors -----------------------------------------------------------------------------------------------


def overlaps(here: Here, file: str) -> None:
    rank, size = meet(file)
    wrong = []
    for n in (1000, 70_000, 1 << 20):
        for at in (0, n // 2, n, rank * n):
            x = torch.arange(float(size * n)) + rank
            out = x[at : at + n]
            dist.reduce_scatter_tensor(out, x)
            mine = torch.arange(float(rank * n), float((rank + 1) * n)) * size + sum(range(size))
            wrong += [] if torch.equal(out, mine) else [f"reduce_scatter {n} at {at}"]
            whole = torch.full((size * n,), -1.0)
            part = whole[at : at + n]
            part.copy_(torch.arange(float(n)) + rank)
            dist.all_gather_into_tensor(whole, part)
            everyones = torch.cat([torch.arange(float(n)) + other for other in range(size)])
            wrong += [] if torch.equal(whole, everyones) else [f"all_gather {n} at {at}"]
    here.send(wrong=wrong)
    dist.barrier()
    dist.destroy_process_group()


def test_backend_overlapping_input_and_output_gives_correct_results(job: StartJob, tmp_path: Path) -> None:
    for size in (2, 3):
        folder = tmp_path / str(size)
        folder.mkdir()
        assert run(job, overlaps, size, folder) == [{"wrong": []}] * size


# -- messages ----------------------------------------------------------------------------------------------------------


def sends_many_messages(here: Here, file: str) -> None:
    rank, _ = meet(file)
    peer, short, long = 1 - rank, torch.full((15_000,), float(rank)), torch.full((20_000,), float(rank))
    sent = [dist.isend(short, peer) for _ in range(1500)]  # more than a link and a mailbox can hold
    sent += [dist.isend(long, peer, tag=tag) for tag in range(200)]
    threads = threading.active_count()
    right = 0
    for _ in range(1500):
        x = torch.zeros(15_000)
        dist.recv(x, peer)
        right += bool((x == peer).all())
    for tag in range(200):
        x = torch.zeros(20_000)
        dist.recv(x, peer, tag=tag)
        right += bool((x == peer).all())
    for one in sent:
        one.wait()
    here.send(right=right, threads=threads)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_isend_1700_messages_before_any_recv_arrive_without_a_thread_each(job: StartJob, tmp_path: Path) -> None:
    for one in run(job, sends_many_messages, 2, tmp_path):
        assert one["right"] == 1700
        assert one["threads"] < 50


def waits_with_a_timeout(here: Here, file: str) -> None:
    rank, _ = meet(file, seconds=1000)
    if rank == 0:
        sent, asked = dist.isend(torch.ones(LONG), 1), dist.irecv(torch.ones(1), 1)
        asked.get_future()  # a background thread waits for it
        limit = timedelta(seconds=0.2)
        here.send(refused=[error_of(lambda: sent.wait(limit)), error_of(lambda: asked.wait(limit))])
    else:
        here.send(refused=["Timeout", "Timeout"])
    here.receive()
    dist.destroy_process_group()


def waits_in_a_callback(here: Here, file: str) -> None:
    rank, _ = meet(file)
    if rank == 0:
        first, second = (dist.isend(torch.ones(LONG), 1, tag=tag) for tag in (1, 2))
        waited = first.get_future().then(lambda _: second.wait())
        waited.wait()
        here.send(completed=True)
    else:
        for tag in (1, 2):
            dist.recv(torch.zeros(LONG), 0, tag=tag)
        here.send(completed=True)
    dist.barrier()
    dist.destroy_process_group()


def test_isend_callback_that_waits_for_another_message_does_not_deadlock(job: StartJob, tmp_path: Path) -> None:
    assert run(job, waits_in_a_callback, 2, tmp_path) == [{"completed": True}] * 2


def test_message_wait_with_a_timeout_raises_timeout(job: StartJob, tmp_path: Path) -> None:
    with job(waits_with_a_timeout, 2, str(tmp_path / "store"), environ=environ_of(2)) as ranks:
        for rank in ranks:
            assert [reason.partition(":")[0] for reason in rank.receive()["refused"]] == ["Timeout"] * 2
        for rank in ranks:
            rank.send()
            assert rank.ended() == 0, rank.output()
