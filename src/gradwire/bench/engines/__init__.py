"""Call the engines as their users call them. Each module imports its library only when an engine is opened.

base            the interface: Engine, Call, Unsupported
gradwire        gradwire, through its public API only, because the install may have another version
gloo            Gloo, through torch.distributed
mpi             any MPI, through mpi4py
"""

from __future__ import annotations

from typing import Any

from gradwire.bench.engines.base import Engine


def open_engine(name: str, options: dict[str, Any]) -> Engine:
    """Open an engine in this rank, and connect it to its other ranks."""
    if name == "gradwire":
        from gradwire.bench.engines.gradwire import Gradwire

        return Gradwire(options)
    if name == "gloo":
        from gradwire.bench.engines.gloo import Gloo

        return Gloo(options)
    from gradwire.bench.engines.mpi import Mpi

    return Mpi(options)
