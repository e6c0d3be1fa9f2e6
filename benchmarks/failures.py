"""Measure how fast all ranks learn of the loss of a rank.

    python benchmarks/failures.py                                # 10 kills and 10 stops of each kind: a few minutes
    python benchmarks/failures.py --times 50 --transport tcp --json out.json

Each attempt starts a job of four processes that all-reduce, and sends SIGKILL or SIGSTOP to a random rank at a random
moment. Every other rank must raise `PeerLost` with the right culprit. The table shows the median and the worst time
from the signal until the last rank has raised it. The exit code is 1 if a rank raised another error, named another
culprit, or took longer than one second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

import numpy as np

import gradwire as gw
import gradwire.membership.client.requests  # imported here, so that the forked ranks do not import it again
import gradwire.membership.coordinator.service

ALLOWED = 1.0  # seconds
HANG_SECONDS = 60.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Case:
    """The kind of fault, and what the job does meanwhile."""

    how: str
    transport: str
    nbytes: int  # of each all-reduce; 0: the ranks wait in a barrier that rank 0 does not call


@dataclass(frozen=True)
class Outcome:
    """The result of an attempt: seconds until the last survivor raised an error, and all problems."""

    case: Case
    victim: int
    seconds: float
    problems: list[str]
    text: str


Body = Callable[[Case, int, int, int, Callable[[], object]], None]
"""The work of a rank, which runs until it raises: body(case, rank, size, port, ready)."""


def reduces(case: Case, rank: int, size: int, port: int, ready: Callable[[], object]) -> None:
    group = gw.init(rank, size, f"127.0.0.1:{port}", transport=case.transport)
    x = np.ones(max(8, case.nbytes) // 4, np.float32)
    group.all_reduce(x, op="mean")
    group.barrier()
    ready()
    if not case.nbytes:
        if rank == 0:
            time.sleep(HANG_SECONDS)
        group.barrier()
    while True:
        group.all_reduce(x, op="mean")


def work(body: Body, case: Case, rank: int, size: int, port: int, line: int) -> NoReturn:
    """Run one rank: report when it is ready, and the error that ends it."""
    report: dict[str, object] = {}
    try:
        body(case, rank, size, port, lambda: os.write(line, b"ready\n"))
    except BaseException as error:
        culprit = getattr(error, "culprit", None)
        report = {"error": type(error).__name__, "culprit": culprit, "at": time.monotonic(), "text": str(error)}
    os.write(line, json.dumps(report).encode() + b"\n")
    time.sleep(HANG_SECONDS)
    os._exit(0)


class Job:
    """The forked ranks of one job."""

    def __init__(self, body: Body, case: Case, size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.pids: list[int] = []
        self._lines: list[int] = []
        self._unread = [b""] * size
        for rank in range(size):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                work(body, case, rank, size, port, write)
            os.close(write)
            self.pids.append(pid)
            self._lines.append(read)

    def next_line(self, rank: int, deadline: float) -> str | None:
        """Return the next line of a rank, or None if there is none before the deadline."""
        while b"\n" not in self._unread[rank]:
            if not select.select([self._lines[rank]], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(self._lines[rank], 1 << 16)
            if not data:
                return None
            self._unread[rank] += data
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        return line.decode()

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for line in self._lines:
            os.close(line)


def attempt(body: Body, case: Case, size: int, rng: random.Random) -> Outcome:
    """Start a job, send the signal to a random rank, and check the errors of the others."""
    job = Job(body, case, size)
    try:
        deadline = time.monotonic() + HANG_SECONDS
        for rank in range(size):
            if (line := job.next_line(rank, deadline)) != "ready":
                raise SystemExit(f"rank {rank} did not start: {line}")
        time.sleep(rng.uniform(0.0, 1.0))
        victim = rng.randrange(size)
        began = time.monotonic()
        os.kill(job.pids[victim], SIGNALS[case.how])
        seconds, problems, text = 0.0, [], ""
        for rank in range(size):
            # Without bytes, rank 0 does not call the barrier. It would raise the error at its next call only.
            if rank == victim or (rank == 0 and not case.nbytes):
                continue
            line = job.next_line(rank, began + 10.0)
            if line is None:
                problems.append(f"rank {rank} raised no error")
                continue
            report = json.loads(line)
            text = report["text"]
            if (report["error"], report["culprit"]) != ("PeerLost", victim):
                problems.append(f"rank {rank} raised {report['error']}: {text}, but the culprit was rank {victim}")
            seconds = max(seconds, report["at"] - began)
        if seconds > ALLOWED:
            problems.append(f"it took {seconds:.2f} s")
        return Outcome(case, victim, seconds, problems, text)
    finally:
        job.end()


def size_of(text: str) -> int:
    for suffix, factor in (("Ki", 1 << 10), ("Mi", 1 << 20)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def main(body: Body = reduces, about: str | None = __doc__, sizes: str = "8,64Mi") -> int:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="attempts of each kind (default: 10)")
    parser.add_argument("--ranks", type=int, default=4, help="processes of a job (default: 4)")
    parser.add_argument("--how", default="kill,stop", help="signals to send (default: kill,stop)")
    parser.add_argument("--transport", default="shm,tcp", help="transports to test (default: shm,tcp)")
    parser.add_argument("--sizes", default=sizes, help=f"bytes per exchange; 0: a barrier (default: {sizes})")
    parser.add_argument("--seed", type=int, default=None, help="seed of the random choices")
    parser.add_argument("--json", default=None, metavar="FILE", help="write every attempt to this file")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    outcomes: list[Outcome] = []
    print(f"{'signal':>8} {'transport':>10} {'bytes':>10} {'times':>6} {'median':>8} {'worst':>8} {'wrong':>6}")
    for how in options.how.split(","):
        for transport in options.transport.split(","):
            for size in options.sizes.split(","):
                case = Case(how, transport, size_of(size))
                found = [attempt(body, case, options.ranks, rng) for _ in range(options.times)]
                outcomes += found
                times = [outcome.seconds for outcome in found]
                wrong = sum(bool(outcome.problems) for outcome in found)
                row = f"{how:>8} {transport:>10} {size:>10} {len(found):6d} {statistics.median(times):6.3f} s"
                print(f"{row} {max(times):6.3f} s {wrong:6d}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(outcome) for outcome in outcomes], file, indent=1)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.case.how}, {outcome.case.transport}, {outcome.case.nbytes} bytes: {problem}")
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
