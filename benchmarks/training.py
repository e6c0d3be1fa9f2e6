"""Whole training steps beside torch's own DistributedDataParallel: what does keeping replicas in step cost?

    python benchmarks/training.py                            # MLP and GPT, 2 ranks, one thread each: half an hour
    python benchmarks/training.py --models mlp --crews 1     # a glance
    python benchmarks/training.py --json out.json

The same loop (forward, backward, SGD) runs in several ways, each with processes of its own that sleep while others are
measured. They take turns, a block of steps each, because on a shared machine only what was measured side by side can be
compared: its speed drifts within seconds, so many short blocks tell more than a few long ones. Some processes are
slower than others for their whole life, wherever their memory happens to lie: so all of them are started anew several
times.

    off         no exchange at all: what the computation takes
    barrier     no exchange either, but after backward ranks wait for each other: what no exchange can do without
    gradwire    gw.torch.DistributedDataParallel
    waiting     the same with overlap=False: everything is exchanged after backward
    gloo        torch's DistributedDataParallel on Gloo
    backend     torch's DistributedDataParallel on the backend "gradwire", if it is there

`gradwire` and `waiting` are started as `gradwire run` starts workers, the others as torchrun does. gradwire has malloc
keep the memory that a step frees, and find it again. Elsewhere, faulting pages back in may take a third of the MLP's
step, where nothing is exchanged too; with `--malloc keep` all of them keep it, as workers of `gradwire run` do.

*Beyond compute* is a step's time minus that of `off` in the same round, the median over all rounds; `±` is its standard
error, as far as the spread of the rounds tells. Whoever keeps replicas in step waits for the
slowest of them, and the busier the machine the longer: `barrier` tells how much of it that is. *Overlap* is what is
hidden behind backward: a step's time with `waiting` minus that with `gradwire`. *CPU* is what a step costs a rank's
threads together, which a busy machine changes less than the time.

Memory is the sum over ranks of their highest PSS (memory that several processes share is counted once), looked at while
no time is taken; here torch's is asked for gradient_as_bucket_view=True. `gradwire` is looked at twice: started as
above, and `alike`, as `gloo` is, where rank 0 serves the rendezvous too.

At the end the weights must be the same bits on all ranks of an engine, and close to those of the others; otherwise the
exit code is 1. It is 2 if a step beyond compute costs gradwire more than a third of what it costs Gloo, or the backend
more than half of it, or if gradwire takes more memory than Gloo.
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
APART = ("off", "barrier")  # replicas of these are not kept in step
MODELS = ("mlp", "gpt")
ALLOWED = {"gradwire": 1 / 3, "backend": 1 / 2}  # of Gloo's time beyond compute
LAUNCHED = ("gradwire", "waiting")  # as `gradwire run` starts workers; the others as torchrun does
ALIKE = "alike"  # gradwire once more, as torchrun starts it
CLOSE = 1e-4  # float32 weights of two engines: their sums round differently
HANG_SECONDS = 120.0


# ── what is trained ──────────────────────────────────────────────────────────────────────────────────────────────────


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
    """Decoder-only, with the embedding tied to the output."""

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
    """The model, the same on all ranks, and what computes its loss on this rank's data."""
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
    """The model as this engine trains it."""
    if engine == "off":
        yield model
    elif engine == "barrier":
        import gradwire as gw

        with gw.init() as group:
            model.register_forward_hook(lambda module, inputs, out: meet_after_backward(out, group))
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


def meet_after_backward(out: Any, group: Any) -> None:
    """Have the backward pass that begins with `out` end with a barrier."""
    engine = torch.autograd.Variable._execution_engine
    out.register_hook(lambda gradient: engine.queue_callback(group.barrier))


class Peak(threading.Thread):
    """The highest PSS of this process, looked at again and again."""

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
    """Do as told on stdin: a number of steps to time; "memory"; "weights"; the end."""
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
            for _ in range(count + 1):  # the first of a block finds cold caches
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
            word = json.loads(line)
            told = memory() if word == "memory" else weights() if word == "weights" else steps(word)
            print(json.dumps(told), flush=True)


# ── all of them in turns ─────────────────────────────────────────────────────────────────────────────────────────────


class Crew:
    """The ranks of one engine."""

    def __init__(self, called: str, model: str, options: argparse.Namespace, lean: bool = False) -> None:
        from gradwire.host import malloc  # here: what does not exchange by gradwire holds none of it in memory
        from gradwire.launch import worker_setup
        from gradwire.launch.rendezvous import on_this_machine

        engine, ranks = "gradwire" if called == ALIKE else called, options.ranks
        self.engine = engine
        self._ended = contextlib.ExitStack()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        common |= malloc.variables(os.environ, ranks) if options.malloc == "keep" else {}
        if called in LAUNCHED:
            meeting = on_this_machine(ranks)
            meeting.coordinator.start()
            self._ended.callback(meeting.coordinator.stop)
            place = {"coordinator": meeting.coordinator.address, "job": meeting.job, "token": meeting.token}
            common |= worker_setup.shared_by_workers({}, ranks, port=port, **place)
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

    def hear(self) -> list[Any]:
        """What each rank says next."""
        lines = [process.stdout.readline() if process.stdout else "" for process in self.processes]
        if not all(lines):
            raise SystemExit(f"a rank of {self.engine} has ended")
        return [json.loads(line) for line in lines]

    def ask(self, word: object) -> list[Any]:
        for process in self.processes:
            if process.stdin:
                process.stdin.write(json.dumps(word) + "\n")
                process.stdin.flush()
        return self.hear()

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
            made[engine].hear()
        yield made
    finally:
        for crew in made.values():
            crew.end()


def measure(model: str, engines: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step by engine and block, and whether all came to the same weights."""
    from gradwire.bench.interleave import turns

    blocks: dict[str, list[float]] = {engine: [] for engine in engines}
    work: dict[str, list[float]] = {engine: [] for engine in engines}
    middle: Callable[[list[float]], float] = min if options.least else statistics.median
    held: dict[str, list[Any]] = {}
    identical = {engine: True for engine in engines if engine not in APART}
    for _ in range(options.crews):
        with crews(engines, model, options) as made:
            for number in range(options.blocks):
                for engine in turns(engines, number):
                    of_ranks = made[engine].ask(options.steps)
                    blocks[engine].append(statistics.mean(middle(took) for took, _ in of_ranks))
                    work[engine].append(statistics.mean(statistics.median(worked) for _, worked in of_ranks))
            held = {engine: made[engine].ask("weights") for engine in identical}
        identical = {engine: identical[engine] and all(one == told[0] for one in told) for engine, told in held.items()}
    first = next(iter(held.values()))[0][1:-1]
    far = {e: max(abs(a - b) for a, b in zip(first, told[0][1:-1], strict=True)) for e, told in held.items()}
    return {"model": model, "blocks": blocks, "work": work, "identical": identical, "distance": far}


def peaks(model: str, engines: list[str], options: argparse.Namespace) -> dict[str, int]:
    """Bytes at the highest, of all ranks of an engine together; one engine at a time, the median of several."""
    found: dict[str, list[int]] = {}
    for _ in range(options.peaks):
        for engine in engines:
            with crews([engine], model, options, lean=True) as made:
                found.setdefault(engine, []).append(sum(made[engine].ask("memory")))
    return {engine: round(statistics.median(peaks)) for engine, peaks in found.items()}


def beyond(result: dict[str, Any], engine: str) -> list[float]:
    """Seconds beyond compute, block by block."""
    return [mine - off for mine, off in zip(result["blocks"][engine], result["blocks"]["off"], strict=True)]


def error_of_median(values: list[float]) -> float:
    """Its standard error: that of a mean, from the middle half alone, times what a median loses against one."""
    if len(values) < 2:
        return math.nan
    lower, _, upper = statistics.quantiles(values, n=4)
    deviation = (upper - lower) / 1.349
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(values))


def report(result: dict[str, Any]) -> bool:
    """Print a table; whether our targets are met."""
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
        saved = [later - beside for later, beside in zip(blocks["waiting"], blocks["gradwire"], strict=True)]
        print(f"overlap: exchanging while backward runs takes {1000 * statistics.median(saved):.1f} ms off a step")
    if rival is None:
        return True
    limits = {engine: part * rival for engine, part in ALLOWED.items() if engine in blocks}
    return all(statistics.median(beyond(result, engine)) <= limit for engine, limit in limits.items())


def has_backend() -> bool:
    """Whether torch.distributed can be given our backend."""
    import importlib.util

    return importlib.util.find_spec("gradwire.torch.backend") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description="Whole training steps, in turns with torch's DistributedDataParallel.")
    parser.add_argument("--models", default=",".join(MODELS), help="mlp (25 M parameters), gpt (4 M), or both")
    parser.add_argument("--engines", help=f"some of {','.join(ENGINES)}; off is always among them")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--crews", type=int, default=6, help="times that all processes are started (default: 6)")
    parser.add_argument("--blocks", type=int, default=20, help="of each engine and crew, in turns (default: 20)")
    parser.add_argument("--steps", type=int, default=1, help="in a block, after one to warm up (default: 1)")
    parser.add_argument(
        "--malloc", choices=("keep", "system"), default="system", help="keep: what a step frees is not given back"
    )
    parser.add_argument("--least", action="store_true", help="of each block the least, not the median: a busy machine")
    parser.add_argument("--peaks", type=int, default=5, help="times that memory is looked at (default: 5; 0: not)")
    parser.add_argument("--json", metavar="FILE", help="write every block there")
    parser.add_argument("--work", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--lean", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work, options.lean)
        return 0
    known = [engine for engine in ENGINES if engine != "backend" or has_backend()]
    wanted = options.engines.split(",") if options.engines else known
    engines = [engine for engine in known if engine in wanted or engine == "off"]
    results, sound, met = [], True, True
    for model in options.models.split(","):
        result = measure(model, engines, options)
        results.append(result)
        met = report(result) and met
        measured = [one for one in engines if one in ("off", "gradwire", "gloo")]
        measured += [ALIKE] if "gradwire" in measured else []
        result["pss"] = peaks(model, measured, options)
        told = ", ".join(f"{engine} {nbytes / 1e6:.0f} MB" for engine, nbytes in result["pss"].items())
        held = result["pss"]
        met = met and max(held.get("gradwire", 0), held.get(ALIKE, 0)) <= held.get("gloo", math.inf)
        print(f"peak PSS of all ranks together: {told or 'not measured'}", flush=True)
        sound = sound and all(result["identical"].values()) and max(result["distance"].values(), default=0) <= CLOSE
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return 1 if not sound else 0 if met else 2


if __name__ == "__main__":
    sys.exit(main())
