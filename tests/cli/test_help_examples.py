"""Every command that a help text or the page of the benchmarks shows runs exactly as it is written there.

`…` stands for a value that only the reader has: here, a join token of the job.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gradwire.cli import main
from support.checkpoints import write_checkpoint
from support.documents import ROOT, clean_environ
from support.launch_jobs import LONG, written
from support.namespaces import Namespace

SECRET = "the secret of a job whose workers join by a token"
NOTHING: Mapping[str, str] = {}
SCRIPT = """
import os, sys
import gradwire as gw

assert sys.argv[1:] in ([], ["--epochs", "10"]), sys.argv
if "GRADWIRE_ADDRESS" in os.environ:
    run = gw.elastic({})
    for step in run.steps(3):
        with step:
            run.group.barrier()
    run.close()
"""


def examples(text: str) -> list[str]:
    """The indented commands in a help text; an explanation may follow after two spaces or more."""
    lines = [line[4:] for line in text.splitlines() if re.match(r" {4}(\w+=\S+ )?gradwire \w", line)]
    return [re.split(r" {2,}", line)[0] for line in lines]


def of_help_texts() -> list[str]:
    texts = [CliRunner().invoke(main, [name, "--help"], terminal_width=80).output for name in sorted(main.commands)]
    return [example for text in texts for example in examples(text)]


def of_the_benchmarks() -> list[str]:
    block = re.search(r"```console\n(.*?)```", (ROOT / "benchmarks" / "README.md").read_text("utf-8"), re.DOTALL)
    assert block is not None
    return [re.split(r"\s+#", line)[0].removeprefix("$ ") for line in block[1].splitlines()]


EXAMPLES = of_help_texts()
MEASURING = list(dict.fromkeys([*of_the_benchmarks(), *(one for one in EXAMPLES if re.search(r"gradwire bench", one))]))
INSTALLING = [one for one in MEASURING if "--install" in one]
ON_TWO_HOSTS = [one for one in EXAMPLES if "--nnodes" in one]
WITH_ADDRESS = [one for one in EXAMPLES if re.search(r"\d:\d", one) and one not in ON_TWO_HOSTS]
TUNING = [one for one in EXAMPLES if re.fullmatch(r"gradwire tune(?! --show).*", one)]
OTHERS = [one for one in EXAMPLES if one not in {*MEASURING, *WITH_ADDRESS, *ON_TWO_HOSTS, *TUNING}]


def start(command: str, folder: Path, network: Namespace | None, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    inside = [] if network is None else ["nsenter", "--net", f"--target={network.pid}"]
    return subprocess.Popen(
        [*inside, "bash", "-c", f"exec env {command}"],
        cwd=folder,
        env=clean_environ(folder) | {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder), **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def coordinator(
    command: str, folder: Path, network: Namespace | None = None, environ: Mapping[str, str] = NOTHING
) -> Iterator[None]:
    """A coordinator that serves when the block begins, and ends without an error after it."""
    with start(command, folder, network, environ) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not any("coordinator of job" in line for line in lines):
                lines.append(process.stdout.readline())
                assert lines[-1], f"the coordinator has ended: {lines}"
            yield
            process.terminate()
            output, _ = process.communicate(timeout=LONG)
            assert process.returncode == 0, output
        finally:
            process.kill()


def run(
    command: str,
    folder: Path,
    network: Namespace | None = None,
    environ: Mapping[str, str] = NOTHING,
    timeout: float = LONG,
) -> str:
    with start(command, folder, network, environ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
    assert process.returncode == 0, f"{command}\n{output}"
    return output


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Path:
    """A home folder with the scripts, the checkpoints and the other gradwire that the examples name."""
    home = tmp_path / "home"
    (home / "package").mkdir(parents=True)
    written(home, SCRIPT, "train.py")
    written(home / "package", SCRIPT, "train.py")
    for step in (99, 199):
        write_checkpoint(home / "saved", {"w": np.full(3, float(step))}, step)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".venv").symlink_to(sys.prefix)
    return home


@pytest.fixture(name="network")
def network_fixture() -> Iterator[Namespace]:
    """A host on which every port is free, and which has the addresses of the examples."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"network namespaces need root{''.join(f', {tool}' for tool in missing)}")
    with contextlib.ExitStack() as ends:
        network = Namespace(ends)
        network.ip("addr", "add", "10.0.0.1/32", "dev", "lo")
        yield network


def test_examples_are_found_in_every_help_text() -> None:
    assert {one.partition("gradwire ")[2].split()[0] for one in EXAMPLES} == set(main.commands)


@pytest.mark.parametrize("example", OTHERS)
def test_example_of_a_help_text_runs_as_written(example: str, folder: Path) -> None:
    if example.startswith("gradwire coordinator"):
        with coordinator(example, folder):
            return
    run(example, folder)


@pytest.mark.parametrize("example", WITH_ADDRESS)
def test_example_with_an_address_runs_as_written(example: str, folder: Path, network: Namespace) -> None:
    if example.startswith("gradwire coordinator"):
        with coordinator(example, folder, network):
            return
    address, workers = re.search(r"\S+:\d+", example), re.search(r"-n (\d+)", example)
    assert address is not None
    size = workers[1] if workers else "1"
    serve = f"gradwire coordinator --insecure --listen {address[0]} --size {size} --max 8 --job digits"
    secret = {"GRADWIRE_TOKEN": SECRET} if "TOKEN=…" in example else {}
    token = run("gradwire invite --job digits --uses 4", folder, environ=secret).split()[-1] if secret else ""
    with coordinator(serve, folder, network, secret):
        run(example.replace("…", token), folder, network, {"GRADWIRE_INSECURE": "1"})


@pytest.fixture(name="engines", scope="module")
def engines_fixture(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment in which the examples find the engines that they compare with: other examples installed them."""
    cache = tmp_path_factory.mktemp("cache")
    environ = {"XDG_CACHE_HOME": str(cache)}
    for example in INSTALLING:
        run(example, cache, environ=environ, timeout=540)
    return environ


@pytest.mark.parametrize("example", ON_TWO_HOSTS)
def test_example_for_two_hosts_runs_as_written(example: str, folder: Path, network: Namespace) -> None:
    environ = {"GRADWIRE_INSECURE": "1", "GRADWIRE_TOKEN": SECRET}
    other = example.replace("--node-rank 0", "--node-rank 1")
    assert other != example
    with start(other, folder, network, environ) as process:
        try:
            run(example, folder, network, environ)
            output, _ = process.communicate(timeout=LONG)
            assert process.returncode == 0, output
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("example", [one for one in MEASURING if one not in INSTALLING])
def test_measuring_example_runs_as_written(example: str, folder: Path, engines: Mapping[str, str]) -> None:
    run(example, folder, environ=engines, timeout=540)


@pytest.mark.slow
@pytest.mark.parametrize("example", TUNING)
def test_tuning_example_runs_as_written(example: str, folder: Path) -> None:
    run(example, folder, timeout=240)
