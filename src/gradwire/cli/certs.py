"""`gradwire certs`: creates a certificate authority and certificates for the members of a job."""

from __future__ import annotations

from pathlib import Path

import click

from gradwire.errors import GradwireError

_HELP = """Create the certificates with which the links of a job and its coordinator use TLS.

\b
  gradwire certs certs --job digits --member host-a --member host-b
  gradwire certs certs --job digits --member host-c   add a member later

A member is a machine, or any processes that share a certificate: host-a covers the workers host-a/0, host-a/1 … The
first member may also run the job's coordinator, unless --coordinator names another. Existing certificates are renewed,
and a running job reads them again.

Copy ca.pem and the member's own two files to each machine, and set GRADWIRE_TLS_CA, GRADWIRE_TLS_CERT and
GRADWIRE_TLS_KEY to their paths there. Keep ca.key secret: its holder can create members.
"""


@click.command(
    help=_HELP,
    short_help="Create the TLS certificates of a job.",
    no_args_is_help=True,
    context_settings={"max_content_width": 120},
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--job", metavar="NAME", required=True, help="The only job that accepts these certificates.")
@click.option("--member", "members", metavar="NAME", multiple=True, help="A member to certify. May be repeated.")
@click.option(
    "--coordinator",
    "coordinators",
    metavar="NAME",
    multiple=True,
    help="A name that may run the coordinator, a member or not. May be repeated.  "
    "[default: as before, or the first member]",
)
@click.option(
    "--days",
    metavar="N",
    type=click.FloatRange(min=0, min_open=True, max=3650),
    default=365.0,
    show_default=True,
    help="Days until the certificates expire.",
)
def certs(directory: Path, job: str, members: tuple[str, ...], coordinators: tuple[str, ...], days: float) -> None:
    from gradwire.security.certificates import make

    try:
        written = make(directory, job, members, coordinators, days=days)
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
    for path in written:
        click.echo(f"{path} {path.with_suffix('.key')}")
    click.echo(f"# for job {job}; keep {directory / 'ca.key'} on this machine")
    name = written[-1].stem
    click.echo(f"# on {name}, for example:")
    click.echo(f"export GRADWIRE_TLS_CA=ca.pem GRADWIRE_TLS_CERT={name}.pem GRADWIRE_TLS_KEY={name}.key")
