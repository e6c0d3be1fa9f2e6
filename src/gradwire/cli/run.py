"""`gradwire run`: starts the workers of a job on this machine and waits for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.cli.launching import CONTEXT, chaos_of, run_to_end, shared_options, task_of
from gradwire.cli.show_config import configured_size, describe
from gradwire.job.config_file import FILE
from gradwire.launch.stop_escalation import GRACE

if TYPE_CHECKING:
    from gradwire.launch.output import Output
    from gradwire.launch.supervisor import Supervisor

_HELP = f"""Run a script in N processes that train together.

\b
  gradwire run -n 4 train.py --epochs 10
  gradwire run -n 4 -m package.train --epochs 10
  gradwire run --min 2 --max 8 -n 4 --restarts 3 train.py

The processes find each other by gw.init(). They also have torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR …).
Everything after SCRIPT belongs to the script, options too. The standard input of the processes is empty.

Each printed line appears with its rank in front, and unchanged in a log file per rank. If a rank fails, the other ranks
have {GRACE:g} seconds to end, then receive SIGTERM, then SIGKILL. The last thing printed is the root cause, with its
traceback; its exit code is returned (128 + n for signal n). Frames inside gradwire are hidden unless
GRADWIRE_TRACEBACK=full is set; the log files have all frames. Ctrl-C stops all processes; a second Ctrl-C kills them.

With --min, --max or --restarts the job is elastic. Scripts that train with gw.elastic continue after the loss of a
worker as long as --min workers are left. Lost workers are replaced up to --restarts times, and other workers can join
with `gradwire join`. Workers are numbered in the order of their start, because ranks change. They have none of
torchrun's variables. The exit code is 0 if the job finished, even if workers were lost.
"""


@click.command(
    help=_HELP,
    short_help="Run a script in N processes that train together.",
    no_args_is_help=True,
    context_settings=CONTEXT,
)
@click.option(
    "-n",
    "size",
    metavar="N",
    type=click.IntRange(min=1),
    help="Number of processes.  [default: --min, or size in the file of GRADWIRE_CONFIG]",
)
@click.option(
    "--min",
    "minimum",
    metavar="A",
    type=click.IntRange(min=1),
    help="Continue while at least A workers are left; with fewer, wait for others.  [default: 1, if elastic]",
)
@click.option(
    "--max", "maximum", metavar="B", type=click.IntRange(min=1), help="Let workers join up to B in all.  [default: N]"
)
@click.option(
    "--restarts", metavar="R", type=click.IntRange(min=0), help="Replace up to R lost workers in all.  [default: 0]"
)
@click.option(
    "--listen",
    metavar="HOST[:PORT]",
    help="Address at which an elastic job can be joined.  [default: a free port of 127.0.0.1]",
)
@click.option(
    "--show-config", is_flag=True, help="Print the settings that the workers would get, with their origins, and exit."
)
@shared_options
def run(
    size: int | None,
    minimum: int | None,
    maximum: int | None,
    restarts: int | None,
    listen: str | None,
    show_config: bool,
    is_module: bool,
    log_dir: Path | None,
    grace: float,
    kill_after: float,
    chaos: str | None,
    script: str,
    args: tuple[str, ...],
) -> None:
    elastic = not (minimum is None and maximum is None and restarts is None)
    if listen is not None and not elastic:
        raise click.UsageError("--listen is for elastic jobs: add --min and --max")
    size_in_file = configured_size()
    count = size or minimum or size_in_file
    if count is None:
        raise click.UsageError("Missing option '-n'.")
    least, most = minimum or 1, maximum or count
    if not least <= count <= most:
        raise click.UsageError(f"-n {count} is not between --min {least} and --max {most}")
    task = task_of(script, args, is_module=is_module)
    faults = chaos_of(chaos, elastic=elastic)
    if show_config:
        size_from = "-n" if size else "--min" if minimum else f"file {os.environ[FILE]}"
        click.echo(describe(count, elastic=elastic, listen=listen, size_from=size_from))
        return

    def make(output: Output) -> Supervisor:
        from gradwire.launch import elastic_rendezvous, rendezvous
        from gradwire.launch.log_folder import JOURNAL
        from gradwire.launch.restart_policy import Restarts
        from gradwire.launch.supervisor import Supervisor
        from gradwire.launch.worker_setup import StaticSetup, WorkerSetup

        if elastic:
            assert output.log_dir is not None
            setup: WorkerSetup = elastic_rendezvous.hosted(count, least, most, listen, output.log_dir / JOURNAL, script)
            policy = Restarts(minimum=least, restarts=restarts or 0)
        else:
            setup = StaticSetup(count, rendezvous.on_this_machine(count))
            policy = None
        return Supervisor(
            task, count, setup, restarts=policy, chaos=faults, output=output, grace=grace, kill_after=kill_after
        )

    run_to_end(make, log_dir)
