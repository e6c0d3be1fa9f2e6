"""`gradwire coordinator`: runs the coordinator of a job in its own process."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import click

from gradwire.errors import GradwireError, JournalError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HELP = """Run the coordinator of one job, which workers on any machine can reach.

\b
  gradwire coordinator --listen 127.0.0.1:29500 --size 4
  gradwire coordinator --size 4 --min 2 --max 8 --journal job.journal

The coordinator prints one line with the job's name and the address. It logs to stderr which members join and leave.
With --min or --max the job is elastic: it continues after losses, and workers may join later. With --journal the
membership survives the coordinator: restarted with the same file, the coordinator continues where it was.

The job's secret is GRADWIRE_TOKEN, or on loopback this user's own secret file. An address that other machines reach
needs certificates, or --insecure. Ctrl-C and SIGTERM end the coordinator.
"""

_file = click.Path(dir_okay=False, path_type=Path)


@click.command(
    help=_HELP,
    short_help="Run the coordinator of a job on this machine.",
    no_args_is_help=True,
    context_settings={"max_content_width": 120},
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:0",
    show_default=True,
    help="Address to serve; port 0 takes a free port.",
)
@click.option("--size", metavar="N", type=click.IntRange(min=1), required=True, help="Members of the first generation.")
@click.option(
    "--min", "minimum", metavar="N", type=click.IntRange(min=1), help="Fewest members with which the job continues."
)
@click.option("--max", "maximum", metavar="N", type=click.IntRange(min=1), help="Most members that the job accepts.")
@click.option("--job", metavar="NAME", envvar="GRADWIRE_JOB", help="The job's name.  [default: a random one]")
@click.option("--journal", metavar="FILE", type=_file, help="File that stores the membership.")
@click.option(
    "--no-fsync", is_flag=True, help="Do not flush the journal to disk: it may not survive a crash of the machine."
)
@click.option("--tls-ca", metavar="FILE", envvar="GRADWIRE_TLS_CA", type=_file, help="The authority's certificate.")
@click.option(
    "--tls-cert", metavar="FILE", envvar="GRADWIRE_TLS_CERT", type=_file, help="The coordinator's certificate."
)
@click.option("--tls-key", metavar="FILE", envvar="GRADWIRE_TLS_KEY", type=_file, help="The key of --tls-cert.")
@click.option("--insecure", is_flag=True, envvar="GRADWIRE_INSECURE", help="Let other machines connect without TLS.")
@click.option("--quiet", is_flag=True, help="Log warnings and errors only.")
def coordinator(
    listen: str,
    size: int,
    minimum: int | None,
    maximum: int | None,
    job: str | None,
    journal: Path | None,
    no_fsync: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure: bool,
    quiet: bool,
) -> None:
    from gradwire.membership.coordinator.service import Coordinator
    from gradwire.membership.endpoints import resolve, split
    from gradwire.security.credentials import Credentials
    from gradwire.security.tokens import whole_secret

    logging.basicConfig(
        format="%(asctime)s %(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr
    )
    # Reasons to end. A SimpleQueue, because a signal handler puts into it.
    reasons: queue.SimpleQueue[int | JournalError] = queue.SimpleQueue()
    try:
        host, port = split(listen)
        served = Coordinator(
            host,
            port,
            size=size,
            minimum=minimum,
            maximum=maximum,
            secret=whole_secret(os.environ, resolve(host, port)[0].loopback),
            job=job,
            insecure=insecure,
            journal=journal,
            durable=not no_fsync,
            credentials=Credentials.from_paths(tls_ca, tls_cert, tls_key),
            failed=reasons.put,
        )
        with _signals_to(reasons.put), served:
            click.echo(f"coordinator of job {served.job} at {served.address}")
            reason = reasons.get()
            if isinstance(reason, JournalError):
                raise reason
    except GradwireError as error:
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _signals_to(put: Callable[[int], None]) -> Iterator[None]:
    """Pass signals that would end this process to `put`. Ignored signals (as under nohup) stay ignored."""

    def received(number: int, frame: FrameType | None) -> None:
        put(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, received)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
