"""`gradwire coordinator`: runs the coordinator of a job in its own process."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import click

from gradwire.errors import GradwireError, JournalError

if TYPE_CHECKING:
    from gradwire.membership.coordinator.service import Coordinator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HELP = """Run the coordinator of one job, which workers on any machine can reach.

\b
  gradwire coordinator --listen 127.0.0.1:29500 --size 4
  gradwire coordinator --job digits --size 4 --min 2 --max 8

The coordinator prints one line with the job's name, its address and its journal. It logs to stderr which members join
and leave. With --min or --max the job is elastic: it continues after losses, and workers may join later.

The journal stores the membership in a file: a coordinator that is started again with the same --job continues where
the last one was. It is in $XDG_STATE_HOME/gradwire (~/.local/state/gradwire), one file per job. When the job has
ended, the file is moved aside, and the next job of this name is a new run.

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
@click.option("--journal", metavar="FILE", type=_file, help="Use this file as the journal. It is not moved aside.")
@click.option("--no-journal", is_flag=True, help="Forget the membership when the coordinator ends.")
@click.option("--new", "anew", is_flag=True, help="Move the journal of an earlier run aside, and begin a new run.")
@click.option(
    "--no-fsync", is_flag=True, help="Do not flush the journal to disk: it may not survive a crash of the machine."
)
@click.option(
    "--lease",
    metavar="SECONDS",
    type=click.FloatRange(min=0.5, max=86_400),
    default=10.0,
    show_default=True,
    help="Remove a member that sends no heartbeat for this time, and tell the others.",
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
    no_journal: bool,
    anew: bool,
    no_fsync: bool,
    lease: float,
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

    if no_journal and (journal is not None or anew):
        raise click.UsageError(f"--no-journal and {'--new' if anew else '--journal'} exclude each other")
    logging.basicConfig(
        format="%(asctime)s %(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr
    )
    # Reasons to end. A SimpleQueue, because a signal handler puts into it.
    reasons: queue.SimpleQueue[int | JournalError] = queue.SimpleQueue()
    try:
        host, port = split(listen)
        credentials = Credentials.from_paths(tls_ca, tls_cert, tls_key)
        named = job or (credentials.job if credentials is not None else None)
        chosen = _journal(journal, named, anew=anew) if not no_journal else _NO_JOURNAL
        served = Coordinator(
            host,
            port,
            size=size,
            minimum=minimum,
            maximum=maximum,
            secret=whole_secret(os.environ, resolve(host, port)[0].loopback),
            job=job or chosen.job,
            insecure=insecure,
            journal=chosen.path,
            durable=not no_fsync,
            retire=chosen.retire,
            credentials=credentials,
            lease=lease,
            lasting=True,
            failed=reasons.put,
        )
        with _signals_to(reasons.put), served:
            click.echo(f"coordinator of job {served.job} at {served.address} ({_state(chosen, served)})")
            if chosen.job is not None:
                sizes = {"--size": size, "--min": minimum, "--max": maximum}
                options = "".join(f" {option} {value}" for option, value in sizes.items() if value is not None)
                click.echo(f"to resume it: gradwire coordinator --job {served.job} --listen {served.address}{options}")
            reason = reasons.get()
            if isinstance(reason, JournalError):
                raise reason
    except GradwireError as error:
        raise click.ClickException(str(error)) from error


class _ChosenJournal(NamedTuple):
    """The journal's path, what to do with it when its job has ended, and the job's name if that is random."""

    path: Path | None
    retire: Callable[[Path], None] = lambda path: None
    job: str | None = None


_NO_JOURNAL = _ChosenJournal(None)


def _journal(file: Path | None, named: str | None, *, anew: bool) -> _ChosenJournal:
    """Return the journal: the given file, or the default one of the job `named`, or of a job with a random name."""
    from gradwire.membership.coordinator import journal_files

    if file is not None:
        chosen = _ChosenJournal(file)
    elif named is not None:
        chosen = _ChosenJournal(journal_files.path_of(named, os.environ), journal_files.retire_ended)
    else:
        journal_files.prune_unnamed(os.environ)
        job = secrets.token_hex(8)
        path = journal_files.path_of(job, os.environ, named=False)
        chosen = _ChosenJournal(path, journal_files.retire_ended, job)
    if anew and chosen.path is not None:
        journal_files.begin_anew(chosen.path)
    return chosen


def _state(chosen: _ChosenJournal, served: Coordinator) -> str:
    """Return, for the first line, where the journal is and whether the coordinator resumes an earlier run."""
    if chosen.path is None:
        return "no journal"
    return f"journal {chosen.path}, {f'resumes {served.resumed}' if served.resumed else 'new'}"


@contextlib.contextmanager
def _signals_to(put: Callable[[int], None]) -> Iterator[None]:
    """Pass signals that would end this process to `put`. Ignored signals (as under nohup) stay ignored.

    A scheduler may send SIGUSR2 to all processes of a job. The workers then leave together, with this coordinator.
    """

    def received(number: int, frame: FrameType | None) -> None:
        put(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, received)
    before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
