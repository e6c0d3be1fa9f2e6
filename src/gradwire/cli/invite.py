"""`gradwire invite`: creates a join token, which admits processes to a job without giving them its secret."""

from __future__ import annotations

import os
import re

import click

from gradwire.errors import GradwireError

_HELP = """Print a token with which a process may join a running job, until it expires.

\b
  gradwire invite --job digits                     one process in one hour
  gradwire invite --job digits --for 2d --uses 8   eight in two days

The joining process sets GRADWIRE_TOKEN to the token. The token is derived from the job's secret, which is
GRADWIRE_TOKEN here, or this user's secret file if the variable is not set. A process that has joined stays a member
after the token has expired.
"""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(context: click.Context, option: click.Parameter, value: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a time like 90s, 30m, 2h or 1d")
    return float(found[1]) * _SECONDS[found[2]]


@click.command(
    help=_HELP,
    short_help="Print a token with which processes may join a job.",
    context_settings={"max_content_width": 120},
)
@click.option("--job", metavar="NAME", envvar="GRADWIRE_JOB", required=True, help="The job's name.")
@click.option(
    "--for",
    "expires_in",
    metavar="TIME",
    default="1h",
    show_default=True,
    callback=_seconds,
    help="Time until the token expires: 90s, 30m, 2h, 1d.",
)
@click.option(
    "--uses",
    metavar="N",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Processes that may join with it; 0 is any number.",
)
def invite(job: str, expires_in: float, uses: int) -> None:
    from gradwire.security.secret import TOKEN, job_secret
    from gradwire.security.tokens import is_token, make

    if is_token(os.environ.get(TOKEN, "")):
        raise click.ClickException(f"{TOKEN} is a join token: only holders of the job's secret can invite")
    try:
        click.echo(make(job_secret(os.environ, loopback=True), job=job, expires_in=expires_in, uses=uses))
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
