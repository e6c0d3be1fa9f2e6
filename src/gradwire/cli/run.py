"""`gradwire run`: start n workers on this machine and see them through."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from gradwire.errors import GradwireError
from gradwire.launch.ladder import GRACE, KILL_AFTER

if TYPE_CHECKING:
    from gradwire.launch.supervisor import Outcome, Supervisor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HELP = f"""Run a script in N processes that train together.

\b
  gradwire run -n 4 train.py --epochs 10
  gradwire run -n 4 -m package.train --epochs 10

Each process finds the others by gw.init(), and also has torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR …).
Everything after the script is the script's, options too. The processes read no input: their stdin is empty.

What they print appears with the rank in front and, untouched, in a log per rank. When one fails, the others get
{GRACE:g} seconds to notice and end, then SIGTERM, then SIGKILL; the traceback of the first failure is printed last, and
its exit code returned (128 + n for signal n). Ctrl-C stops all processes, a second one kills them.
"""


@click.command(
    help=_HELP,
    no_args_is_help=True,
    context_settings={"allow_interspersed_args": False, "max_content_width": 120},
)
@click.option("-n", "size", metavar="N", type=click.IntRange(min=1), required=True, help="How many processes.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the logs go (rank-0.log …); by default a temporary directory, kept and named if the job fails.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=GRACE,
    show_default=True,
    help="How long the others may take to end by themselves after one has failed, before SIGTERM.",
)
@click.option(
    "--kill-after",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=KILL_AFTER,
    show_default=True,
    help="How long a process that was told to stop may take, before SIGKILL.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    size: int,
    is_module: bool,
    log_dir: Path | None,
    grace: float,
    kill_after: float,
    script: str,
    args: tuple[str, ...],
) -> None:
    from gradwire.launch import rendezvous
    from gradwire.launch.output import Output
    from gradwire.launch.stage import StaticStage
    from gradwire.launch.supervisor import Supervisor
    from gradwire.launch.worker import Task

    if not is_module:
        _check_script(script)
    task = Task.module(script, *args) if is_module else Task.script(script, *args)
    try:
        keep = log_dir is not None
        if log_dir is None:
            log_dir = Path(tempfile.mkdtemp(prefix=time.strftime("gradwire-%Y%m%d-%H%M%S-")))
        output = Output(log_dir=log_dir)
        stage = StaticStage(size, rendezvous.on_this_machine(size))
        supervisor = Supervisor(task, size, stage, output=output, grace=grace, kill_after=kill_after)
        with _signals_stop(supervisor), supervisor:
            supervisor.wait()
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
    assert supervisor.outcome is not None
    _tell(supervisor.outcome, log_dir)
    if not keep and supervisor.outcome.exit_code == 0:
        shutil.rmtree(log_dir, ignore_errors=True)
    sys.exit(supervisor.outcome.exit_code)


def _check_script(script: str) -> None:
    if os.path.isdir(script):
        raise click.UsageError(f"{script!r} is a directory, not a script")
    if not os.path.exists(script):
        hint = f" (for a module: -m {script})" if not script.endswith(".py") else ""
        raise click.UsageError(f"there is no script {script!r}{hint}")


@contextlib.contextmanager
def _signals_stop(supervisor: Supervisor) -> Iterator[None]:
    """Signals to this process stop the job; one more kills it. Those that are ignored (nohup) stay ignored."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        supervisor.stop(signal.SIGKILL if received else number)
        received.append(number)

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some parents leave it ignored, and no exit could be seen
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])


def _tell(outcome: Outcome, log_dir: Path) -> None:
    """After a failure: what happened to the others, where the logs are, and last the root cause."""
    from rich.console import Console

    from gradwire.launch import rootcause

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
    root = outcome.root
    if root is None:
        if outcome.stopped_by is not None:
            console.print(f"gradwire: stopped by {signal.Signals(outcome.stopped_by).name}; logs in {log_dir}")
        return
    console.print()
    for line in rootcause.consequences(outcome.endings, root):
        console.print(f"gradwire: {line}", style="dim")
    console.print(f"gradwire: logs in {log_dir}", style="dim")
    console.print("gradwire: the root cause:", style="bold red")
    console.print(rootcause.explain(root, outcome.last_lines))
