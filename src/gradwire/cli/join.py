"""`gradwire join`: starts workers for a running job, on this machine or another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.cli.launching import CONTEXT, chaos_of, report, run_to_end, shared_options, standard_input, task_of

if TYPE_CHECKING:
    from gradwire.launch.output import Output
    from gradwire.launch.supervisor import Supervisor

_HELP = """Join the elastic job whose coordinator is at ADDRESS, with one or more workers.

\b
  gradwire join 127.0.0.1:23456 train.py --epochs 10
  gradwire join 127.0.0.1:23456 -n 4 train.py --epochs 10
  GRADWIRE_TOKEN=… gradwire join 10.0.0.1:29500 -n 4 train.py

The job admits the workers after its next step and sends them its state. If it already has --max members, the workers
wait. `gradwire run --min … --max …` and `gradwire coordinator` print the address. Options may stand before or after
ADDRESS; everything after SCRIPT belongs to the script. The job's secret comes from GRADWIRE_TOKEN or --token-file; a
job of the same user on the same machine needs neither.

SIGTERM or SIGUSR2 to this command stops the whole job after a step, if its script trains with gw.elastic. Ctrl-C stops
only the workers that this command has started.
"""


class _OptionsAroundAddress(click.Command):
    """Accepts options before and after the address; everything after the script belongs to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before, rest = self._split(ctx, args)
        if rest and "--" not in before:
            after, script = self._split(ctx, rest[1:])
            args = [*before, *after, rest[0], *script]
        return super().parse_args(ctx, args)

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Split arguments into the options at the beginning and the rest."""
        options = click.Command(None, params=[one for one in self.get_params(ctx) if isinstance(one, click.Option)])
        _, rest, _ = options.make_parser(ctx).parse_args(list(args))
        return args[: len(args) - len(rest)], rest


@click.command(
    cls=_OptionsAroundAddress,
    help=_HELP,
    short_help="Start workers that join a running elastic job.",
    no_args_is_help=True,
    context_settings=CONTEXT,
)
@click.argument("address")
@click.option(
    "-n", "count", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="Number of workers."
)
@click.option(
    "--restarts",
    metavar="R",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Replace up to R lost workers in all.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="File with the job's secret; takes precedence over GRADWIRE_TOKEN.",
)
@shared_options
def join(
    address: str,
    count: int,
    restarts: int,
    token_file: Path | None,
    is_module: bool,
    log_dir: Path | None,
    grace: float,
    kill_after: float,
    stop_timeout: float,
    chaos: str | None,
    script: str,
    args: tuple[str, ...],
) -> None:
    task = task_of(script, args, is_module=is_module)
    faults = chaos_of(chaos, elastic=True)

    def make(output: Output) -> Supervisor:
        from gradwire.launch import elastic_rendezvous
        from gradwire.launch.restart_policy import Restarts
        from gradwire.launch.supervisor import Supervisor

        return Supervisor(
            task,
            count,
            elastic_rendezvous.elsewhere(count, address, token_file, os.environ, report),
            restarts=Restarts(minimum=1, restarts=restarts),
            chaos=faults,
            output=output,
            grace=grace,
            kill_after=kill_after,
            stop_timeout=stop_timeout,
            stdin=standard_input(),
        )

    run_to_end(make, log_dir)
