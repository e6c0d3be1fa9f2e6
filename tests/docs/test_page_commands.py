"""Every command in a console block of the documentation runs exactly as it is written there."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from gradwire.cli import main
from support.documents import HERE, ROOT, clean_environ, machines_of, run_commands
from support.namespaces import Hosts
from support.namespaces import hosts_fixture as hosts_fixture

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = {"checkpoints.md", "elastic.md", "jax.md", "migrating.md", "pytorch.md", "simulation.md", "torch-backend.md"}
ON_ONE_MACHINE = [
    pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
    for page in PAGES
    if machines_of(page) == {HERE}
    for name in [str(page.relative_to(ROOT)).removeprefix("docs/")]
]
ON_TWO_MACHINES = [page for page in PAGES if machines_of(page) - {HERE}]
# A page about two machines shows how to encrypt and how to do without: one of the two is left out.
WAYS = {"with certificates": ("GRADWIRE_INSECURE",), "without certificates": ("GRADWIRE_TLS", "gradwire certs")}
EXAMPLES = re.findall(r"\| `([^`]*)` \|\n", (ROOT / "examples" / "README.md").read_text("utf-8"))
INLINE = sorted({text for page in PAGES for text in re.findall(r"`(gradwire [^`\n…]*)`", page.read_text("utf-8"))})


@pytest.mark.parametrize("page", ON_ONE_MACHINE)
def test_page_commands_run_as_written(page: Path, tmp_path: Path) -> None:
    run_commands(page, tmp_path, without=("$ make ",))


@pytest.mark.slow
@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_page_command_runs_as_written(command: str, tmp_path: Path) -> None:
    environ = clean_environ(tmp_path)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environ, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


@pytest.mark.slow
def test_readme_make_demo_runs() -> None:
    """`make test`, the README's other target, is what runs this."""
    done = subprocess.run(["make", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page", ON_TWO_MACHINES, ids=lambda page: page.name)
@pytest.mark.parametrize("hosts", ["10.0.0"], indirect=True)
def test_page_commands_for_two_machines_run_as_written(page: Path, way: str, hosts: Hosts, tmp_path: Path) -> None:
    run_commands(page, tmp_path, dict(zip(("host-a", "host-b"), hosts.pids, strict=True)), without=WAYS[way])


@pytest.mark.parametrize("text", INLINE)
def test_command_inside_of_a_sentence_has_valid_options(text: str) -> None:
    """Such a command is not run: it may take long, or be only a part of a command."""
    name, *arguments = shlex.split(text)[1:]
    if name.startswith("-"):
        assert name in {"--help", *(option for one in main.params for option in one.opts)}
        return
    command = main.commands[name]
    if arguments:
        with contextlib.suppress(click.MissingParameter, click.BadOptionUsage):
            command.make_context(name, arguments)
