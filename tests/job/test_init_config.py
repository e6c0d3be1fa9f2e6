"""`gw.init(config=...)` in real processes: settings, certificates and the secret come from the object or a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.group.internals import parts_of
from gradwire.launch.worker_setup import free_port
from gradwire.membership.coordinator.service import Coordinator
from gradwire.security.secret import job_secret
from support import tls_files
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

TOKEN = "a token that is long enough"


def report(here: Here, config: gw.JobConfig) -> None:
    try:
        with gw.init(config=config) as group:
            encrypted = parts_of(group).generation.transport.encrypted
            here.send(sum=group.all_reduce(group.rank + 1), encrypted=encrypted, transport=group.capabilities.transport)
    except gw.GradwireError as error:
        here.send_error(error)


def joins(here: Here, address: str, folder: str, token_file: str) -> None:
    rank, where = int(os.environ["TEST_RANK"]), Path(folder)
    tls = gw.Credentials(where / "ca.pem", where / f"m{rank}.pem", where / f"m{rank}.key")
    report(here, gw.JobConfig(rank=rank, size=2, address=address, tls=tls, token_file=token_file, timeout=30.0))


def test_init_config_gives_rank_address_certificates_and_secret(job: StartJob, tmp_path: Path) -> None:
    token, address = tmp_path / "token", f"127.0.0.1:{free_port()}"
    token.write_text(f"{TOKEN}\n")
    overridden = {
        "GRADWIRE_RANK": "7",
        "GRADWIRE_ADDRESS": "h:1",
        "GRADWIRE_TLS_CA": "none",
        "GRADWIRE_TOKEN": "x" * 20,
    }

    def environ(rank: int) -> dict[str, str]:
        return {**overridden, "TEST_RANK": str(rank), "GRADWIRE_HOST": f"host-{rank}"}

    with job(joins, 2, address, str(tls_files.folder()), str(token), environ=environ) as ranks:
        for rank in ranks:
            assert rank.receive() == {"sum": 3, "encrypted": True, "transport": "tcp"}


def joins_by_file(here: Here, file: str) -> None:
    report(here, gw.JobConfig.from_file(file).replace(rank=int(os.environ["TEST_RANK"])))


def test_init_config_from_a_file_joins(job: StartJob, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"size = 2\naddress = '127.0.0.1:{free_port()}'\ntransport = 'tcp'\ntimeout = 30")
    with job(joins_by_file, 2, str(file), environ=lambda rank: {"TEST_RANK": str(rank)}) as ranks:
        for rank in ranks:
            assert rank.receive() == {"sum": 3, "encrypted": False, "transport": "tcp"}


def joins_an_elastic_job(here: Here, address: str) -> None:
    config = gw.JobConfig(address=address, served=True, elastic=True, timeout=30.0)
    with gw.init(config=config) as first:
        before = [first.local_rank, first.local_size, first.node_rank]
        first.barrier()
        with first.recover() as group:
            here.send(before=before, after=[group.local_rank, group.local_size, group.node_rank], rank=group.rank)


def test_init_config_of_an_elastic_job_recovers_and_counts_local_ranks_by_host(job: StartJob) -> None:
    secret = job_secret({"GRADWIRE_TOKEN": TOKEN}, loopback=True)
    hosts = "aba"
    with Coordinator("127.0.0.1", 0, size=3, minimum=2, maximum=3, secret=secret) as coordinator:

        def environ(rank: int) -> dict[str, str]:
            return {"GRADWIRE_TOKEN": TOKEN, "GRADWIRE_HOST": hosts[rank]}

        with job(joins_an_elastic_job, 3, coordinator.address, environ=environ) as ranks:
            found = [rank.receive() for rank in ranks]
    for numbers in ("before", "after"):
        local_ranks, local_sizes, nodes = zip(*(one[numbers] for one in found), strict=True)
        assert local_sizes == (2, 1, 2)
        assert (sorted((local_ranks[0], local_ranks[2])), local_ranks[1]) == ([0, 1], 0)
        assert nodes[0] == nodes[2] != nodes[1]


def test_init_config_with_a_token_file_that_is_missing_raises(tmp_path: Path) -> None:
    config = gw.JobConfig(rank=1, size=2, address="127.0.0.1:9", token_file=tmp_path / "none", timeout=5.0)
    with pytest.raises(gw.ConfigError, match=r"cannot read the token in .*/none"):
        gw.init(config=config)
    (tmp_path / "short").write_text("secret\n")
    with pytest.raises(gw.ConfigError, match=r"the token in .*/short has 6 characters and needs at least 16"):
        gw.init(config=config.replace(token_file=tmp_path / "short"))
    (tmp_path / "long").write_bytes(bytes(1 << 20))
    with pytest.raises(gw.ConfigError, match=r"the token in .*/long is too long"):
        gw.init(config=config.replace(token_file=tmp_path / "long"))
