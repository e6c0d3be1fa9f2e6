"""Processes that use torch.distributed with the gradwire backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.processes import StartJob


def meet(file: str, backend: str = "gradwire", seconds: float = 60.0) -> tuple[int, int]:
    """Initialise torch.distributed in a rank, through this file. Return the rank and the world size."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    return rank, size


def environ_of(size: int) -> Callable[[int], dict[str, str]]:
    return lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}


def run(job: StartJob, body: Callable[..., None], size: int, place: Path) -> list[dict[str, Any]]:
    """Run a job, assert that each rank exits with 0, and return the first report of each rank."""
    with job(body, size, str(place / "store"), environ=environ_of(size)) as ranks:
        reports = [rank.receive() for rank in ranks]
        for rank in ranks:
            assert rank.ended() == 0, rank.output()
    return reports
