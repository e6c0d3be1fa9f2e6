"""`gradwire run`: starts the workers of a job on this machine and waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.cli.launching import CONTEXT, chaos_of, see_through, shared_options, task_of
from gradwire.launch.stop_escalation import GRACE

if TYPE_CHECKING:
    from gradwire.launch.output import Output
    from gradwire.launch.supervisor import Supervisor

_HELP = f"""Run a script in N processes that train together.

\b
  gradwire run -n 4 train.py --epochs 10
  gradwire run -n 4 -m package.train --epochs 10
  gradwire run --min 2 --max 8 -n 4 --restarts 3 train.py

Each process finds the others by gw.init(), and also has torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR …).
Everything after the script is the script's, options too. The processes read no input: their stdin is empty.

What they print appears with the rank in front and, untouched, in a log per rank. When one fails, the others get
{GRACE:g} seconds to notice and end, then SIGTERM, then SIGKILL; the traceback of the first failure is printed last, and
its exit code returned (128 + n for signal n). Ctrl-C stops all processes, a second one kills them.

With --min, --max or --restarts the job is elastic: scripts that train with gw.elastic go on when a worker is lost, as
long as --min are left; lost ones are replaced --restarts times; and others can come with `gradwire join`. Workers then
are numbered as they come, since ranks change, and have none of torchrun's variables. The exit code is 0 if the job
ended well, whoever was lost on the way.
"""


@click.command(help=_HELP, no_args_is_help=True, context_settings=CONTEXT)
@click.option("-n", "size", metavar="N", type=click.IntRange(min=1), help="How many processes; by default --min.")
@click.option(
    "--min",
    "minimum",
    metavar="A",
    type=click.IntRange(min=1),
    help="Go on while so many are left; with fewer, wait for others. By default 1, if the job is elastic.",
)
@click.option(
    "--max", "maximum", metavar="B", type=click.IntRange(min=1), help="Let others join up to so many; by default N."
)
@click.option(
    "--restarts", metavar="R", type=click.IntRange(min=0), help="Replace so many lost workers in all; by default none."
)
@click.option(
    "--listen",
    metavar="HOST[:PORT]",
    help="Where an elastic job can be joined; by default on this machine only, at a free port.",
)
@shared_options
def run(
    size: int | None,
    minimum: int | None,
    maximum: int | None,
    restarts: int | None,
    listen: str | None,
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
    count = size or minimum
    if count is None:
        raise click.UsageError("Missing option '-n'.")
    least, most = minimum or 1, maximum or count
    if not least <= count <= most:
        raise click.UsageError(f"-n {count} is not between --min {least} and --max {most}")
    task = task_of(script, args, is_module=is_module)
    trouble = chaos_of(chaos, elastic=elastic)

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
            task, count, setup, restarts=policy, chaos=trouble, output=output, grace=grace, kill_after=kill_after
        )

    see_through(make, log_dir)
