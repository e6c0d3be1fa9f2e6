"""The `gradwire invite` command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradwire.cli import main
from gradwire.security.tokens import Ticket, key_of, read
from support.coordinator_command import Process
from support.coordinator_command import coordinate_fixture as coordinate_fixture

SECRET = "a secret of the whole job"


def invite(*arguments: str, token: str = SECRET) -> Result:
    return CliRunner().invoke(main, ["invite", *arguments], env={"GRADWIRE_TOKEN": token, "GRADWIRE_JOB": None})


def test_invite_with_the_secret_prints_a_token_and_with_a_token_is_refused() -> None:
    done = invite("--job", "digits", "--for", "2d", "--uses", "8")
    assert done.exit_code == 0, done.output
    assert SECRET not in done.output
    token = read(done.output)
    said = Ticket.parse(token.ticket)
    assert (said.job, said.uses) == ("digits", 8)
    assert abs(said.expires - time.time() - 2 * 86400) < 60
    assert token.key == key_of(SECRET.encode(), token.ticket)
    again = invite("--job", "digits", token=done.output.strip())
    assert again.exit_code == 1
    assert "only holders of the job's secret can invite" in again.output


def test_invite_standard_output_is_only_the_token() -> None:
    done = invite("--job", "digits")
    assert re.fullmatch(r"gwj1\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\n", done.stdout)


def test_invite_invalid_options_are_refused() -> None:
    for wrong in (["--for", "soon"], ["--for", "2"], ["--for", "0s"], ["--uses", "-1"]):
        done = invite("--job", "digits", *wrong)
        assert done.exit_code != 0, wrong
        assert "Error" in done.output
    assert "Missing option '--job'" in invite().output


@pytest.mark.slow
@pytest.mark.parametrize("owner_has_token", [True, False])
def test_invited_user_without_secret_and_certificates_joins_twice(
    coordinate: Callable[..., Process], tmp_path: Path, owner_has_token: bool
) -> None:
    """The owner has the secret in a variable, or in the file in the home folder. The guest has another home."""
    owner, guest = tmp_path / "owner", tmp_path / "guest"
    owner.mkdir()
    guest.mkdir()
    (guest / "train.py").write_text(
        "import gradwire as gw\nrun = gw.elastic({})\n"
        "for step in run.steps(3):\n    with step: run.group.barrier()\nprint('size', run.group.size)\nrun.close()\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("GRADWIRE_TOKEN", "XDG_RUNTIME_DIR")}
    clean["PYTHONPATH"] = os.pathsep.join(sys.path)
    mine = {"HOME": str(owner), "XDG_STATE_HOME": str(owner), "XDG_RUNTIME_DIR": ""}

    def gradwire(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gradwire", *arguments]
        return subprocess.run(command, env=clean | environ, capture_output=True, text=True, cwd=guest, timeout=120)

    secret = {"GRADWIRE_TOKEN": SECRET} if owner_has_token else {}
    for _ in range(2):
        coordinator = coordinate("--size", "1", "--max", "2", "--job", "digits", environ=mine | secret, clean=True)
        token = gradwire("invite", "--job", "digits", "--uses", "1", **mine, **secret).stdout.strip()
        joined = gradwire("join", coordinator.address, "train.py", HOME=str(guest), GRADWIRE_TOKEN=token)
        assert (joined.returncode, joined.stdout) == (0, "[0] size 1\n"), joined.stderr
        again = gradwire("join", coordinator.address, "train.py", HOME=str(guest), GRADWIRE_TOKEN=token)
        assert again.returncode != 0
        assert "its join token has no uses left (1 of 1 used)" in again.stderr
        assert coordinator.end(signal.SIGTERM) == 0
        assert sorted(path.name for path in guest.iterdir()) == ["train.py"], "no secret was made for the guest"
