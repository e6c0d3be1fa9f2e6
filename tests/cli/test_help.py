"""The help texts: nothing is cut off at 80 columns, and every command that they show works as written."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gradwire.cli import main
from support.launch_jobs import LONG, written

COMMANDS = sorted(main.commands)
# Examples that need another host, a certain port, another engine, or more time than a test should take.
ONLY_PARSED = re.compile(r"10\.0\.0\.1|:29500|--against|--install|gradwire bench|gradwire tune(?! --show)")


def help_of(*command: str) -> str:
    result = CliRunner().invoke(main, [*command, "--help"], terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


def examples(command: str) -> list[str]:
    """The indented commands in a help text; an explanation may follow after two spaces or more."""
    lines = [line[4:] for line in help_of(command).splitlines() if re.match(r" {4}(\w+=\S+ )?gradwire \w", line)]
    return [re.split(r" {2,}", line)[0] for line in lines]


EXAMPLES = [example for command in COMMANDS for example in examples(command)]


def test_examples_are_found_in_every_help_text() -> None:
    assert {example.partition("gradwire ")[2].split()[0] for example in EXAMPLES} == set(COMMANDS)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda command: " ".join(command) or "-")
def test_help_fits_into_80_columns_and_is_not_cut_off(command: tuple[str, ...]) -> None:
    text = help_of(*command)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "..." not in text.replace("[ARGS]...", "").replace("[COLLECTIVES]...", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name: str) -> None:
    options = [option for option in main.commands[name].params if isinstance(option, click.Option)]
    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_of_a_help_text_is_accepted(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, arguments = example.partition("gradwire ")
    context = click.Context(main)
    name, command, rest = main.resolve_command(context, shlex.split(arguments))
    assert command is not None
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("example", [example for example in EXAMPLES if not ONLY_PARSED.search(example)])
def test_example_of_a_help_text_runs_as_written(example: str, tmp_path: Path) -> None:
    script = "import sys\nassert sys.argv[1:] in ([], ['--epochs', '10']), sys.argv\n"
    written(tmp_path, script, "train.py")
    (tmp_path / "package").mkdir()
    written(tmp_path / "package", script, "train.py")
    home = {name: str(tmp_path) for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "TMPDIR")}
    process = subprocess.Popen(
        [sys.executable, "-m", *shlex.split(example)],
        cwd=tmp_path,
        env=os.environ | home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        if example.startswith("gradwire coordinator"):
            assert process.stdout is not None
            while "coordinator of job" not in (line := process.stdout.readline()):
                assert line, "the coordinator has ended"
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0, output
