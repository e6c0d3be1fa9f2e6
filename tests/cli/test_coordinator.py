"""The `gradwire coordinator` command: its journal, its first line and its lease."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradwire as gw
from gradwire.cli import main
from support.coordinator_command import TOKEN, Process
from support.coordinator_command import coordinate_fixture as coordinate_fixture

Coordinate = Callable[..., Process]
SECRET = TOKEN.encode()


@pytest.fixture(name="state")
def state_fixture(tmp_path: Path) -> Mapping[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path)}


def node(coordinator: Process) -> gw.WorkerNode:
    return gw.WorkerNode(coordinator.address, secret=SECRET, timeout=30.0)


def test_coordinator_that_was_killed_resumes_by_its_name(
    coordinate: Coordinate, state: Mapping[str, str], tmp_path: Path
) -> None:
    journal = tmp_path / "gradwire" / "digits.journal"
    first = coordinate("--size", "1", "--job", "digits", environ=state)
    assert first.line == f"coordinator of job digits at {first.address} (journal {journal}, new)"
    with node(first) as member:
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
        second = coordinate("--size", "1", "--job", "digits", "--listen", first.address, environ=state)
        assert second.line.startswith(f"coordinator of job digits at {first.address} (journal {journal}, resumes run ")
        assert second.line.endswith(" at generation 1 with 1 member)")
        while not member.healthy(30):
            pass
    assert second.end(signal.SIGTERM) == 0
    third = coordinate("--size", "2", "--job", "digits", environ=state)
    assert third.line.endswith("digits.journal, new)"), "the job had ended"
    assert journal.with_name("digits.earlier-1").exists()


def test_coordinator_of_a_job_that_has_one_is_refused(coordinate: Coordinate, state: Mapping[str, str]) -> None:
    coordinate("--size", "1", "--job", "digits", environ=state)
    second = coordinate("--size", "1", "--job", "digits", environ=state)
    assert second.process.wait(30) == 1
    assert "digits.journal: another coordinator uses it: stop that one first" in second.said()


def test_coordinator_of_an_unnamed_job_prints_how_to_resume_it(
    coordinate: Coordinate, state: Mapping[str, str]
) -> None:
    first = coordinate("--size", "1", "--max", "3", environ=state)
    assert first.process.stdout is not None
    command = first.process.stdout.readline().strip()
    options = f"--job {first.job} --listen {first.address} --size 1 --max 3"
    assert command == f"to resume it: gradwire coordinator {options}"
    with node(first) as member:
        first.end(signal.SIGKILL)
        again = coordinate(*options.split(), environ=state)
        assert again.line.endswith(" at generation 1 with 1 member)")
        while not member.healthy(30):
            pass


def test_coordinator_new_and_no_journal_do_not_resume(
    coordinate: Coordinate, state: Mapping[str, str], tmp_path: Path
) -> None:
    first = coordinate("--size", "1", "--job", "digits", environ=state)
    member = node(first).start()
    first.end(signal.SIGKILL)
    member.close()
    without = coordinate("--size", "1", "--job", "digits", "--no-journal", environ=state)
    assert without.line.endswith("(no journal)")
    anew = coordinate("--size", "3", "--job", "digits", "--new", environ=state)
    assert anew.line.endswith("digits.journal, new)")
    assert {"digits.earlier-1", "digits.journal"} <= set(os.listdir(tmp_path / "gradwire"))


def test_coordinator_lease_is_settable_and_known_to_members(coordinate: Coordinate, state: Mapping[str, str]) -> None:
    with node(coordinate("--size", "1", "--lease", "2.5", environ=state)) as member:
        while member.news is None:
            pass
        assert member.news.lease == 2.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lease", "0.1"], "0.1 is not in the range 0.5<=x<=86400"),
        (["--lease", "nan"], "a lease has 0.5 to 86400 seconds, not nan"),
        (["--no-journal", "--journal", "file"], "--no-journal and --journal exclude each other"),
        (["--no-journal", "--new"], "--no-journal and --new exclude each other"),
    ],
)
def test_coordinator_invalid_options_are_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["coordinator", "--size", "1", *options], env={"GRADWIRE_TOKEN": TOKEN})
    assert done.exit_code != 0
    assert message in done.output
