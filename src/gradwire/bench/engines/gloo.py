"""Run Gloo, torch's engine for CPU tensors, through torch.distributed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gradwire.bench.cases import ROOT, Case
from gradwire.bench.engines.base import Array, Call, Unsupported

_DTYPES = {"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"}
_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}


class Gloo:
    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self._torch: Any = torch
        self._dist: Any = torch.distributed
        self.about = {"version": f"torch {torch.__version__}"}
        self.rank, self.size = options["rank"], options["size"]
        self._dist.init_process_group("gloo", f"file://{options['store']}", rank=self.rank, world_size=self.size)

    def check(self, case: Case) -> None:
        if case.dtype not in _DTYPES:
            raise Unsupported(f"Gloo does not support {case.dtype}")
        if case.kind.reduces and case.op not in _OPS:
            raise Unsupported(f"Gloo does not support {case.op}")

    def array(self, count: int, dtype: np.dtype[Any]) -> Array:
        return np.empty(count, dtype)

    def prepare(self, case: Case, x: Array, out: Array) -> Call:
        dist, root = self._dist, self.rank == ROOT
        source, target = self._tensor(x), self._tensor(out)
        op = getattr(dist.ReduceOp, _OPS[case.op]) if case.kind.reduces else None
        match case.collective:
            case "all_reduce":
                return Call(partial(dist.all_reduce, source, op), x)
            case "broadcast":
                return Call(partial(dist.broadcast, source, ROOT), x)
            case "reduce":
                return Call(partial(dist.reduce, source, ROOT, op), x)
            case "all_gather":
                return Call(partial(dist.all_gather_into_tensor, target, source), out)
            case "reduce_scatter":
                return Call(partial(dist.reduce_scatter_tensor, target, source, op), out)
            case "gather":
                return Call(partial(dist.gather, source, list(target.split(case.count)) if root else None, ROOT), out)
            case "scatter":
                return Call(partial(dist.scatter, target, list(source.split(case.count)) if root else None, ROOT), out)
            case "all_to_all":
                return Call(partial(dist.all_to_all_single, target, source), out)
            case "sendrecv":
                return Call(partial(self._sendrecv, source, target), out)
        return Call(dist.barrier)

    def _sendrecv(self, source: Any, target: Any) -> None:
        sending = self._dist.isend(source, (self.rank + 1) % self.size)
        self._dist.recv(target, (self.rank - 1) % self.size)
        sending.wait()

    def _tensor(self, x: Array) -> Any:
        if x.dtype.name == "bfloat16":  # torch.from_numpy does not accept bfloat16 arrays
            return self._torch.from_numpy(x.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(x)

    def close(self) -> None:
        self._dist.destroy_process_group()
