"""`gradwire run`: starts the workers of a job on this machine and waits for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradwire.cli.launching import (
    CONTEXT,
    chaos_of,
    refuse_to_suspend,
    report,
    run_to_end,
    shared_options,
    standard_input,
    task_of,
)
from gradwire.cli.node_options import NodeOptions, Nodes, node_options, with_hyphens
from gradwire.cli.show_config import Decided, configured_size, describe
from gradwire.job import config, config_file
from gradwire.job.config_file import FILE
from gradwire.launch.stop_escalation import GRACE

if TYPE_CHECKING:
    from gradwire.launch.output import Output
    from gradwire.launch.supervisor import Supervisor
    from gradwire.launch.worker_setup import WorkerSetup

_HELP = f"""Run a script in N processes that train together.

\b
  gradwire run -n 4 train.py --epochs 10
  gradwire run -n 4 -m package.train --epochs 10
  gradwire run --min 2 --max 8 -n 4 --restarts 3 train.py
  gradwire run --nnodes 2 --node-rank 0 -n 4 --address 10.0.0.1:29500 train.py

The processes find each other by gw.init(). They also have torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR …).
Everything after SCRIPT belongs to the script, options too. The first process reads the standard input of this command;
for the others it is empty.

Each printed line appears with its rank in front, and unchanged in a log file per rank. If a rank fails, the other ranks
have {GRACE:g} seconds to end, then receive SIGTERM, then SIGKILL. The last thing printed is the root cause, with its
traceback; its exit code is returned (128 + n for signal n). Frames inside gradwire are hidden unless
GRADWIRE_TRACEBACK=full is set; the log files have all frames. Ctrl-C stops all processes; a second Ctrl-C kills them.

SIGTERM or SIGUSR2, to this command or to one process, stops scripts that train with gw.elastic after a whole step: all
ranks leave with a checkpoint, and the exit code is 143 or 140. The next run continues there. Other scripts are ended.

With --min, --max or --restarts the job is elastic. Scripts that train with gw.elastic continue after the loss of a
worker as long as --min workers are left. Lost workers are replaced up to --restarts times, and other workers can join
with `gradwire join`. Workers are numbered in the order of their start, because ranks change. They have none of
torchrun's variables. The exit code is 0 if the job finished, even if workers were lost.

With --nnodes N, run this command once on each of N hosts, with --node-rank 0 to N-1 and the same --address, in any
order. Ranks are numbered over all hosts. If a rank fails, the commands on all hosts end with the root cause. Between
hosts the job needs GRADWIRE_TOKEN, and certificates or --insecure. torchrun's spellings (--rdzv-endpoint, --rdzv-id,
--max-restarts, --master-addr, --master-port) and its PET_* variables work too.
"""


@click.command(
    help=_HELP,
    short_help="Run a script in N processes that train together.",
    no_args_is_help=True,
    context_settings={**CONTEXT, "token_normalize_func": with_hyphens},
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
@click.option("--job", metavar="NAME", help="The job's name.  [default: GRADWIRE_JOB, or a random one]")
@click.option(
    "--show-config", is_flag=True, help="Print the settings that the workers would get, with their origins, and exit."
)
@node_options
@shared_options
def run(
    size: int | None,
    minimum: int | None,
    maximum: int | None,
    restarts: int | None,
    listen: str | None,
    job: str | None,
    show_config: bool,
    is_module: bool,
    log_dir: Path | None,
    grace: float,
    kill_after: float,
    stop_timeout: float,
    chaos: str | None,
    script: str,
    args: tuple[str, ...],
    **others: Any,
) -> None:
    given = NodeOptions(**others)
    options = given.with_variables(os.environ, size=size)
    restarts = options.restarts if restarts is None else restarts
    in_file = configured_size() if options.nnodes is None and options.nproc is None else None
    nodes = options.nodes(size or (minimum if options.nproc is None else None) or in_file)
    elastic = nodes.ranged or not (minimum is None and maximum is None and restarts is None)
    if nodes.several and nodes.rank is None and not elastic:
        raise click.UsageError(
            f"--nnodes {nodes.most} needs --node-rank: the number of this host, 0 to {nodes.most - 1}"
        )
    if listen is not None and (not elastic or nodes.several):
        raise click.UsageError("--listen is for elastic jobs: add --min and --max, or give --address with --nnodes")
    if (size or minimum or in_file or options.nnodes or options.nproc) is None:
        raise click.UsageError("Missing option '-n'.")
    least, most = _bounds(nodes, minimum, maximum)
    task = task_of(script, args, is_module=is_module)
    faults = chaos_of(chaos, elastic=elastic)
    environ = {**os.environ, **({config.INSECURE: "1"} if options.insecure else {})}
    name = job or given.job or environ.get(config.JOB) or options.job
    if show_config:
        size_from = "-n" if size else "--min" if minimum else f"file {os.environ[FILE]}" if in_file else "gradwire run"
        click.echo(describe(Decided(nodes, elastic=elastic, listen=listen, job=name, size_from=size_from), environ))
        return

    def make(output: Output) -> Supervisor:
        from gradwire.launch.restart_policy import Restarts
        from gradwire.launch.supervisor import Supervisor

        policy = None
        if elastic:
            assert output.log_dir is not None
            where = _Elastic(nodes, least, most, name, listen, output.log_dir, script)
            setup: WorkerSetup = where.setup(environ)
            policy = Restarts(minimum=least if where.hosts else 1, restarts=restarts or 0)
        elif nodes.several:
            limits = {"stop_seconds": grace + kill_after, "stop_timeout": stop_timeout}
            setup = _on_nodes(nodes, name, environ, insecure=options.insecure, **limits)
        else:
            setup = _here(nodes.workers, name, environ)
        return Supervisor(
            task,
            nodes.workers,
            setup,
            restarts=policy,
            chaos=faults,
            output=output,
            grace=grace,
            kill_after=kill_after,
            stop_timeout=stop_timeout,
            stdin=standard_input(),
        )

    run_to_end(make, log_dir)


def _bounds(nodes: Nodes, minimum: int | None, maximum: int | None) -> tuple[int, int]:
    """Return the fewest and the most workers of an elastic job."""
    if nodes.several:
        if minimum is not None or maximum is not None:
            raise click.UsageError("--min and --max count workers: with --nnodes, write the hosts as --nnodes MIN:MAX")
        return nodes.fewest * nodes.workers, nodes.most * nodes.workers
    least, most = minimum or 1, maximum or nodes.workers
    if not least <= nodes.workers <= most:
        raise click.UsageError(f"-n {nodes.workers} is not between --min {least} and --max {most}")
    return least, most


def _here(size: int, name: str | None, environ: Mapping[str, str]) -> WorkerSetup:
    """Return the setup of a job of fixed size on this host."""
    from gradwire.launch import rendezvous
    from gradwire.launch.worker_setup import StaticSetup

    return StaticSetup(size, rendezvous.on_this_machine(size, name, environ), environ)


def _on_nodes(
    nodes: Nodes, name: str | None, environ: Mapping[str, str], *, insecure: bool, **limits: float
) -> WorkerSetup:
    """Connect to the launchers of the other hosts, and return the setup of this host's workers."""
    from gradwire.launch.node_setup import node_setup
    from gradwire.launch.nodes import join_nodes, node_config
    from gradwire.launch.rendezvous import job_name
    from gradwire.security.credentials import Credentials

    assert nodes.rank is not None
    assert nodes.address is not None
    environ = config_file.with_variables(environ)
    if nodes.rank == 0:
        name = job_name(name, Credentials.from_environ(environ))
    settings = node_config(nodes.rank, nodes.most, nodes.address, environ, insecure=insecure, job=name)
    refuse_to_suspend()
    joined = join_nodes(settings, nodes.workers, environ, report)
    return node_setup(joined, settings, environ, **limits)


@dataclass(frozen=True)
class _Elastic:
    """An elastic job, on this host or on several."""

    nodes: Nodes
    least: int
    most: int
    name: str | None
    listen: str | None
    log_dir: Path
    script: str

    @cached_property
    def hosts(self) -> bool:
        """Whether this launcher runs the coordinator: host 0, or without numbers the host that has the address."""
        from gradwire.launch.elastic_rendezvous import is_free_here

        nodes = self.nodes
        if not nodes.several or nodes.rank is not None:
            return not nodes.rank
        return nodes.address is not None and is_free_here(nodes.address)

    def setup(self, environ: Mapping[str, str]) -> WorkerSetup:
        from gradwire.launch import elastic_rendezvous
        from gradwire.launch.elastic_rendezvous import ElasticJob
        from gradwire.launch.elastic_setup import WorkerNumbers
        from gradwire.launch.log_folder import JOURNAL

        nodes = self.nodes
        workers = nodes.workers
        numbers = WorkerNumbers(nodes.rank or 0, nodes.most, workers)
        size = nodes.fewest * workers
        if self.hosts:
            listen = str(nodes.address) if nodes.several else self.listen
            job = ElasticJob(size, self.least, self.most, workers, self.name, numbers)
            return elastic_rendezvous.hosted(job, listen, self.log_dir / JOURNAL, self.script, environ)
        timeout = elastic_rendezvous.settings(environ).timeout
        first = (size, numbers) if nodes.rank is not None else None
        named = {**environ, **({config.JOB: self.name} if self.name else {})}
        return elastic_rendezvous.elsewhere(
            workers, str(nodes.address), None, named, report, seconds=timeout, first=first
        )
