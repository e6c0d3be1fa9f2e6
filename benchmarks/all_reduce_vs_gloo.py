"""All-reduce over TCP on one machine: gradwire and torch's Gloo, measured in turns.

    pip install torch==2.13.0            # into the environment that has gradwire
    python benchmarks/all_reduce_vs_gloo.py
    python benchmarks/all_reduce_vs_gloo.py --ranks 4 --sizes 8,64Ki,1Mi --blocks 15 --json out.json

README.md says how it measures and why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

SIZES = "8,1Ki,4Ki,16Ki,64Ki,256Ki,1Mi,4Mi,16Mi,64Mi"
PATIENCE = 300.0  # seconds for a start or a block before it counts as hung

Array = NDArray[np.float32]


# ── the engines, as their users call them ────────────────────────────────────────────────────────────────────────────


class Engine(Protocol):
    version: str

    def all_reduce(self, x: Array) -> Callable[[], object]:
        """A function that sums x over the ranks, in place; what can be made ready once is made ready here."""

    def close(self) -> None: ...


class Gradwire:
    def __init__(self, rank: int, size: int, meeting_place: str) -> None:
        import gradwire as gw

        self.version = gw.__version__
        self.group = gw.init(rank, size, meeting_place, transport="tcp", timeout=PATIENCE)

    def all_reduce(self, x: Array) -> Callable[[], object]:
        return lambda: self.group.all_reduce(x)

    def close(self) -> None:
        self.group.close()


class Gloo:
    def __init__(self, rank: int, size: int, meeting_place: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch, self.version = torch, torch.__version__
        torch.distributed.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=size)

    def all_reduce(self, x: Array) -> Callable[[], object]:
        tensor = self.torch.from_numpy(x)
        return lambda: self.torch.distributed.all_reduce(tensor)

    def close(self) -> None:
        self.torch.distributed.destroy_process_group()


ENGINES: dict[str, Callable[[int, int, str], Engine]] = {"gradwire": Gradwire, "gloo": Gloo}


# ── a worker: one rank of one engine; asleep in a read whenever it is not its turn ───────────────────────────────────


class StartingLine:
    """A barrier that belongs to neither engine: a counter for each rank in shared memory."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size * 64)
        self.counters = np.frombuffer(memory, np.int64).reshape(size, 8)[:, 0]  # a cache line each
        self.rank, self.round = rank, 0

    def wait(self) -> None:
        self.round += 1
        self.counters[self.rank] = self.round
        deadline = time.monotonic() + PATIENCE
        while self.counters.min() < self.round:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise TimeoutError("another rank did not come to the starting line")


def measure(engine: Engine, line: StartingLine, rank: int, size: int, nbytes: int, iterations: int) -> dict[str, Any]:
    """One block: when each call began and ended on this rank. The first two iterations only warm up."""
    pattern = (np.arange(nbytes // 4) % 64 + rank).astype(np.float32)  # whole numbers: their sums are exact
    x = np.empty_like(pattern)
    call = engine.all_reduce(x)
    begins, ends = [], []
    for i in range(iterations + 2):
        factor = i % 7 + 1  # so that yesterday's result would be a wrong one
        np.multiply(pattern, factor, out=x)
        line.wait()
        begins.append(time.monotonic_ns())
        call()
        ends.append(time.monotonic_ns())
        check(x if i == iterations + 1 else x[:1], pattern, rank, size, factor)
    return {"begins": begins[2:], "ends": ends[2:]}


def check(x: Array, pattern: Array, rank: int, size: int, factor: int) -> None:
    expected = (size * (pattern[: len(x)] - rank) + size * (size - 1) // 2) * factor
    if not np.array_equal(x, expected):
        raise ArithmeticError(f"a wrong sum: {x[x != expected][:4]} instead of {expected[x != expected][:4]}")


def work(engine: str, rank: int, size: int, meeting_place: str, starting_line: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    running = ENGINES[engine](rank, size, meeting_place)
    line = StartingLine(starting_line, rank, size)
    print(json.dumps({"version": running.version}), file=answers, flush=True)
    for request in sys.stdin:  # ends when the parent closes the pipe, or dies
        answer = measure(running, line, rank, size, **json.loads(request))
        print(json.dumps(answer), file=answers, flush=True)
    running.close()


# ── the parent: starts the workers, gives them turns, ends them whatever happens ─────────────────────────────────────


class Workers:
    """The ranks of one engine."""

    def __init__(self, engine: str, size: int, folder: Path) -> None:
        self.engine, self.size, self.folder = engine, size, folder / engine
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> str:
        """Start all ranks, wait until they are ready, and return the engine's version."""
        self.folder.mkdir()
        starting_line = self.folder / "starting_line"
        starting_line.write_bytes(bytes(self.size * 64))
        meeting_place = f"127.0.0.1:{free_port()}" if self.engine == "gradwire" else str(self.folder / "store")
        common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "GRADWIRE_TOKEN": secrets.token_hex(32)}
        for rank in range(self.size):
            arguments = [self.engine, str(rank), str(self.size), meeting_place, str(starting_line)]
            process = subprocess.Popen(
                [sys.executable, __file__, "--worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | common,
                start_new_session=True,  # Ctrl-C is for the parent, which ends them
            )
            self.processes.append(process)
        return str(self.answers()[0]["version"])

    def block(self, nbytes: int, iterations: int) -> tuple[float, float]:
        """Median microseconds from the last rank's call to the last rank's return, and of the longest call."""
        for process in self.processes:
            pipe(process.stdin).write(json.dumps({"nbytes": nbytes, "iterations": iterations}) + "\n")
            pipe(process.stdin).flush()
        answers = self.answers()
        begins, ends = (np.array([answer[key] for answer in answers]) for key in ("begins", "ends"))
        together = ends.max(axis=0) - begins.max(axis=0)
        longest = (ends - begins).max(axis=0)
        return float(np.median(together)) / 1000, float(np.median(longest)) / 1000

    def answers(self) -> list[dict[str, Any]]:
        """One line of every worker; the first that ends instead, or a silence, is an error."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                selector.register(pipe(process.stdout), selectors.EVENT_READ, rank)
            while len(answers) < len(self.processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise SystemExit(f"{self.engine}: no answer within {PATIENCE:.0f} s")
                for key, _ in ready:
                    process = self.processes[key.data]
                    text = pipe(process.stdout).readline()
                    if not text:
                        raise SystemExit(f"{self.engine}: rank {key.data} ended with exit code {process.wait(20)}")
                    answers[key.data] = json.loads(text)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self.processes))]

    def stop(self, *, kill: bool) -> None:
        for process in self.processes:
            if kill:
                process.kill()
            else:
                pipe(process.stdin).close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.stop(kill=error is not None)


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # all of them are pipes
    return stream


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────────────────────


def compare(engines: Sequence[Workers], nbytes: int, iterations: int, blocks: int) -> dict[str, Any]:
    """Blocks of both engines in turns; who goes first changes, so that a drift of the machine favours nobody."""
    taken: list[dict[str, Any]] = []
    for number in range(blocks):
        block: dict[str, Any] = {}
        for workers in engines if number % 2 == 0 else reversed(engines):
            block[f"{workers.engine}_us"], block[f"{workers.engine}_longest_us"] = workers.block(nbytes, iterations)
        taken.append(block | {"ratio": block["gloo_us"] / block["gradwire_us"]})
    ratios = sorted(block["ratio"] for block in taken)
    return {
        "bytes": nbytes,
        "iterations": iterations,
        "gradwire_us": median(block["gradwire_us"] for block in taken),
        "gloo_us": median(block["gloo_us"] for block in taken),
        "ratio": median(ratios),
        "ratio_least": ratios[0],
        "ratio_most": ratios[-1],
        "blocks": taken,
    }


def table(rows: list[dict[str, Any]], title: str) -> Table:
    drawn = Table("bytes", "gradwire µs", "Gloo µs", "Gloo ÷ gradwire", "least … most", title=title)
    for column in drawn.columns:
        column.justify = "right"
    for row in rows:
        drawn.add_row(
            human(row["bytes"]),
            f"{row['gradwire_us']:,.0f}",
            f"{row['gloo_us']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_least']:.2f} … {row['ratio_most']:.2f}",
        )
    return drawn


def human(nbytes: int) -> str:
    for factor, unit in ((2**20, "Mi"), (2**10, "Ki")):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return str(nbytes)


def parse_sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)(Ki|Mi|)", word.strip())
        nbytes = int(found[1]) * {"": 1, "Ki": 2**10, "Mi": 2**20}[found[2]] if found else 0
        if nbytes < 4 or nbytes % 4:
            raise argparse.ArgumentTypeError(f"{word!r} is not a size like 8, 64Ki or 1Mi that holds whole float32s")
        sizes.append(nbytes)
    return sizes


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="All-reduce over TCP on one machine: gradwire and Gloo, in turns.")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes(SIZES), help=f"bytes (default: {SIZES})")
    parser.add_argument("--blocks", type=positive, default=9, help="blocks for each engine and size (default: 9)")
    parser.add_argument("--iterations", type=positive, default=200, help="at most so many in a block (default: 200)")
    parser.add_argument("--json", metavar="FILE", help="write all medians there ('-': to standard output)")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("Gloo comes with torch, which is not installed here: pip install torch==2.13.0")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the workers are ended
    console = Console(stderr=options.json == "-", highlight=False)
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [stack.enter_context(Workers(name, options.ranks, folder)) for name in ENGINES]
        versions = {workers.engine: workers.start() for workers in engines}
        for nbytes in options.sizes:
            iterations = max(3, min(options.iterations, 2**26 // nbytes))  # large ones take long and vary less
            rows.append(compare(engines, nbytes, iterations, options.blocks))
            console.print(f"{human(nbytes)} bytes: {rows[-1]['ratio']:.2f}", style="dim")
    title = f"all-reduce, float32 sum, {options.ranks} ranks, TCP, {os.cpu_count()} cores"
    console.print(table(rows, title))
    if options.json:
        report = {"ranks": options.ranks, "cores": os.cpu_count(), "versions": versions, "sizes": rows}
        text = json.dumps(report, indent=1)
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6])
    else:
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(130)
