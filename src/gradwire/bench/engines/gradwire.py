"""Run gradwire through its public API only, because the install may have another version than this file."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gradwire.bench.cases import ROOT, Case
from gradwire.bench.engines.base import Array, Call, Unsupported


class Gradwire:
    def __init__(self, options: dict[str, Any]) -> None:
        import gradwire as gw

        transport = {"transport": options["transport"]} if options["transport"] else {}
        self._group = gw.init(**transport)
        self.rank, self.size = self._group.rank, self._group.size
        capabilities = self._group.capabilities
        self.about = {"version": gw.__version__, "transport": capabilities.transport, "native": capabilities.native}
        self._algorithm = options["algorithm"]
        self._registered = options["registered"]

    def check(self, case: Case) -> None:
        if not hasattr(self._group, case.collective):
            raise Unsupported(f"this version of gradwire has no {case.collective}")
        if self._algorithm == "auto":
            return
        table = self._group.capabilities.algorithms
        known = table.get(case.collective, ())
        if case.collective in table and self._algorithm not in known:
            raise Unsupported(f"{case.collective} has no algorithm {self._algorithm!r}: choose from {', '.join(known)}")

    def array(self, count: int, dtype: np.dtype[Any]) -> Array:
        return self._group.empty(count, dtype) if self._registered else np.empty(count, dtype)

    def prepare(self, case: Case, x: Array, out: Array) -> Call:
        # Arguments with their default values are left out, as in a user's program.
        options: dict[str, Any] = {"algorithm": self._algorithm} if self._algorithm != "auto" else {}
        if case.kind.reduces and case.op != "sum":
            options["op"] = case.op
        group, root = self._group, self.rank == ROOT
        match case.collective:
            case "reduce":
                return Call(partial(group.reduce, x, out=out if root else None, **options))
            case "all_gather" | "reduce_scatter":
                return Call(partial(getattr(group, case.collective), x, out=out, **options))
            case "scatter":
                return Call(partial(group.scatter, x if root else None, **options))
            case "sendrecv":
                after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
                return Call(partial(group.sendrecv, x, out, after, before), out)
            case "barrier":
                return Call(partial(group.barrier, **options))
        return Call(partial(getattr(group, case.collective), x, **options))

    def close(self) -> None:
        self._group.close()
