"""Measure the cost of buckets: compare `GradientSync` with one `all_reduce` of the same registered bytes.

    gradwire run -n 2 benchmarks/gradients.py                       # 100 MB of float32 in 10 tensors
    gradwire run -n 2 benchmarks/gradients.py --megabytes 20 --tensors 100 --bucket-mib 4

The cases take turns. Each time is that of the slowest rank, and gradients are rewritten before each measurement. The
ratio is the median over the rounds of a case's time divided by the all-reduce's, because times drift more than ratios.
In the last three rows every gradient is computed by matrix products before it is ready. The differences between these
rows show how much communication the overlap hides.
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

Case = tuple[Callable[[], Any], list[Any]]  # the timed function, and the arrays that are rewritten before it


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
    unchecked_arrays, checked_arrays = list(unchecked.gradients.values()), list(checked.gradients.values())
    return {
        "all_reduce": (lambda: group.all_reduce(whole, op="mean"), [whole]),
        "sync, unchecked": (backward(unchecked, beside=False, computes=False), unchecked_arrays),
        "sync": (backward(checked, beside=False, computes=False), checked_arrays),
        "sync on the progress thread": (backward(checked, beside=True, computes=False), checked_arrays),
        "finite check only": (lambda: [finite.all_finite(one) for one in checked_arrays], checked_arrays),
        "norm only": (lambda: checked.clip(1e9), checked_arrays),
        "compute": (compute_only, []),
        "compute, then all_reduce": (compute_first, [whole]),
        "compute, overlapped sync, unchecked": (backward(unchecked, beside=True, computes=True), unchecked_arrays),
        "compute, overlapped sync": (backward(checked, beside=True, computes=True), checked_arrays),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare GradientSync with one all-reduce of the same bytes.")
    parser.add_argument("--megabytes", type=int, default=100, help="size of all gradients (default: 100)")
    parser.add_argument("--tensors", type=int, default=10, help="number of gradients (default: 10)")
    parser.add_argument("--bucket-mib", type=int, default=25, help="size of a bucket in MiB (default: 25)")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each case (default: 15)")
    parser.add_argument("--matrix", type=int, default=400, help="rows of the multiplied matrices (default: 400)")
    parser.add_argument("--products", type=int, default=100, help="matrix products per backward (default: 100)")
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
                if number:  # the first round is the warm-up
                    seconds[name].append(slowest)
        if group.rank == 0:
            for name, times in seconds.items():
                ratio = np.median(np.divide(times, seconds["all_reduce"]))
                print(
                    f"{name:40} median {1e3 * np.median(times):8.2f} ms   least {1e3 * min(times):8.2f}   × {ratio:.2f}"
                )


if __name__ == "__main__":
    main()
