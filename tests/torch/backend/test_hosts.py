"""The torch.distributed backend across hosts: required settings, and the same training result as on one host."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP needs it: import it once, before ranks are forked
import torch.distributed as dist

import gradwire as gw
from gradwire.group.internals import parts_of
from support import tls_files
from support.namespaces import Hosts, enter
from support.namespaces import hosts_fixture as hosts_fixture
from support.processes import Here, Rank, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.small_models import batch, loss, mlp

SIZE = 4  # ranks: 0 and 1 on one host, 2 and 3 on the other
PORT = 29_500  # any port will do: the network namespace is private
VERY_LONG = 100.0  # seconds: a few are enough, unless the machine is busy
NOWHERE = "192.0.2.1"  # an address reserved for documentation (RFC 5737)

Environ = Callable[[int], dict[str, str]]


def on_hosts(number: int, **more: str) -> Environ:
    """Return the environment variables of torchrun, with the ranks distributed over `number` hosts."""
    here = SIZE // number

    def environ(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(SIZE),
            "LOCAL_RANK": str(rank % here),
            "LOCAL_WORLD_SIZE": str(here),
            "GRADWIRE_HOST": f"host {rank // here}",
            **more,
        }

    return environ


def join(store: str) -> gw.Group:
    torch.set_num_threads(1)
    rank, limit = int(os.environ["RANK"]), timedelta(seconds=VERY_LONG)
    dist.init_process_group("gradwire", store, rank=rank, world_size=SIZE, timeout=limit)
    group: gw.Group = dist.group.WORLD.group
    return group


def trains(here: Here, store: str) -> Any:
    group = join(store)
    model = torch.nn.parallel.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(5):
        optimizer.zero_grad()
        x, y = batch(seed, group.rank)
        loss(model(x), y).backward()
        optimizer.step()
    here.send(
        hosts=[list(ranks) for ranks in group.topology.hosts],
        encrypted=parts_of(group).generation.transport.encrypted,
        weights=torch.cat([one.detach().flatten() for one in model.parameters()]).tolist(),
    )
    here.receive()  # do not leave while other ranks train
    return model


def trained(job: StartJob, store: Path, environ: Environ) -> dict[str, Any]:
    """Run the training, check that all ranks report the same result, and return it."""
    with job(trains, SIZE, f"file://{store}", environ=environ) as ranks:
        reports = [rank.receive() for rank in ranks]
    assert all(one == reports[0] for one in reports)
    return reports[0]


def assert_equal_weights(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["weights"] == pytest.approx(other["weights"], rel=0, abs=1e-12)


def test_backend_two_hosts_train_to_the_weights_of_one_host(job: StartJob, tmp_path: Path) -> None:
    """All ranks are on this machine, so links need no secret and no certificates, but no memory is shared."""
    together = trained(job, tmp_path / "one", on_hosts(1))
    apart = trained(job, tmp_path / "two", on_hosts(2, MASTER_ADDR="127.0.0.1"))
    assert together["hosts"] == [[0, 1, 2, 3]]
    assert apart["hosts"] == [[0, 1], [2, 3]]
    assert_equal_weights(apart, together)


# -- missing settings -------------------------------------------------------------------------------------------------


def fails(here: Here, store: str) -> None:
    try:
        join(store)
    except gw.GradwireError as error:
        here.send_error(error)


TLS = {"GRADWIRE_TLS_CA": "ca.pem", "GRADWIRE_TLS_CERT": "m0.pem", "GRADWIRE_TLS_KEY": "m0.key"}


@pytest.mark.parametrize(
    ("given", "error", "missing"),
    [
        ({}, "NoConnection", "neither torch's store nor MASTER_ADDR"),
        ({"MASTER_ADDR": NOWHERE}, "ConfigError", "GRADWIRE_TLS_CA"),
        ({"MASTER_ADDR": NOWHERE, "GRADWIRE_TOKEN": "long enough for a token"}, "ConfigError", "GRADWIRE_TLS_CA"),
        ({"MASTER_ADDR": NOWHERE, "GRADWIRE_INSECURE": "1"}, "ConfigError", "set GRADWIRE_TOKEN"),
        ({"MASTER_ADDR": NOWHERE} | TLS, "ConfigError", "set GRADWIRE_TOKEN"),
    ],
)
def test_backend_hosts_with_missing_settings_raise_an_error_that_names_them(
    job: StartJob, tmp_path: Path, given: dict[str, str], error: str, missing: str
) -> None:
    """Every rank raises the error at once, without connecting to another rank."""
    certificates = {name: str(tls_files.folder() / file) for name, file in TLS.items() if name in given}
    environ = on_hosts(2, **given | certificates)
    with job(fails, SIZE, f"file://{tmp_path / 'store'}", environ=environ) as ranks:
        for rank in ranks:
            report = rank.receive()
            assert report["error"] == error
            assert missing in report["text"]


# -- two networks -----------------------------------------------------------------------------------------------------


def trains_until_one_is_lost(here: Here, networks: list[int]) -> None:
    enter(networks[int(os.environ["RANK"]) // 2])
    model = trains(here, "env://")
    try:
        while True:
            model(batch(0, dist.get_rank())[0]).sum().backward()
    except gw.GradwireError as error:
        here.send_error(error)
    dist.destroy_process_group()


def secured(hosts: Hosts) -> Environ:
    common, where = with_token(hosts), tls_files.folder()

    def environ(rank: int) -> dict[str, str]:
        files = {"CA": "ca.pem", "CERT": f"m{rank}.pem", "KEY": f"m{rank}.key"}
        return common(rank) | {f"GRADWIRE_TLS_{name}": str(where / file) for name, file in files.items()}

    return environ


def with_token(hosts: Hosts, **given: str) -> Environ:
    """Return an environment with a token, but without certificates."""
    token = secrets.token_hex(32)
    return on_hosts(2, MASTER_ADDR=hosts.address(0), MASTER_PORT=str(PORT), GRADWIRE_TOKEN=token, **given)


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [True, False])
def test_backend_two_networks_train_to_the_weights_of_one_host(
    job: StartJob, hosts: Hosts, tmp_path: Path, encrypted: bool
) -> None:
    environ = secured(hosts) if encrypted else with_token(hosts, GRADWIRE_INSECURE="1")
    with job(trains_until_one_is_lost, SIZE, hosts.pids, environ=environ) as ranks:
        reports = [rank.receive() for rank in ranks]
        assert all(one == reports[0] for one in reports)
        assert reports[0]["hosts"] == [[0, 1], [2, 3]]
        assert reports[0]["encrypted"] == encrypted
        assert_equal_weights(reports[0], trained(job, tmp_path / "store", on_hosts(1)))
        for rank in ranks:
            rank.send()
        _lose(ranks, 3)


def _lose(ranks: list[Rank], number: int) -> None:
    """Kill one rank, and check that the others name it."""
    ranks[number].signal()
    for rank in ranks:
        if rank.number != number:
            report = rank.receive()
            assert (report["error"], report["culprit"]) == ("PeerLost", number), report["text"]
            assert rank.ended() == 0, rank.output()
