"""The options of `gradwire run` for several hosts: torchrun's spellings and variables, and wrong usage."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gradwire.cli import main
from gradwire.cli.node_options import NodeOptions
from gradwire.job.address import Address
from support.launch_jobs import written

FULL = NodeOptions(nnodes="2", node_rank="1", nproc="4", address="host-a:29500")


def test_node_options_describe_the_part_of_this_host() -> None:
    nodes = FULL.nodes(None)
    assert (nodes.fewest, nodes.most, nodes.workers, nodes.rank) == (2, 2, 4, 1)
    assert nodes.address == Address("host-a", 29500)
    assert not nodes.ranged


def test_node_options_without_any_mean_one_host() -> None:
    nodes = NodeOptions().nodes(3)
    assert (nodes.most, nodes.workers, nodes.several, nodes.ranged) == (1, 3, False, False)


@pytest.mark.parametrize(("text", "ranged"), [("1:3", True), ("2:2", True), ("1:1", False), ("3", False)])
def test_node_options_range_makes_a_job_of_several_hosts_elastic(text: str, ranged: bool) -> None:
    assert NodeOptions(nnodes=text, node_rank="0", address="host-a:29500").nodes(1).ranged is ranged


@pytest.mark.parametrize(
    ("options", "address"),
    [
        (NodeOptions(rdzv_endpoint="host-a:29500"), Address("host-a", 29500)),
        (NodeOptions(rdzv_endpoint="host-a"), Address("host-a", 29400)),
        (NodeOptions(master_addr="host-a", master_port="7"), Address("host-a", 7)),
        (NodeOptions(master_addr="host-a"), Address("host-a", 29500)),
        (NodeOptions(master_addr="::1", master_port="7"), Address("::1", 7)),
    ],
)
def test_node_options_address_in_spellings_of_torchrun(options: NodeOptions, address: Address) -> None:
    assert options.nodes(1).address == address


def test_node_options_variables_fill_what_the_command_line_leaves_out() -> None:
    environ = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_RDZV_ENDPOINT": "host-a:29500",
        "PET_RDZV_ID": "digits",
        "PET_MAX_RESTARTS": "3",
    }
    options = NodeOptions().with_variables(environ, size=None)
    assert options.nodes(None) == FULL.nodes(None)
    assert (options.job, options.restarts) == ("digits", 3)


def test_node_options_command_line_takes_precedence_over_variables() -> None:
    environ = {"PET_NNODES": "5", "PET_NPROC_PER_NODE": "9", "PET_NODE_RANK": "3", "PET_RDZV_ENDPOINT": "other:1"}
    assert FULL.with_variables(environ, size=None).nodes(None) == FULL.nodes(None)


def test_node_options_address_of_the_command_line_beats_every_spelling_in_variables() -> None:
    environ = {"PET_RDZV_ENDPOINT": "other:1", "PET_MASTER_ADDR": "another"}
    given = NodeOptions(nnodes="2", node_rank="0", master_addr="host-a")
    assert given.with_variables(environ, size=1).nodes(1).address == Address("host-a", 29500)


def test_node_options_variables_do_not_change_a_run_with_n() -> None:
    environ = {"PET_NNODES": "5", "PET_NODE_RANK": "3", "PET_MAX_RESTARTS": "3"}
    assert NodeOptions().with_variables(environ, size=2) == NodeOptions()


def test_node_options_0_restarts_and_no_run_id_are_the_defaults_of_torchrun() -> None:
    options = NodeOptions(max_restarts="0", rdzv_id="none")
    assert (options.restarts, options.job) == (None, None)


def test_node_options_cpu_means_one_worker_per_core() -> None:
    assert NodeOptions(nproc="cpu").nodes(None).workers == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (NodeOptions(nnodes="2", node_rank="2", address="host-a:1"), "2 hosts have the numbers 0 to 1"),
        (NodeOptions(nnodes="2", node_rank="-1", address="host-a:1"), "not a whole number"),
        (NodeOptions(nnodes="2", node_rank="0"), "needs --address"),
        (NodeOptions(nnodes="0"), "not a whole number of at least 1"),
        (NodeOptions(nnodes="3:2"), "the first number is the fewest hosts"),
        (NodeOptions(nnodes="2", node_rank="0", address="host-a"), "the port is missing"),
        (NodeOptions(nproc="gpu"), "gradwire trains on CPUs"),
        (NodeOptions(standalone=True, nnodes="2"), "--standalone is for one host"),
    ],
)
def test_node_options_wrong_usage_is_refused(options: NodeOptions, message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        options.nodes(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2", "-n", "1", "--address", "127.0.0.1:1"], "--nnodes 2 needs --node-rank"),
        (["-n", "1", "--nproc-per-node", "1"], "are the same"),
        (["--nnodes", "1:2", "--min", "1", "--address", "127.0.0.1:1"], "write the hosts as --nnodes MIN:MAX"),
        (["--nnodes", "2", "--node-rank", "0", "--address", "192.0.2.1:1"], "links are not encrypted"),
        (["--nnodes", "1:2", "--node-rank", "0", "--address", "192.0.2.1:1"], "links are not encrypted"),
        (["--nnodes", "1:2", "--node-rank", "1", "--address", "192.0.2.1:1"], "links are not encrypted"),
        (["--max", "2", "-n", "1", "--listen", "192.0.2.1"], "links are not encrypted"),
        (["-n", "1", "--job", "two words"], "visible ASCII characters"),
        (["--min", "1", "-n", "1", "--job", "two words"], "visible ASCII characters"),
    ],
)
def test_run_refuses_wrong_usage_before_workers_start(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("GRADWIRE_INSECURE", "GRADWIRE_TLS_CA", "GRADWIRE_TLS_CERT", "GRADWIRE_TLS_KEY"):
        monkeypatch.delenv(name, raising=False)
    started = tmp_path / "started"
    script = written(tmp_path, f"open({str(started)!r}, 'w')")
    done = CliRunner().invoke(main, ["run", *arguments, "--log-dir", str(tmp_path / "logs"), script])
    assert done.exit_code != 0
    assert message in done.output
    assert not started.exists()
