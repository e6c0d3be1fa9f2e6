"""Processes with valid credentials that do not fit a running elastic job are refused, and do not disturb the job."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.membership.client import requests
from gradwire.membership.coordinator.service import Coordinator
from support.processes import Here, Rank, Zygote
from support.processes import zygote_fixture as zygote_fixture

TOKEN = secrets.token_urlsafe(16)
Start = Callable[..., Rank]


def train(here: Here, stop: str, until: int = 10**6) -> None:
    """Train until the file `stop` exists; report each generation and the end to the test."""
    state = {"w": np.zeros(1)}
    try:
        run = gw.elastic(state)
        seen = 0
        for step in run.steps(until):
            with step:
                ending = run.group.all_reduce(float(os.path.exists(stop)), op="max")
                state["w"] += 1
            if run.group.generation != seen:
                seen = run.group.generation
                here.send(generation=seen, size=run.group.size, step=step.index)
            if ending:
                break
        here.send(done=int(state["w"][0]), committed=run.committed, generation=seen, fence=str(run.fence))
        run.close()
    except gw.GradwireError as error:
        here.send_error(error)


def train_with_claims_of(here: Here, stop: str, protocol: int) -> None:
    """Train, but register like a worker of another gradwire version."""
    encode = requests.claim_to_wire  # type: ignore[attr-defined]

    def claim_to_wire(claim: Any) -> Any:
        request = encode(claim)
        request.protocol, request.version = protocol, "0.9"
        return request

    requests.claim_to_wire = claim_to_wire  # type: ignore[attr-defined]
    train(here, stop)


def train_with_another_set_up(here: Here, stop: str) -> None:
    """Train, and register normally, but use another set-up protocol between members."""
    from gradwire.generation import handshake

    handshake.PROTOCOL = 99  # type: ignore[attr-defined]
    train(here, stop)


class Job:
    """Members of an elastic job, and their coordinator in the test's process."""

    def __init__(self, zygote: Zygote, stop: Path) -> None:
        self.stop = stop
        self._zygote = zygote
        self._ranks: list[Rank] = []
        self.coordinator = self.coordinate("127.0.0.1", 0)

    def coordinate(self, host: str, port: int) -> Coordinator:
        made = Coordinator(host, port, size=2, minimum=1, maximum=4, secret=TOKEN.encode(), job="job")
        made.start()
        return made

    def start(self, body: Callable[..., None] = train, *args: Any, environ: Mapping[str, str] | None = None) -> Rank:
        fixed = {
            "GRADWIRE_ELASTIC": "1",
            "GRADWIRE_COORDINATOR": self.coordinator.address,
            "GRADWIRE_TOKEN": TOKEN,
            "GRADWIRE_TIMEOUT": "30",
        }
        rank = self._zygote.start(len(self._ranks), body, (str(self.stop), *args), fixed | dict(environ or {}))
        self._ranks.append(rank)
        return rank

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        self.coordinator.stop()


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Iterator[Job]:
    made = Job(zygote, tmp_path / "stop")
    yield made
    made.close()


@pytest.fixture
def trainers(job: Job) -> list[Rank]:
    members = [job.start(), job.start()]
    assert [rank.receive()["generation"] for rank in members] == [1, 1]
    return members


def finish(job: Job, members: list[Rank]) -> list[dict[str, Any]]:
    job.stop.touch()
    return [rank.receive() for rank in members]


def test_worker_node_at_a_training_job_is_refused_and_the_job_continues(
    job: Job, trainers: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    for endpoint in ("", "10.0.0.5:4711"):
        with pytest.raises(gw.Refused, match="no data address, and the members of this job exchange data"):
            gw.WorkerNode(job.coordinator.address, endpoint=endpoint, timeout=30).start()
    ends = finish(job, trainers)
    assert [end["generation"] for end in ends] == [1, 1]
    assert len({end["done"] for end in ends}) == 1


@pytest.mark.parametrize(
    ("body", "args", "environ", "message"),
    [
        (train, (), {"GRADWIRE_TRANSPORT": "shm", "GRADWIRE_HOST": "elsewhere"}, "requires transport 'shm'"),
        (train_with_claims_of, (0,), {}, "runs an older gradwire (0.9)"),
        (train_with_claims_of, (7,), {}, "runs a newer gradwire (0.9)"),
    ],
    ids=["shm from another host", "older", "newer"],
)
def test_unfit_newcomer_is_refused_and_the_job_continues(
    body: Callable[..., None],
    args: tuple[Any, ...],
    environ: Mapping[str, str],
    message: str,
    job: Job,
    trainers: list[Rank],
) -> None:
    report = job.start(body, *args, environ=environ).receive()
    assert report["error"] == "Refused"
    assert message in report["text"]
    assert [end["generation"] for end in finish(job, trainers)] == [1, 1]


def test_newcomer_that_fails_in_set_up_is_blamed_and_the_others_regroup_without_it(
    job: Job, trainers: list[Rank]
) -> None:
    job.start(train_with_another_set_up)
    report = [rank.receive() for rank in trainers]
    assert all(one["size"] == 2 and one["generation"] >= 3 for one in report), report
    ends = finish(job, trainers)
    assert all("done" in end for end in ends), ends
    assert len({(end["done"], end["committed"]) for end in ends}) == 1


def test_members_of_an_old_run_are_refused_by_a_new_run(job: Job, trainers: list[Rank], tmp_path: Path) -> None:
    """The coordinator is restarted without its journal while members of the old run are training."""
    host, _, port = job.coordinator.address.rpartition(":")
    job.coordinator.stop()
    job.coordinator = job.coordinate(host, int(port))
    newcomers = [job.start(), job.start()]
    assert [rank.receive()["generation"] for rank in newcomers] == [1, 1]
    trainers[0].signal()
    refused = trainers[1].receive()
    assert refused["error"] == "OtherRun", refused
    assert "is a member of run" in refused["text"]
    assert "Restart this worker" in refused["text"]
    ends = finish(job, newcomers)
    assert [end["generation"] for end in ends] == [1, 1], "no member of the old run may join"
    assert len({(end["done"], end["committed"]) for end in ends}) == 1
