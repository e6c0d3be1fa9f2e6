"""What becomes of the memory that a training step frees: it is kept for the next one.

Left to itself glibc gives large blocks back to the system, which clears them page by page when they are taken again:
with gradients of 100 MB that can be a third of a step. All ranks of a host together keep an eighth of its memory at
most. Who has told malloc anything is not overruled.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from gradwire import machine
from gradwire.topology import Topology

_MOST = 4 << 30  # bytes that one process keeps
_LARGEST_OPTION = (1 << 31) - 1  # mallopt takes an int
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>: who sets one turns off glibc's adjustment of the other


def variables(environ: Mapping[str, str], ranks: int) -> dict[str, str]:
    """For processes to be started: what tells malloc to keep memory, where so many share this machine."""
    kept = _kept(environ, ranks)
    return dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(kept)) if kept else {}


def keep(topology: Topology, rank: int) -> None:
    """From now on, in this process, which is that rank; again is harmless."""
    neighbours = topology.hosts[topology.host_of(rank)]
    kept = min(_kept(os.environ, len(neighbours)), _LARGEST_OPTION)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; others have none, or one that does nothing
    if kept and mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, kept)
        mallopt(_M_MMAP_THRESHOLD, kept)


def _kept(environ: Mapping[str, str], ranks: int) -> int:
    if any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return 0
    return min(_MOST, machine.memory() // (8 * ranks))
