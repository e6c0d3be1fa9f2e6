"""Compare torch.distributed on gradwire with Gloo: the time of calls, and the communication time of training steps.

    torchrun --nproc-per-node 2 benchmarks/torch_backend.py
    torchrun --nproc-per-node 2 benchmarks/torch_backend.py --model gpt --rounds 40

The same processes use both engines in turns, because the speed of a machine changes from minute to minute and only
measurements that alternate can be compared. A step is forward, backward and optimizer with torch's DDP. Its time beyond
computing is the time of the step minus the time of the same step without synchronization (`no_sync`). All figures are
medians over the rounds, of the slowest rank in each round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ENGINES = ("gradwire", "gloo")


def mlp() -> tuple[nn.Module, Tensor]:
    """Return a model of 25 M parameters, with layers of several sizes, and its input."""
    sizes = (1024, 4096, 2048, 4096, 1024)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(32, sizes[0])


def gpt() -> tuple[nn.Module, Tensor]:
    """Return a small transformer with 6 layers of width 256, and its input."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 64, 256)


typical: Callable[[list[float]], float] = statistics.median


def slowest(seconds: float) -> float:
    """Return the time of the slowest rank. It is exchanged outside of the measurement, by the default group."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def timed(call: Callable[[], Any], times: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    return slowest((time.perf_counter() - began) / times)


def latencies(groups: dict[str, Any], rounds: int) -> None:
    calls: dict[str, Callable[[Any, Tensor], Any]] = {
        "all_reduce": lambda group, x: dist.all_reduce(x, group=group),
        "async": lambda group, x: dist.all_reduce(x, group=group, async_op=True).wait(),
        "broadcast": lambda group, x: dist.broadcast(x, 0, group=group),
        "all_gather": lambda group, x: dist.all_gather_single(x.new_empty(2 * x.numel()), x, group=group),
    }
    if dist.get_rank() == 0:
        print(f"{'call':12} {'bytes':>9} " + " ".join(f"{name + ' µs':>12}" for name in groups) + "   ratio")
    for name, call in calls.items():
        for count in (2, 1024, 16_384, 262_144):
            x = torch.zeros(count)
            times = 100 if count < 100_000 else 10
            found: dict[str, list[float]] = {engine: [] for engine in groups}
            for _ in range(rounds):
                for engine, group in groups.items():
                    found[engine].append(timed(partial(call, group, x), times) * 1e6)
            medians = [typical(found[engine]) for engine in groups]
            if dist.get_rank() == 0:
                print(f"{name:12} {4 * count:9} " + " ".join(f"{one:12.1f}" for one in medians), end="")
                print(f"   {medians[1] / medians[0]:5.1f}")


def steps(groups: dict[str, Any], build: Callable[[], tuple[nn.Module, Tensor]], rounds: int) -> None:
    torch.manual_seed(0)
    models, (_, x) = {}, build()
    for engine, group in groups.items():
        models[engine] = DistributedDataParallel(build()[0], process_group=group)
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-4) for name, model in models.items()}

    def step(engine: str, *, synced: bool = True) -> None:
        model = models[engine]
        optimizers[engine].zero_grad(set_to_none=False)
        if synced:
            model(x).square().mean().backward()
        else:
            with model.no_sync():
                model(x).square().mean().backward()
        optimizers[engine].step()

    found: dict[str, list[float]] = {"compute": [], **{name: [] for name in groups}}
    for number in range(rounds + 2):
        for engine in groups:
            unsynced = timed(partial(step, engine, synced=False), 1)
            synced = timed(partial(step, engine), 1)
            if number >= 2:  # the first two rounds are the warm-up
                found["compute"].append(unsynced)
                found[engine].append(synced)
    medians = {name: typical(times) * 1e3 for name, times in found.items()}
    beyond = {name: medians[name] - medians["compute"] for name in groups}
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in models["gloo"].parameters())
        print(f"{build.__name__}, {count / 1e6:.1f} M parameters: computing only {medians['compute']:.1f} ms per step")
        for name in groups:
            print(f"  {name:9} {medians[name]:7.1f} ms per step, {beyond[name]:6.1f} ms beyond computing")
        print(f"  gradwire needs {beyond['gradwire'] / beyond['gloo']:.0%} of Gloo's time beyond computing")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", choices=("mlp", "gpt", "both", "none"), default="both", help="models to train (default: both)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each engine (default: 15)")
    parser.add_argument("--least", action="store_true", help="print minima instead of medians, for a busy machine")
    arguments = parser.parse_args()
    global typical
    typical = min if arguments.least else statistics.median
    torch.set_num_threads(1)
    dist.init_process_group("gradwire")
    groups = {"gradwire": dist.new_group(), "gloo": dist.new_group(backend="gloo")}
    if arguments.model in ("both", "none"):
        latencies(groups, max(3, arguments.rounds // 3))
    for build in (mlp, gpt):
        if arguments.model in (build.__name__, "both"):
            steps(groups, build, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
