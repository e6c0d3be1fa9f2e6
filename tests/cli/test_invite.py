"""The `gradwire invite` command."""

from __future__ import annotations

import re
import time

from click.testing import CliRunner, Result

from gradwire.cli import main
from gradwire.security.tokens import Ticket, key_of, read

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
