"""`gradwire tune`: measures the links of this machine, so that the choice of algorithms fits it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradwire.cli.signals import signals_end
from gradwire.errors import GradwireError

if TYPE_CHECKING:
    from rich.console import Console

    from gradwire.bench.link_costs import Measured
    from gradwire.collectives import Table

SHOWN = (8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20)
_HELP = """Measure what rounds, messages and bytes cost on this machine, and store the table for later jobs.

\b
  gradwire tune                    measure, show and store the table
  gradwire tune -n 4 --dry-run     measure with four ranks, store nothing
  gradwire tune --show             show the current table and its source

The measurement takes some seconds, in which nothing else should run. A job uses the table that its rank 0 finds: the
file named by GRADWIRE_TUNING, or gradwire/tuning.json in the user's configuration folder. Without a file the job uses
the defaults.
"""


@click.command(
    help=_HELP,
    short_help="Measure the links of this machine for the choice of algorithms.",
    context_settings={"max_content_width": 120},
)
@click.option(
    "-n", "--ranks", metavar="N", type=click.IntRange(2, 64), default=2, show_default=True, help="Number of ranks."
)
@click.option("--show", is_flag=True, help="Show the current table; measure nothing.")
@click.option("--dry-run", is_flag=True, help="Measure, but store nothing.")
@click.option(
    "--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Store the table in this file."
)
@click.option("--json", "as_json", is_flag=True, help="Print table and measurements as JSON.")
def tune(ranks: int, show: bool, dry_run: bool, output: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from gradwire.collectives import tuning_table

    console = Console(stderr=as_json, soft_wrap=True, markup=False, highlight=False, emoji=False)
    file = output or tuning_table.path(os.environ)
    table, problem = tuning_table.find(os.environ)
    measured: list[Measured] = []
    try:
        if show:
            source = f"the defaults ({file}: {problem})" if problem else str(tuning_table.path(os.environ))
            console.print(f"# current table: {source}")
        else:
            with signals_end():
                measured = _measure(ranks, console)
            table = replace(table, **{one.kind: one.constants for one in measured})
        for line in _report(table, measured, ranks):
            console.print(line)
        if not show and not dry_run:
            tuning_table.store(table, file)
            console.print(f"# stored in {file}")
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if as_json:
        stored = None if show or dry_run else str(file)
        about: dict[str, Any] = {
            "ranks": ranks,
            "stored": stored,
            "problem": problem,
            "table": tuning_table.encode(table),
        }
        print(json.dumps(about | {"measured": [one.as_json() for one in measured]}, indent=1))


def _measure(ranks: int, console: Console) -> list[Measured]:
    from gradwire.bench.link_costs import measure

    measured = []
    for kind in ("tcp", "shm"):
        one = measure(kind, ranks)
        if one is None:
            console.print(f"# {kind}: this group has no such links; their constants are not changed")
            continue
        core = "the native core" if one.native else "Python only"
        console.print(
            f"# {kind}: {ranks} ranks, {core}; half of the times are within {one.misfit - 1:.0%} of the model"
        )
        measured.append(one)
    return measured


def _report(table: Table, measured: list[Measured], ranks: int) -> Iterator[Any]:
    """Yield two tables: the constants, and the algorithms that they choose for all_reduce, beside the defaults."""
    from rich.table import Table as Grid

    from gradwire.bench.cases import human
    from gradwire.collectives import DEFAULTS, choose
    from gradwire.topology import Topology

    grid = Grid("link", "constant", "default", "here", box=None, pad_edge=False)
    for kind, constants in asdict(table).items():
        for name, seconds in constants.items():
            default = asdict(DEFAULTS)[kind][name]
            if default or seconds:
                grid.add_row(kind, _named(name), _amount(name, default), _amount(name, seconds))
    yield grid
    kinds = [one.kind for one in measured] or ["tcp", "shm"]
    grid = Grid("all_reduce", *(f"{kind}, {which}" for kind in kinds for which in ("default", "here")), box=None)
    topology = Topology.single(ranks)
    for nbytes in SHOWN:
        pairs = [(which, kind) for kind in kinds for which in (DEFAULTS, table)]
        chosen = [choose("all_reduce", "auto", nbytes, topology, which, kind) for which, kind in pairs]
        grid.add_row(human(nbytes), *chosen)
    yield grid


def _named(name: str) -> str:
    return name if name in ("round", "message") else f"byte {name}"


def _amount(name: str, seconds: float) -> str:
    return f"{seconds * 1e6:.2f} µs" if name in ("round", "message") else f"{seconds * 1e9:.3f} ns"
