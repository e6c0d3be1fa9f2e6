"""`gradwire join`: starts workers for a job that already runs, from this machine or another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.cli.launching import CONTEXT, chaos_of, see_through, shared_options, task_of

if TYPE_CHECKING:
    from gradwire.launch.output import Output
    from gradwire.launch.supervisor import Supervisor

_HELP = """Join the elastic job whose coordinator is at ADDRESS, with one worker or more.

\b
  gradwire join 127.0.0.1:23456 train.py --epochs 10
  GRADWIRE_TOKEN=… gradwire join 10.0.0.1:29500 -n 4 train.py --epochs 10

The workers are let in after the job's next step and get its state; with --max members the job is full, and they wait.
`gradwire run --min … --max …` and `gradwire coordinator` print the address. The job's secret comes from GRADWIRE_TOKEN
or --token-file; for a job of the same user on the same machine none is needed.
"""


class _OptionsAroundAddress(click.Command):
    """Options may stand before the address and after it; what follows the script is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before, rest = self._split(ctx, args)
        if rest and "--" not in before:
            after, script = self._split(ctx, rest[1:])
            args = [*before, *after, rest[0], *script]
        return super().parse_args(ctx, args)

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """The options at the beginning, and the rest."""
        options = click.Command(None, params=[one for one in self.get_params(ctx) if isinstance(one, click.Option)])
        _, rest, _ = options.make_parser(ctx).parse_args(list(args))
        return args[: len(args) - len(rest)], rest


@click.command(cls=_OptionsAroundAddress, help=_HELP, no_args_is_help=True, context_settings=CONTEXT)
@click.argument("address")
@click.option("-n", "count", metavar="N", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--restarts",
    metavar="R",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Replace so many lost workers in all.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="A file that holds the job's secret; it stands before GRADWIRE_TOKEN.",
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
    chaos: str | None,
    script: str,
    args: tuple[str, ...],
) -> None:
    task = task_of(script, args, is_module=is_module)
    trouble = chaos_of(chaos, elastic=True)

    def make(output: Output) -> Supervisor:
        from gradwire.launch import elastic_rendezvous
        from gradwire.launch.restart_policy import Restarts
        from gradwire.launch.supervisor import Supervisor

        return Supervisor(
            task,
            count,
            elastic_rendezvous.elsewhere(count, address, token_file),
            restarts=Restarts(minimum=1, restarts=restarts),
            chaos=trouble,
            output=output,
            grace=grace,
            kill_after=kill_after,
        )

    see_through(make, log_dir)
