"""Settings of malloc that keep the memory a training step frees for the next step.

Left to itself glibc gives large blocks back to the system, which clears them page by page when they are taken again:
with gradients of 100 MB that can be a third of a step. All ranks of a host together keep an eighth of its memory at
most. Who has told malloc anything is not overruled.

What is kept must be found again. Tensors are aligned, and before glibc 2.39 the fragments that alignment leaves
beside a block went to a cache of small pieces: other allocations used them, and the hole was too small for the next
block of that size. That cache can be turned off only as a process starts. In processes that run already it is emptied
when a large block is about to be freed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from gradwire.host import machine, native_core
from gradwire.topology import Topology

_MOST = 4 << 30  # bytes that one process keeps
_LARGEST_OPTION = (1 << 31) - 1  # mallopt takes an int
_MERGES_SLIVERS = (2, 39)  # glibc
_TUNABLES, _NO_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
_LARGE = 32 << 10  # bytes of a block whose hole matters
_FRAGMENT, _PIECE = 120, 1032  # bytes: the largest that alignment cuts off, the largest in the cache
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>: who sets one turns off glibc's adjustment of the other


def variables(environ: Mapping[str, str], ranks: int) -> dict[str, str]:
    """For processes to be started: what tells malloc to keep memory, where so many share this machine."""
    kept = _kept(environ, ranks)
    told = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(kept)) if kept else {}
    if kept and _TUNABLES not in environ and _leaves_fragments():
        told[_TUNABLES] = _NO_CACHE
    return told


_flushes_tcache = False  # whether this process, once it keeps memory, has fragments cached that must be joined


def keep(topology: Topology, rank: int) -> None:
    """From now on, in this process, which is that rank; again is harmless."""
    global _flushes_tcache
    _flushes_tcache = native_core.available() and _leaves_fragments() and _NO_CACHE not in os.environ.get(_TUNABLES, "")
    neighbours = topology.hosts[topology.host_of(rank)]
    kept = min(_kept(os.environ, len(neighbours)), _LARGEST_OPTION)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; others have none, or one that does nothing
    if kept and mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, kept)
        mallopt(_M_MMAP_THRESHOLD, kept)


def about_to_free(nbytes: int) -> None:
    """An aligned block of so many bytes, in this thread: its hole should be as large as it was."""
    if nbytes >= _LARGE and _flushes_tcache:
        native_core.native.flush_tcache(_FRAGMENT)


def between_passes() -> None:
    """A forward or a backward pass is over: no piece of memory that it left in the cache should part larger ones."""
    if _flushes_tcache:
        native_core.native.flush_tcache(_PIECE)


def _kept(environ: Mapping[str, str], ranks: int) -> int:
    tunables = environ.get(_TUNABLES, "").replace(_NO_CACHE, "")  # which says nothing of what is kept
    if any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in tunables:
        return 0
    return min(_MOST, machine.memory() // (8 * ranks))


def _leaves_fragments() -> bool:
    return () < _glibc() < _MERGES_SLIVERS


def _glibc() -> tuple[int, ...]:
    """Its version; nothing if the C library is another one."""
    try:
        _, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition("glibc ")
        return tuple(map(int, version.split("."))) if version else ()
    except (ValueError, OSError):
        return ()
