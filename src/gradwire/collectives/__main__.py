"""Draws a schedule: `python -m gradwire.collectives ring 5`."""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from collections.abc import Sequence

from gradwire.collectives.choose import ALGORITHMS, build
from gradwire.collectives.picture import draw
from gradwire.collectives.schedule import COLLECTIVES
from gradwire.errors import GradwireError
from gradwire.topology import Topology


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    width = options.width or shutil.get_terminal_size((120, 24)).columns
    try:
        topology = _topology(options.hosts) if options.hosts else None
        schedule = build(options.collective, options.algorithm, options.ranks, topology=topology, root=options.root)
        picture = draw(schedule, width)
    except GradwireError as error:
        parser.error(str(error))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the picture's arrows must not fail on a terminal without Unicode
    sys.stdout.write(picture)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.collectives",
        description="Draw the rounds of a collective, verify them, and count its messages.",
        epilog="For example: python -m gradwire.collectives hierarchical 5 --hosts 2,3 --collective broadcast --root 1",
    )
    parser.add_argument("algorithm", choices=(*ALGORITHMS, "oneshot"))
    parser.add_argument("ranks", type=int, help="number of ranks")
    parser.add_argument("--collective", default="all_reduce", choices=COLLECTIVES, help="default: all_reduce")
    parser.add_argument("--root", type=int, default=0, help="the root, if the collective has one")
    parser.add_argument("--hosts", type=_counts, help="ranks on each host, such as 2,3; default: all on one")
    parser.add_argument("--width", type=int, help="columns to use; default: the terminal's")
    return parser


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts, such as 2,3") from None


def _topology(counts: Sequence[int]) -> Topology:
    return Topology.of([str(host) for host, count in enumerate(counts) for _ in range(count)])


if __name__ == "__main__":
    sys.exit(main())
