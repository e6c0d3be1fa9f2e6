"""What buckets cost beyond the bytes they move: `GradientSync` beside one `all_reduce` of the same registered bytes.

    gradwire run -n 2 benchmarks/gradients.py                       # 100 MB of float32 in 10 tensors
    gradwire run -n 2 benchmarks/gradients.py --megabytes 20 --tensors 100 --bucket-mib 4

The cases take turns, and each time is that of the slowest rank; gradients are rewritten before each. The ratio is the
median of each round's ratio to the all-reduce: times wander, ratios less so. In the last three rows every gradient is
computed by a matrix product before it is ready: what an overlap hides is what these rows differ by.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import gradwire as gw
from gradwire.training import finite

Case = tuple[Callable[[], Any], list[Any]]  # what is timed, and the arrays that are rewritten before


def cases(group: gw.Group, options: argparse.Namespace) -> dict[str, Case]:
    count = options.megabytes * 1_000_000 // 4 // options.tensors
    like = {f"w{number}": np.zeros(count, np.float32) for number in range(options.tensors)}
    whole = group.empty(count * options.tensors)
    factor = np.random.default_rng(0).normal(size=(options.matrix, options.matrix)).astype(np.float32)
    rounds = max(1, options.products // options.tensors)

    def compute() -> None:
        for _ in range(rounds):
            factor @ factor

    def backward(sync: gw.GradientSync, *, beside: bool, computes: bool) -> Callable[[], None]:
        def run() -> None:
            for name in reversed(like):
                if computes:
                    compute()
                sync.ready(name, beside=beside)
            sync.finish()

        return run

    def compute_only() -> None:
        for _ in like:
            compute()

    def compute_first() -> None:
        compute_only()
        group.all_reduce(whole, op="mean")

    size = options.bucket_mib << 20
    unchecked = gw.GradientSync(group, like, bucket_bytes=size, check_finite=False)
    checked = gw.GradientSync(group, like, bucket_bytes=size)
    mine, theirs = list(unchecked.gradients.values()), list(checked.gradients.values())
    return {
        "all_reduce": (lambda: group.all_reduce(whole, op="mean"), [whole]),
        "sync, unchecked": (backward(unchecked, beside=False, computes=False), mine),
        "sync": (backward(checked, beside=False, computes=False), theirs),
        "sync on the progress thread": (backward(checked, beside=True, computes=False), theirs),
        "finite check alone": (lambda: [finite.all_finite(one) for one in theirs], theirs),
        "norm alone": (lambda: checked.clip(1e9), theirs),
        "compute": (compute_only, []),
        "compute, then all_reduce": (compute_first, [whole]),
        "compute with sync beside it, unchecked": (backward(unchecked, beside=True, computes=True), mine),
        "compute with sync beside it": (backward(checked, beside=True, computes=True), theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="GradientSync beside one all-reduce of the same bytes.")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tensors", type=int, default=10)
    parser.add_argument("--bucket-mib", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--matrix", type=int, default=400, help="rows of the matrices that are multiplied")
    parser.add_argument("--products", type=int, default=100, help="how many such products a backward takes")
    options = parser.parse_args()
    with gw.init() as group:
        turns = cases(group, options)
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(options.rounds + 1):
            for name, (run, arrays) in turns.items():
                for array in arrays:
                    array.fill(number + group.rank)
                group.barrier()
                began = time.perf_counter()
                run()
                slowest = group.all_reduce(time.perf_counter() - began, op="max")
                if number:  # the first is for warming up
                    seconds[name].append(slowest)
        if group.rank == 0:
            for name, times in seconds.items():
                ratio = np.median(np.divide(times, seconds["all_reduce"]))
                print(
                    f"{name:40} median {1e3 * np.median(times):8.2f} ms   least {1e3 * min(times):8.2f}   × {ratio:.2f}"
                )


if __name__ == "__main__":
    main()
