"""Measure whole training steps: how much time does synchronising the replicas add, compared with torch's DDP?

    python benchmarks/training.py                            # MLP and GPT, 2 ranks, one thread each: half an hour
    python benchmarks/training.py --models mlp --crews 1     # a quick run
    python benchmarks/training.py --json out.json

The same loop (forward, backward, SGD) runs with several engines. Each engine has its own processes, which sleep while
another engine is measured. The engines take turns, one block of steps each, because on a shared machine only
measurements that alternate can be compared. The machine's speed drifts within seconds, so many short blocks are more
precise than a few long ones. Some processes are slower than others for their whole life, because of the placement of
their memory. So all processes are restarted several times.

    off         no exchange: the time of the computation
    barrier     no exchange, but the ranks wait for each other after backward: the wait that every exchange includes
    gradwire    gw.torch.DistributedDataParallel
    waiting     the same with overlap=False: all gradients are exchanged after backward
    gloo        torch's DistributedDataParallel on Gloo
    backend     torch's DistributedDataParallel on the backend "gradwire", if it is available

`gradwire` and `waiting` are started as `gradwire run` starts workers, the others as torchrun does. `gradwire run` sets
malloc so that it keeps the memory that a step frees and reuses it. Without these settings, page faults may take a third
of the MLP's step, even without any exchange. With `--malloc keep` all engines get these settings.

*Beyond compute* is the time of a step minus that of `off` in the same round: the median over all rounds. `±` is its
standard error, estimated from the spread of the rounds. Synchronised replicas wait for the slowest rank, and they wait
longer on a busy machine: `barrier` shows how much of the time that is. *Overlap* is the communication hidden behind
backward: the step time of `waiting` minus that of `gradwire`. *CPU* is the CPU time of all threads of a rank per step,
which varies less than the wall-clock time on a busy machine.

Memory is the sum over the ranks of their highest PSS, which counts memory that several processes share once. It is
measured separately from the times, and with gradient_as_bucket_view=True for torch's wrapper. `gradwire` is measured
twice: started as above, and as `alike`, which is started like `gloo`, so that rank 0 also serves the rendezvous.

At the end the weights must have the same bits on all ranks of an engine, and must be close to those of the other
engines. Otherwise the exit code is 1. It is 2 if gradwire's time beyond compute is more than a third of Gloo's, if the
backend's is more than half of Gloo's, or if gradwire needs more memory than Gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

ENGINES = ("off", "barrier", "gradwire", "waiting", "gloo", "backend")
UNSYNCHRONISED = ("off", "barrier")  # their replicas are not synchronised
MODELS = ("mlp", "gpt")
ALLOWED = {"gradwire": 1 / 3, "backend": 1 / 2}  # of Gloo's time beyond compute
AS_GRADWIRE_RUN = ("gradwire", "waiting")  # started as `gradwire run` starts workers; the others as torchrun does
ALIKE = "alike"  # gradwire, started as torchrun starts it
CLOSE = 1e-4  # tolerance between float32 weights of two engines, whose sums round differently
HANG_SECONDS = 120.0


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        parts = self.mix(self.before(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.shrink(nn.functional.gelu(self.grow(self.between(x))))


class GPT(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A decoder-only transformer whose output layer shares the weights of the embedding."""

    def __init__(self, words: int = 4096, width: int = 256, heads: int = 4, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.after, self.output = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.output.weight = self.words.weight

    def forward(self, text: Any) -> Any:
        x = self.words(text) * 0.1 + self.places.weight[: text.shape[1]]
        return self.output(self.after(self.blocks(x)))


def make(name: str, rank: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return the model, which is the same on all ranks, and a function that computes its loss on this rank's data."""
    torch.manual_seed(1)
    model: Any = (
        GPT() if name == "gpt" else nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.ReLU())))
    )
    torch.manual_seed(100 + rank)
    if name == "gpt":
        text = torch.randint(0, 4096, (2, 129))
        return model, lambda run: nn.functional.cross_entropy(run(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    x, y = torch.randn(32, 2048), torch.randn(32, 2048)
    return model, lambda run: nn.functional.mse_loss(run(x), y)


# ── one rank of one engine ───────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def wrapped(engine: str, model: Any, lean: bool) -> Iterator[Any]:
    """Yield the model in the wrapper of an engine."""
    if engine == "off":
        yield model
    elif engine == "barrier":
        import gradwire as gw

        with gw.init() as group:
            model.register_forward_hook(lambda module, inputs, out: barrier_after_backward(out, group))
            yield model
    elif engine in ("gradwire", "waiting"):
        import gradwire as gw

        with gw.init() as group:
            yield gw.torch.DistributedDataParallel(model, group, overlap=engine == "gradwire")
    else:
        import torch.distributed as dist

        if engine == "backend":
            import gradwire.torch  # noqa: F401 — registers the backend
        dist.init_process_group("gloo" if engine == "gloo" else "gradwire")
        yield nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=lean)
        dist.destroy_process_group()


def barrier_after_backward(out: Any, group: Any) -> None:
    """Add a barrier to the end of the backward pass that begins with `out`."""
    engine = torch.autograd.Variable._execution_engine
    out.register_hook(lambda gradient: engine.queue_callback(group.barrier))


class Peak(threading.Thread):
    """A thread that samples the PSS of this process and keeps the highest value."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.nbytes, self._over = 0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.002):
            with open("/proc/self/smaps_rollup") as lines:
                found = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            self.nbytes = max(self.nbytes, found * 1024)

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.nbytes


def work(engine: str, name: str, lean: bool) -> None:
    """Run a rank. It reads requests from stdin: a number of steps to time, "memory" or "weights"."""
    torch.set_num_threads(1)
    model, loss_of = make(name, int(os.environ["RANK"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    with wrapped(engine, model, lean) as run:

        def step() -> None:
            optimizer.zero_grad()
            loss_of(run).backward()
            optimizer.step()

        def steps(count: int) -> tuple[list[float], list[float]]:
            took, worked = [], []
            for _ in range(count + 1):  # the first step of a block has cold caches and is not counted
                began, busy = time.perf_counter(), time.process_time()
                step()
                took.append(time.perf_counter() - began)
                worked.append(time.process_time() - busy)
            return took[1:], worked[1:]

        def memory() -> int:
            peak = Peak()
            peak.start()
            steps(10)
            return peak.end()

        def weights() -> list[float]:
            flat = torch.cat([one.detach().flatten() for one in model.parameters()])
            return [float(flat[::997].double().sum()), *flat[::99991].tolist(), int(flat.view(torch.int32).sum())]

        steps(3)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            answer = memory() if request == "memory" else weights() if request == "weights" else steps(request)
            print(json.dumps(answer), flush=True)


# ── all engines in turns ─────────────────────────────────────────────────────────────────────────────────────────────


class Crew:
    """The ranks of one engine."""

    def __init__(self, name: str, model: str, options: argparse.Namespace, lean: bool = False) -> None:
        from gradwire.host import malloc  # imported here, so that ranks of other engines do not load gradwire
        from gradwire.launch import worker_setup
        from gradwire.launch.rendezvous import on_this_machine

        engine, ranks = "gradwire" if name == ALIKE else name, options.ranks
        self.engine = engine
        self._ended = contextlib.ExitStack()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        common |= malloc.variables(os.environ, ranks) if options.malloc == "keep" else {}
        if name in AS_GRADWIRE_RUN:
            rendezvous = on_this_machine(ranks)
            rendezvous.coordinator.start()
            self._ended.callback(rendezvous.coordinator.stop)
            found_at = {"coordinator": rendezvous.coordinator.address, "job": rendezvous.job, "token": rendezvous.token}
            common |= worker_setup.shared_by_workers({}, ranks, port=port, **found_at)
        command = [sys.executable, __file__, "--work", engine, model, *(["--lean"] if lean else [])]
        self.processes = [
            subprocess.Popen(
                command,
                env=os.environ | worker_setup.of_worker(common, rank),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def answers(self) -> list[Any]:
        """Return the next answer of each rank."""
        lines = [process.stdout.readline() if process.stdout else "" for process in self.processes]
        if not all(lines):
            raise SystemExit(f"a rank of {self.engine} has ended")
        return [json.loads(line) for line in lines]

    def ask(self, request: object) -> list[Any]:
        for process in self.processes:
            if process.stdin:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
        return self.answers()

    def end(self) -> None:
        for process in self.processes:
            if process.stdin:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(HANG_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ended.close()


@contextlib.contextmanager
def crews(engines: list[str], model: str, options: argparse.Namespace, lean: bool = False) -> Iterator[dict[str, Crew]]:
    made: dict[str, Crew] = {}
    try:
        for engine in engines:
            made[engine] = Crew(engine, model, options, lean)
            made[engine].answers()
        yield made
    finally:
        for crew in made.values():
            crew.end()


def measure(model: str, engines: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step by engine and block, and whether all ranks have the same weights."""
    from gradwire.bench.interleave import turns

    blocks: dict[str, list[float]] = {engine: [] for engine in engines}
    work: dict[str, list[float]] = {engine: [] for engine in engines}
    middle: Callable[[list[float]], float] = min if options.least else statistics.median
    held: dict[str, list[Any]] = {}
    identical = {engine: True for engine in engines if engine not in UNSYNCHRONISED}
    for _ in range(options.crews):
        with crews(engines, model, options) as made:
            for number in range(options.blocks):
                for engine in turns(engines, number):
                    of_ranks = made[engine].ask(options.steps)
                    blocks[engine].append(statistics.mean(middle(took) for took, _ in of_ranks))
                    work[engine].append(statistics.mean(statistics.median(worked) for _, worked in of_ranks))
            held = {engine: made[engine].ask("weights") for engine in identical}
        identical = {
            engine: identical[engine] and all(one == ranks[0] for one in ranks) for engine, ranks in held.items()
        }
    first = next(iter(held.values()))[0][1:-1]
    distance = {e: max(abs(a - b) for a, b in zip(first, ranks[0][1:-1], strict=True)) for e, ranks in held.items()}
    return {"model": model, "blocks": blocks, "work": work, "identical": identical, "distance": distance}


def peaks(model: str, engines: list[str], options: argparse.Namespace) -> dict[str, int]:
    """Return the peak memory in bytes of all ranks of each engine, measured one engine at a time: the median."""
    found: dict[str, list[int]] = {}
    for _ in range(options.peaks):
        for engine in engines:
            with crews([engine], model, options, lean=True) as made:
                found.setdefault(engine, []).append(sum(made[engine].ask("memory")))
    return {engine: round(statistics.median(peaks)) for engine, peaks in found.items()}


def beyond(result: dict[str, Any], engine: str) -> list[float]:
    """Return the seconds beyond compute for each block."""
    return [step - off for step, off in zip(result["blocks"][engine], result["blocks"]["off"], strict=True)]


def error_of_median(values: list[float]) -> float:
    """Return the standard error of the median, for values that are about normally distributed.

    The standard deviation is estimated from the interquartile range (1.349 σ for a normal distribution). The standard
    error of a median is sqrt(π/2) times that of a mean.
    """
    if len(values) < 2:
        return math.nan
    lower, _, upper = statistics.quantiles(values, n=4)
    deviation = (upper - lower) / 1.349
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(values))


def report(result: dict[str, Any]) -> bool:
    """Print a table, and return whether the targets are met."""
    blocks, off = result["blocks"], statistics.median(result["blocks"]["off"])
    rival = statistics.median(beyond(result, "gloo")) if "gloo" in blocks else None
    print(f"\n{result['model']}: a step without exchange takes {1000 * off:.1f} ms")
    heads = f"{'step ms':>9} {'beyond ms':>10} {'± ms':>6} {'of Gloo':>8} {'CPU ms':>8}"
    print(f"{'':10} {heads}  same bits")
    for engine, times in blocks.items():
        extra = beyond(result, engine)
        share = f"{statistics.median(extra) / rival:8.2f}" if rival and engine != "off" else f"{'':8}"
        same = {True: "yes", False: "NO", None: ""}[result["identical"].get(engine)]
        middle = f"{1000 * statistics.median(times):9.1f} {1000 * statistics.median(extra):10.1f}"
        busy = f"{1000 * statistics.median(result['work'][engine]):8.1f}"
        print(f"{engine:10} {middle} {1000 * error_of_median(extra):6.1f} {share} {busy}  {same}", flush=True)
    if "waiting" in blocks and "gradwire" in blocks:
        saved = [
            waiting - overlapped for waiting, overlapped in zip(blocks["waiting"], blocks["gradwire"], strict=True)
        ]
        print(f"overlap: exchanging during backward saves {1000 * statistics.median(saved):.1f} ms per step")
    if rival is None:
        return True
    limits = {engine: part * rival for engine, part in ALLOWED.items() if engine in blocks}
    return all(statistics.median(beyond(result, engine)) <= limit for engine, limit in limits.items())


def has_backend() -> bool:
    """Return whether the backend "gradwire" of torch.distributed is available."""
    import importlib.util

    return importlib.util.find_spec("gradwire.torch.backend") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare training steps with torch's DistributedDataParallel.")
    parser.add_argument("--models", default=",".join(MODELS), help="mlp (25 M parameters), gpt (4 M), or both")
    parser.add_argument("--engines", help=f"some of {','.join(ENGINES)}; off is always included (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--crews", type=int, default=6, help="how often all processes are restarted (default: 6)")
    parser.add_argument("--blocks", type=int, default=20, help="blocks per engine and restart (default: 20)")
    parser.add_argument("--steps", type=int, default=1, help="steps per block, after one warm-up step (default: 1)")
    parser.add_argument(
        "--malloc",
        choices=("keep", "system"),
        default="system",
        help="keep: all engines keep freed memory, as workers of `gradwire run` do (default: system)",
    )
    parser.add_argument("--least", action="store_true", help="use the minimum of each block instead of the median")
    parser.add_argument("--peaks", type=int, default=5, help="measurements of memory (default: 5; 0: none)")
    parser.add_argument("--json", metavar="FILE", help="write every block to this file")
    parser.add_argument("--work", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--lean", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work, options.lean)
        return 0
    known = [engine for engine in ENGINES if engine != "backend" or has_backend()]
    wanted = options.engines.split(",") if options.engines else known
    engines = [engine for engine in known if engine in wanted or engine == "off"]
    results, correct, met = [], True, True
    for model in options.models.split(","):
        result = measure(model, engines, options)
        results.append(result)
        met = report(result) and met
        measured = [one for one in engines if one in ("off", "gradwire", "gloo")]
        measured += [ALIKE] if "gradwire" in measured else []
        result["pss"] = peaks(model, measured, options)
        pss = result["pss"]
        listed = ", ".join(f"{engine} {nbytes / 1e6:.0f} MB" for engine, nbytes in pss.items())
        met = met and max(pss.get("gradwire", 0), pss.get(ALIKE, 0)) <= pss.get("gloo", math.inf)
        print(f"peak PSS of all ranks together: {listed or 'not measured'}", flush=True)
        correct = correct and all(result["identical"].values()) and max(result["distance"].values(), default=0) <= CLOSE
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return 1 if not correct else 0 if met else 2


if __name__ == "__main__":
    sys.exit(main())
