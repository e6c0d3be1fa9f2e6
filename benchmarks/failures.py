"""How fast a loss is told: ranks that all-reduce are killed or frozen, and every other rank has to name the right one.

    python benchmarks/failures.py                                # 10 kills and 10 stops of each kind: a few minutes
    python benchmarks/failures.py --times 50 --transport tcp --json out.json

Each time a job of four processes starts, and at a random moment a random rank gets SIGKILL or SIGSTOP. The table shows
the seconds from the signal until the last of the others has raised `PeerLost`: the median, and the worst. The exit code
is 1 if anybody raised something else, named another rank, or took longer than a second.
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
import gradwire.membership.client.requests  # loaded before ranks are forked, not by each of them
import gradwire.membership.coordinator.service

ALLOWED = 1.0  # seconds
HANG_SECONDS = 60.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Case:
    """What is done to a job, and what the job does meanwhile."""

    how: str
    transport: str
    nbytes: int  # of each all-reduce; 0: a barrier that one rank does not come to


@dataclass(frozen=True)
class Outcome:
    """What came of it: seconds until the last survivor knew, and what was wrong."""

    case: Case
    victim: int
    seconds: float
    troubles: list[str]
    text: str


Body = Callable[[Case, int, int, int, Callable[[], object]], None]
"""What a rank does until that fails: body(case, rank, size, port, ready)."""


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
    """One rank: say when it is ready, and how it ends."""
    said: dict[str, object] = {}
    try:
        body(case, rank, size, port, lambda: os.write(line, b"ready\n"))
    except BaseException as error:
        culprit = getattr(error, "culprit", None)
        said = {"error": type(error).__name__, "culprit": culprit, "at": time.monotonic(), "text": str(error)}
    os.write(line, json.dumps(said).encode() + b"\n")
    time.sleep(HANG_SECONDS)
    os._exit(0)


class Job:
    """The ranks of one job: forked, listened to, and ended."""

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

    def hear(self, rank: int, deadline: float) -> str | None:
        """The next line of a rank, if it says one in time."""
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


def attempt(body: Body, case: Case, size: int, chance: random.Random) -> Outcome:
    """Start a job, harm it, and see what the others say."""
    job = Job(body, case, size)
    try:
        deadline = time.monotonic() + HANG_SECONDS
        for rank in range(size):
            if (line := job.hear(rank, deadline)) != "ready":
                raise SystemExit(f"rank {rank} did not start: {line}")
        time.sleep(chance.uniform(0.0, 1.0))
        victim = chance.randrange(size)
        began = time.monotonic()
        os.kill(job.pids[victim], SIGNALS[case.how])
        seconds, troubles, text = 0.0, [], ""
        for rank in range(size):
            # Rank 0 does not call the barrier that others wait in: it is told at its next call, if ever.
            if rank == victim or (rank == 0 and not case.nbytes):
                continue
            line = job.hear(rank, began + 10.0)
            if line is None:
                troubles.append(f"rank {rank} said nothing")
                continue
            said = json.loads(line)
            text = said["text"]
            if (said["error"], said["culprit"]) != ("PeerLost", victim):
                troubles.append(f"rank {rank} raised {said['error']}: {text}, and the culprit was rank {victim}")
            seconds = max(seconds, said["at"] - began)
        if seconds > ALLOWED:
            troubles.append(f"it took {seconds:.2f} s")
        return Outcome(case, victim, seconds, troubles, text)
    finally:
        job.end()


def size_of(text: str) -> int:
    for suffix, factor in (("Ki", 1 << 10), ("Mi", 1 << 20)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def main(body: Body = reduces, about: str | None = __doc__, sizes: str = "8,64Mi") -> int:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="of each kind")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--how", default="kill,stop")
    parser.add_argument("--transport", default="shm,tcp")
    parser.add_argument("--sizes", default=sizes, help="bytes that are reduced at once; 0: ranks wait in a barrier")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", default=None, metavar="FILE")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    outcomes: list[Outcome] = []
    print(f"{'signal':>8} {'transport':>10} {'bytes':>10} {'times':>6} {'median':>8} {'worst':>8} {'wrong':>6}")
    for how in options.how.split(","):
        for transport in options.transport.split(","):
            for size in options.sizes.split(","):
                case = Case(how, transport, size_of(size))
                found = [attempt(body, case, options.ranks, chance) for _ in range(options.times)]
                outcomes += found
                times = [outcome.seconds for outcome in found]
                wrong = sum(bool(outcome.troubles) for outcome in found)
                row = f"{how:>8} {transport:>10} {size:>10} {len(found):6d} {statistics.median(times):6.3f} s"
                print(f"{row} {max(times):6.3f} s {wrong:6d}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(outcome) for outcome in outcomes], file, indent=1)
    for outcome in outcomes:
        for trouble in outcome.troubles:
            print(f"{outcome.case.how}, {outcome.case.transport}, {outcome.case.nbytes} bytes: {trouble}")
    return int(any(outcome.troubles for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
