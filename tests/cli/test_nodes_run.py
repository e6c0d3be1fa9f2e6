"""`gradwire run --nnodes`: one launcher per host. Most tests run both launchers on this host."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gradwire.launch.worker_setup import free_port
from gradwire.security import certificates
from support.documents import ROOT, clean_environ
from support.launch_jobs import LONG, Ready, Watched, start_command, written
from support.namespaces import Hosts
from support.namespaces import hosts_fixture as hosts_fixture

Launcher = subprocess.Popen[str]
StartNode = Callable[..., Launcher]

SUM = """
    import os
    import gradwire as gw
    with gw.init() as group:
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
        print(group.all_reduce(group.rank), *(os.environ[name] for name in names))
"""
WAIT = """
    import os, signal, sys
    rank = int(os.environ["RANK"])
    print("ready", os.getpid(), flush=True)
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StartNode]:
    """node(rank, arguments…): `gradwire run --nnodes 2` on a host, killed at the end if it has not ended."""
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "tmp").mkdir()
    with contextlib.ExitStack() as stack:

        def start(rank: int, *arguments: str, nodes: str = "2", environ: Mapping[str, str] | None = None) -> Launcher:
            options = ("--nnodes", nodes, "--node-rank", str(rank), "--address", address, "--grace", "0")
            return start_command(
                stack, tmp_path, {**clean_environ(tmp_path), **(environ or {})}, "run", *options, *arguments
            )

        yield start


def finish(launcher: Launcher) -> tuple[int, str, str]:
    out, err = launcher.communicate(timeout=LONG)
    return launcher.returncode, out, err


def ready(launcher: Launcher, count: int) -> list[Watched]:
    """The workers of a launcher that have printed "ready" and their pid."""
    assert launcher.stdout is not None
    lines = [launcher.stdout.readline().split() for _ in range(count)]
    assert all(line[1] == "ready" for line in lines), lines
    return [Watched(int(line[2])) for line in lines]


def test_nodes_run_numbers_ranks_over_all_hosts(node: StartNode, tmp_path: Path) -> None:
    written(tmp_path, SUM, "train.py")
    second, first = node(1, "-n", "3", "train.py"), node(0, "-n", "1", "--job", "digits", "train.py")
    code, out, err = finish(first)
    assert code == 0, err
    assert "gradwire: job digits: 4 ranks on 2 nodes; node 0 has rank 0\n" in err
    total, rank, local, count, group, port = out.split()[1:]
    assert (total, rank, local, count, group) == ("6", "0", "0", "1", "0")
    code, out, err = finish(second)
    assert code == 0, err
    assert "gradwire: job digits: 4 ranks on 2 nodes; node 1 has ranks 1-3\n" in err
    assert sorted(out.splitlines()) == [f"[{rank}] 6 {rank} {rank - 1} 3 1 {port}" for rank in (1, 2, 3)]


def test_nodes_run_failure_on_one_host_ends_all_with_its_root_cause(node: StartNode, tmp_path: Path) -> None:
    fails = "if rank == 1:\n    raise ValueError('no data on this host')\nsignal.pause()\n"
    script = written(tmp_path, WAIT, "train.py")
    with open(script, "a") as file:
        file.write(fails)
    launchers = [node(0, "-n", "1", "train.py"), node(1, "-n", "1", "train.py")]
    for code, _, err in map(finish, launchers):
        assert code == 1
        assert err.rstrip().endswith("ValueError: no data on this host")
        assert "gradwire: rank 0 was stopped" in err
    assert list((tmp_path / "tmp").glob("gradwire-*")) != []


@pytest.mark.slow
def test_nodes_run_rank_that_exits_with_0_too_early_is_the_root_cause_on_all_hosts(
    node: StartNode, tmp_path: Path
) -> None:
    leaves = """
        import sys
        import gradwire as gw
        group = gw.init()
        if group.rank == 1:
            sys.exit(0)
        group.barrier()
    """
    written(tmp_path, leaves, "train.py")
    launchers = [node(0, "-n", "1", "train.py"), node(1, "-n", "1", "train.py")]
    for code, _, err in map(finish, launchers):
        assert code == 1
        assert "while other ranks still needed it" in err.partition("the root cause:")[2]


@pytest.mark.slow
def test_nodes_run_stopped_on_one_host_stops_on_all(node: StartNode, tmp_path: Path) -> None:
    with open(written(tmp_path, WAIT, "train.py"), "a") as file:
        file.write("signal.pause()\n")
    first, second = node(0, "-n", "1", "train.py"), node(1, "-n", "1", "train.py")
    workers = ready(first, 1) + ready(second, 1)
    first.send_signal(signal.SIGTSTP)
    assert first.stderr is not None
    while "Ctrl-Z does not suspend this command" not in (line := first.stderr.readline()):
        assert line
    second.send_signal(signal.SIGINT)
    codes_and_errors = [finish(launcher) for launcher in (first, second)]
    assert [code for code, _, _ in codes_and_errors] == [128 + signal.SIGINT] * 2
    assert "the launcher of node 1" in codes_and_errors[0][2]
    assert all(worker.ends() for worker in workers)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_nodes_run_lost_launcher_ends_the_others(killed: int, node: StartNode, tmp_path: Path) -> None:
    with open(written(tmp_path, WAIT, "train.py"), "a") as file:
        file.write("signal.pause()\n")
    launchers = [node(0, "-n", "1", "train.py"), node(1, "-n", "1", "train.py")]
    workers = [worker for launcher in launchers for worker in ready(launcher, 1)]
    launchers[killed].kill()
    code, _, err = finish(launchers[1 - killed])
    assert code == 1
    assert f"the launcher of node {killed} (host " in err
    assert all(worker.ends() for worker in workers)


@pytest.mark.slow
def test_nodes_run_names_the_missing_node_until_it_comes(node: StartNode, tmp_path: Path) -> None:
    written(tmp_path, SUM, "train.py")
    second = node(1, "-n", "1", "train.py")
    assert second.stderr is not None
    assert "(node 0 is missing); trying for " in second.stderr.readline()
    first = node(0, "-n", "1", "train.py")
    assert finish(first)[0] == finish(second)[0] == 0


@pytest.mark.slow
def test_nodes_run_without_the_others_fails_after_the_timeout_and_names_them(node: StartNode, tmp_path: Path) -> None:
    written(tmp_path, SUM, "train.py")
    limit = {"GRADWIRE_TIMEOUT": "1"}
    code, _, err = finish(node(0, "-n", "1", "train.py", nodes="3", environ=limit))
    assert code == 1
    assert "missing nodes 1, 2 of 3" in err
    code, _, err = finish(node(1, "-n", "1", "train.py", nodes="3", environ=limit))
    assert code == 1
    assert "node 1 cannot join the job: no coordinator answered at 127.0.0.1:" in err
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_nodes_run_surplus_and_different_launchers_are_refused_and_harm_nothing(
    node: StartNode, tmp_path: Path
) -> None:
    at_work = Ready()
    with open(written(tmp_path, at_work.code + WAIT.replace("    ", ""), "train.py"), "a") as file:
        file.write("say(b'up\\n')\nready.recv(1)\n")
    first = node(0, "-n", "1", "--job", "digits", "train.py")
    code, _, err = finish(node(1, "-n", "1", "train.py", nodes="3"))
    assert code == 1
    assert "expects a job of 3 nodes, and this one has 2" in err
    code, _, err = finish(node(1, "-n", "1", "--job", "other", "train.py"))
    assert code == 1
    assert "belongs to job 'other', and this is job 'digits'" in err
    second = node(1, "-n", "1", "train.py")
    with at_work.told(2):
        code, _, err = finish(node(1, "-n", "1", "train.py"))
        assert code == 1
        assert "all 2 nodes of the job there have joined" in err
    at_work.close()
    assert finish(first)[0] == finish(second)[0] == 0


@pytest.mark.slow
def test_nodes_run_other_secret_is_refused(node: StartNode, tmp_path: Path) -> None:
    written(tmp_path, SUM, "train.py")
    first = node(0, "-n", "1", "train.py", environ={"GRADWIRE_TOKEN": "the secret of this job"})
    code, _, err = finish(node(1, "-n", "1", "train.py", environ={"GRADWIRE_TOKEN": "the secret of another"}))
    assert code == 1
    assert "GRADWIRE_TOKEN" in err
    first.terminate()
    finish(first)


@pytest.mark.slow
def test_nodes_run_with_a_range_is_elastic_and_numbers_workers_uniquely(node: StartNode, tmp_path: Path) -> None:
    script = """
        import gradwire as gw
        run = gw.elastic({})
        for step in run.steps(3):
            with step:
                run.group.barrier()
        print(run.group.size)
        run.close()
    """
    written(tmp_path, script, "train.py")
    launchers = [node(rank, "-n", "2", "--job", "digits", "train.py", nodes="2:3") for rank in (1, 0)]
    ended = [finish(launcher) for launcher in launchers]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert sorted(line for _, out, _ in ended for line in out.splitlines()) == [f"[{one}] 4" for one in range(4)]
    assert "(job digits)" in ended[1][2]


SETTINGS = {"OMP_NUM_THREADS": "1", "GRADWIRE_TOKEN": "a secret that both hosts have"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["certificates", "insecure"])
def test_nodes_run_trains_on_two_hosts(way: str, hosts: Hosts, tmp_path: Path) -> None:
    if way == "certificates":
        certificates.make(tmp_path / "certs", "digits", ["a", "b"], ["a"])
    launchers = []
    with contextlib.ExitStack() as stack:
        for rank, (name, pid) in enumerate(zip("ab", hosts.pids, strict=True)):
            files = {"CA": "ca.pem", "CERT": f"{name}.pem", "KEY": f"{name}.key"}
            tls = {f"GRADWIRE_TLS_{one}": str(tmp_path / "certs" / file) for one, file in files.items()}
            options = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2"]
            options += ["--address", f"{hosts.address(0)}:29500", *(["--insecure"] if way == "insecure" else [])]
            command = [sys.executable, "-m", "gradwire", "run", *options, str(ROOT / "examples" / "digits.py")]
            environ = clean_environ(tmp_path) | SETTINGS | (tls if way == "certificates" else {})
            process = subprocess.Popen(
                ["nsenter", "--net", f"--target={pid}", *command],
                cwd=tmp_path,
                env=environ | {"GRADWIRE_HOST": name},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            launchers.append(process)
        outputs = [launcher.communicate(timeout=4 * LONG)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert "node 1 has ranks 2, 3" in outputs[1]
