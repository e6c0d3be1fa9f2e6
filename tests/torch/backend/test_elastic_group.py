"""`gw.elastic` and `gw.Sampler` use the group of `torch.distributed.init_process_group("gradwire")`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from support.backend_ranks import meet, run
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture


def trains(here: Here, file: str) -> None:
    rank, size = meet(file)
    weight = torch.zeros(2)
    elastic = gw.elastic({"weight": weight}, checkpoint=str(Path(file).parent / "checkpoints"))
    elastic.begin()
    first = elastic.completed + 1
    shares = gw.Sampler(10).epoch(0).tolist()
    for step in elastic.steps(first + 3):
        with step:
            gradient = torch.full((2,), rank + 1.0)
            dist.all_reduce(gradient)  # torch's calls and those of the run share one group
            weight += gradient
    here.send(
        at=[elastic.group.rank, elastic.group.size], of=[rank, size], first=first, share=shares, weight=weight.tolist()
    )
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_elastic_run_uses_the_torch_process_group_and_continues_from_its_checkpoint(
    size: int, job: StartJob, tmp_path: Path
) -> None:
    for first in (0, 3):
        (tmp_path / "store").unlink(missing_ok=True)
        reports = run(job, trains, size, tmp_path)
        assert [report["at"] for report in reports] == [[rank, size] for rank in range(size)]
        assert [report["of"] for report in reports] == [report["at"] for report in reports]
        assert {report["first"] for report in reports} == {first}
        assert sorted(index for report in reports for index in report["share"]) == list(range(10))
        assert {tuple(report["weight"]) for report in reports} == {((first + 3.0) * sum(range(1, size + 1)),) * 2}
