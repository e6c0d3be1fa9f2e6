"""The options, the signal handling and the final report that `gradwire run` and `gradwire join` share."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gradwire.errors import ConfigError, GradwireError
from gradwire.job.stop_notices import STOP_SIGNALS
from gradwire.launch.fault_injection import NEEDS_ELASTIC, Chaos, parse
from gradwire.launch.stop_escalation import GRACE, KILL_AFTER, STOP_TIMEOUT

if TYPE_CHECKING:
    from rich.console import Console

    from gradwire.launch.output import Output
    from gradwire.launch.root_cause import Ending
    from gradwire.launch.supervisor import Outcome, Supervisor
    from gradwire.launch.worker_process import Task

CONTEXT = {"allow_interspersed_args": False, "max_content_width": 120}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_SHARED: tuple[_Decorator, ...] = (
    click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as with python -m."),
    click.option(
        "--log-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for the logs. Logs of an earlier run there are moved to its subfolder earlier-1, earlier-2 …  "
        "[default: a temporary folder, kept if the job fails]",
    ),
    click.option(
        "--grace",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        default=GRACE,
        show_default=True,
        help="After a failure, wait this long for the other processes to end before sending SIGTERM.",
    ),
    click.option(
        "--kill-after",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        default=KILL_AFTER,
        show_default=True,
        help="Wait this long after the first signal before sending SIGKILL.",
    ),
    click.option(
        "--stop-timeout",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        default=STOP_TIMEOUT,
        show_default=True,
        help="The same for scripts that train with gw.elastic: after SIGTERM or SIGUSR2, they finish the current step "
        "and write a checkpoint.",
    ),
    click.option(
        "--chaos",
        metavar="FAULTS",
        help="Inject faults, for example 'kill 2 @5s; freeze random every 10s for 2s': see docs/elastic.md.",
    ),
    click.argument("script"),
    click.argument("args", nargs=-1, type=click.UNPROCESSED),
)


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options and arguments of `run` and `join`."""
    for decorate in reversed(_SHARED):
        command = decorate(command)
    return command


def task_of(script: str, args: tuple[str, ...], *, is_module: bool) -> Task:
    """Return what the workers run; raise a usage error if the script does not exist."""
    from gradwire.launch.worker_process import Task

    if is_module:
        return Task.module(script, *args)
    if os.path.isdir(script):
        raise click.UsageError(f"{script!r} is a directory, not a script")
    if not os.path.exists(script):
        hint = f" (for a module: -m {script})" if not script.endswith(".py") else ""
        raise click.UsageError(f"there is no script {script!r}{hint}")
    return Task.script(script, *args)


def chaos_of(text: str | None, *, elastic: bool) -> Chaos | None:
    """Parse the text of --chaos; raise a usage error for faults that a job of this kind cannot have."""
    if text is None:
        return None
    try:
        chaos = Chaos(parse(text), seed=int.from_bytes(os.urandom(2), "little"))
    except ConfigError as error:
        raise click.BadParameter(str(error).removeprefix("chaos: "), param_hint="'--chaos'") from None
    unfit = sorted({fault.action for fault in chaos.faults} & NEEDS_ELASTIC)
    if unfit and not elastic:
        raise click.UsageError(f"--chaos {unfit[0]!r} needs an elastic job: add --min and --max")
    return chaos


def report(line: str) -> None:
    """Print a line of the launcher before its workers start."""
    click.echo(f"gradwire: {line}", err=True)


def standard_input() -> int | None:
    """Return the descriptor that worker 0 reads as its standard input, or None.

    A worker is in a session of its own, so the terminal never stops it for reading (SIGTTIN). It could therefore take
    the input of the shell in the foreground: a launcher that was started in the background passes no terminal on.
    """
    try:
        fd = sys.stdin.fileno()
        in_background = os.isatty(fd) and os.tcgetpgrp(fd) != os.getpgrp()
    except (AttributeError, OSError, ValueError):  # closed, replaced, or the terminal of another session
        return None
    return None if in_background else fd


def refuse_to_suspend() -> None:
    """Let Ctrl-Z print a line instead of suspending this launcher: launchers on other hosts would take it for lost."""

    def refuse(number: int, frame: FrameType | None) -> None:
        report("Ctrl-Z does not suspend this command: the other hosts would take it for lost. Ctrl-C stops the job")

    if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, refuse)


def run_to_end(make: Callable[[Output], Supervisor], log_dir: Path | None) -> NoReturn:
    """Run the job that `make` prepares until it ends, report how it ended, and exit with its exit code."""
    from gradwire.launch.log_folder import log_folder, new_temporary_folder
    from gradwire.launch.output import Output

    keep, supervisor = log_dir is not None, None
    try:
        wanted = log_dir or new_temporary_folder()
        with log_folder(wanted) as folder:
            output = Output(log_dir=folder)
            if folder != wanted:
                output.print_line(f"gradwire: another launcher uses {wanted}; the logs of this one are in {folder}")
            supervisor = make(output)
            with _warnings_to(output), _signals_stop(supervisor), supervisor:
                supervisor.wait()
    except GradwireError as error:
        if supervisor is not None:
            report(f"logs in {folder}")
        raise click.ClickException(str(error)) from error
    finally:
        if supervisor is None and not keep:  # no worker was started: the folder is empty
            shutil.rmtree(wanted, ignore_errors=True)
    assert supervisor.outcome is not None
    _report_end(supervisor.outcome, folder)
    if not keep and supervisor.outcome.exit_code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(supervisor.outcome.exit_code)


class _OutputHandler(logging.Handler):
    """Shows log messages of this process among the lines of the workers."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.print_line(f"gradwire: {record.getMessage()}")


@contextlib.contextmanager
def _warnings_to(output: Output) -> Iterator[None]:
    """Show what this process logs, for example that the coordinator does not answer, among the workers' lines."""
    logger, handler = logging.getLogger("gradwire"), _OutputHandler(output)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


@contextlib.contextmanager
def _signals_stop(supervisor: Supervisor) -> Iterator[None]:
    """Let a signal to this process stop the job, and a second one kill it. Ignored signals (nohup) stay ignored.

    SIGTERM after SIGUSR2 does not kill: schedulers send both.
    """
    received: set[int] = set()

    def stop(number: int, frame: FrameType | None) -> None:
        again = number in received or not received.union([number]) <= {*STOP_SIGNALS}
        supervisor.stop(signal.SIGKILL if received and again else number)
        received.add(number)

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent left it ignored, no exit of a worker could be seen
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])


def _report_end(outcome: Outcome, log_dir: Path) -> None:
    """Print which workers were lost; after a failure also where the logs are, and the root cause last."""
    from rich.console import Console

    from gradwire.launch import root_cause

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
    root = outcome.root
    if root is None:
        if outcome.stopped_by is not None:
            name = signal.Signals(outcome.stopped_by).name
            console.print(f"gradwire: stopped by {name}{outcome.stop_origin}; logs in {log_dir}")
        else:
            _report_losses(console, outcome.endings)
        return
    console.print()
    for line in root_cause.consequences(outcome.endings, root):
        console.print(f"gradwire: {line}", style="dim")
    console.print(f"gradwire: logs in {log_dir}", style="dim")
    console.print("gradwire: the root cause:", style="bold red")
    console.print(root_cause.explain(root, outcome.last_lines))


def _report_losses(console: Console, endings: tuple[Ending, ...]) -> None:
    from gradwire.launch.root_cause import consequences

    lost = consequences(endings, root=None)
    if lost:
        well = sum(not ending.failed for ending in endings)
        console.print(f"gradwire: the job ended well, with {well} of {len(endings)} workers; {'; '.join(lost)}")
