"""Show the main calls on one page. Run it with `gradwire run -n 4 examples/hello.py`."""

from __future__ import annotations

import numpy as np

import gradwire as gw

with gw.init() as group:
    rank, size = group.rank, group.size

    x = np.full(3, rank, np.float32)
    group.all_reduce(x)  # in place: x is now the sum over all ranks, with the same bits on every rank
    print(f"all_reduce: {x}, and of a number: {group.all_reduce(rank, op='max')}", flush=True)

    y = np.arange(3.0) if rank == 0 else np.empty(3)
    print(f"broadcast: {group.broadcast(y, root=0)}", flush=True)

    stream = group.stream()  # its calls run one after the other, while this thread does something else
    works = [stream.all_reduce(np.full(2, 10.0**i)) for i in range(3)]
    stream.synchronize()
    print(f"stream: {[float(work.result[0]) for work in works]}", flush=True)

    members = range(rank % 2, size, 2)  # the even ranks form one group, the odd ranks another
    with group.subgroup(members) as half:
        print(f"subgroup {list(members)}: rank {half.rank} of {half.size}, sum {half.all_reduce(rank)}", flush=True)
    print(f"all ranks: {group.all_gather_values({'rank': rank, 'half': list(members)})}", flush=True)
