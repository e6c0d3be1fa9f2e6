"""`gradwire certs`: makes a certificate authority and certificates for the members of a job."""

from __future__ import annotations

from pathlib import Path

import click

from gradwire.errors import GradwireError

_HELP = """Make certificates, so that a job's links and its coordinator use TLS and know who is who.

\b
  gradwire certs certs --job digits --member host-a --member host-b
  gradwire certs certs --job digits --member host-c          one more, by the same authority

A member is a machine, or any processes that share a certificate: host-a covers the workers host-a/0, host-a/1 … The
first member may also be the job's coordinator, unless --coordinator says who. Certificates that exist are renewed, and
a running job picks them up.

Give each machine ca.pem and its own two files, and name them there: GRADWIRE_TLS_CA, GRADWIRE_TLS_CERT and
GRADWIRE_TLS_KEY. Keep ca.key: whoever has it can make members.
"""


@click.command(help=_HELP, no_args_is_help=True, context_settings={"max_content_width": 120})
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--job", metavar="NAME", required=True, help="The job that they are for; no other takes them.")
@click.option("--member", "members", metavar="NAME", multiple=True, help="Whom to make a certificate for; repeatable.")
@click.option(
    "--coordinator",
    "coordinators",
    metavar="NAME",
    multiple=True,
    help="Who may be the coordinator, a member or not; repeatable.  [default: as before, or the first member]",
)
@click.option(
    "--days",
    metavar="N",
    type=click.FloatRange(min=0, min_open=True, max=3650),
    default=365.0,
    show_default=True,
    help="How long they hold.",
)
def certs(directory: Path, job: str, members: tuple[str, ...], coordinators: tuple[str, ...], days: float) -> None:
    from gradwire.security.certificates import make

    try:
        written = make(directory, job, members, coordinators, days=days)
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
    for path in written:
        click.echo(f"{path} {path.with_suffix('.key')}")
    click.echo(f"# for job {job}; the key {directory / 'ca.key'} stays here")
    name = written[-1].stem
    click.echo(f"# on {name}, for example:")
    click.echo(f"export GRADWIRE_TLS_CA=ca.pem GRADWIRE_TLS_CERT={name}.pem GRADWIRE_TLS_KEY={name}.key")
