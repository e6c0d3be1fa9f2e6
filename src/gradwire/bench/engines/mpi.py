"""Run any MPI through mpi4py's buffer calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gradwire.bench.cases import ROOT, Case
from gradwire.bench.engines.base import Array, Call, Unsupported

_LEVELS = ("single", "funneled", "serialized", "multiple")  # by number, which is the same in all MPIs
_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}


class Mpi:
    def __init__(self, options: dict[str, Any]) -> None:
        import mpi4py

        mpi4py.rc.thread_level = options["mpi_threads"]
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm: Any = MPI.COMM_WORLD
        library = str(MPI.Get_library_version()).strip("\0\n").splitlines()[0].partition(",")[0]
        self.about = {
            "version": " ".join(library.replace("Version:", "").split()),
            "threads": _LEVELS[MPI.Query_thread()],
        }
        self.rank, self.size = self._comm.rank, self._comm.size

    def check(self, case: Case) -> None:
        if not case.kind.reduces:
            return
        if case.op not in _OPS:
            raise Unsupported(f"MPI does not support {case.op}")
        if case.dtype in ("float16", "bfloat16", "bool"):
            raise Unsupported(f"MPI does not support {case.op} of {case.dtype}")

    def array(self, count: int, dtype: np.dtype[Any]) -> Array:
        return np.empty(count, dtype)

    def prepare(self, case: Case, x: Array, out: Array) -> Call:
        comm, root = self._comm, self.rank == ROOT
        source, target = _movable(x), _movable(out)
        op = getattr(self._mpi, _OPS[case.op]) if case.kind.reduces else None
        match case.collective:
            case "all_reduce":
                return Call(partial(comm.Allreduce, self._mpi.IN_PLACE, source, op), x)
            case "broadcast":
                return Call(partial(comm.Bcast, source, ROOT), x)
            case "reduce":
                return Call(partial(comm.Reduce, source, target if root else None, op, ROOT), out)
            case "all_gather":
                return Call(partial(comm.Allgather, source, target), out)
            case "reduce_scatter":
                return Call(partial(comm.Reduce_scatter_block, source, target, op), out)
            case "gather":
                return Call(partial(comm.Gather, source, target if root else None, ROOT), out)
            case "scatter":
                return Call(partial(comm.Scatter, source if root else None, target, ROOT), out)
            case "all_to_all":
                return Call(partial(comm.Alltoall, source, target), out)
            case "sendrecv":
                after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
                return Call(partial(comm.Sendrecv, source, after, 0, target, before, 0), out)
        return Call(comm.Barrier)

    def close(self) -> None:
        self._mpi.Finalize()


def _movable(x: Array) -> Array:
    """Return half-precision arrays as integers: mpi4py does not know half types, and moving data does not need them."""
    return x.view(np.uint16) if x.dtype.name in ("float16", "bfloat16") else x
