"""The `gradwire` command: one file per subcommand.

signals       how commands that have started processes react to signals
invite        `gradwire invite`
node_options  the options of `run` for several hosts, in torchrun's spellings too
show_config   what `run` takes from the configuration, and the table of `run --show-config`
launching     options, signals and the final report that `run` and `join` share
coordinator   `gradwire coordinator`
certs         `gradwire certs`
checkpoints   `gradwire checkpoints`
tune          `gradwire tune`
bench         `gradwire bench`
run           `gradwire run`
join          `gradwire join`
"""

from __future__ import annotations

import click

import gradwire
from gradwire.cli.bench import bench
from gradwire.cli.certs import certs
from gradwire.cli.checkpoints import checkpoints
from gradwire.cli.coordinator import coordinator
from gradwire.cli.invite import invite
from gradwire.cli.join import join
from gradwire.cli.run import run
from gradwire.cli.tune import tune
from gradwire.host import native_core

__all__ = ["main"]


def _show_version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"gradwire {gradwire.__version__}, {native_core.state()}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and whether the native core is available.",
)
def main() -> None:
    """Data-parallel training on CPUs, with the same bits on every rank."""


main.add_command(bench)
main.add_command(join)
main.add_command(coordinator)
main.add_command(certs)
main.add_command(checkpoints)
main.add_command(invite)
main.add_command(run)
main.add_command(tune)
