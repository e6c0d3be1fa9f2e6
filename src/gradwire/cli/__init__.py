"""The `gradwire` command: one file per subcommand."""

from __future__ import annotations

import click

from gradwire.cli.bench import bench
from gradwire.cli.run import run
from gradwire.cli.tune import tune

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gradwire", prog_name="gradwire")
def main() -> None:
    """Data-parallel training: gradients between processes, the same bits on every rank."""


main.add_command(bench)
main.add_command(run)
main.add_command(tune)
