"""Configures malloc so that memory freed by one training step stays in the process for the next step.

By default glibc returns large blocks to the system. The system clears every page when it is allocated again: with
gradients of 100 MB this can take a third of a step. All ranks of a host together keep at most an eighth of its memory.
If the user has set any malloc option, these settings are not applied.

A kept block must also be usable again. Tensors are aligned, and alignment leaves small fragments beside a block. Before
glibc 2.39 these fragments went to malloc's per-thread cache (tcache), where other allocations used them. The gap was
then too small for the next block of the same size. The cache can be turned off only when a process starts. In a running
process it is emptied before a large block is freed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from gradwire.host import machine, native_core
from gradwire.topology import Topology

_MAX_KEPT = 4 << 30  # bytes that one process keeps
_MAX_OPTION = (1 << 31) - 1  # mallopt takes an int
_FRAGMENTS_FIXED = (2, 39)  # the first glibc that merges the fragments with their neighbours
_TUNABLES, _NO_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
_LARGE_BLOCK = 32 << 10  # bytes; before a block of at least this size is freed, the cache is emptied
_MAX_FRAGMENT, _MAX_CACHED = 120, 1032  # bytes: the largest fragment that alignment leaves, the largest cached chunk
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>; setting one stops glibc from adjusting the other


def variables(environ: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return the environment variables that make malloc keep memory, for the `ranks` processes started on this host."""
    kept = _kept_bytes(environ, ranks)
    added = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(kept)) if kept else {}
    if kept and _TUNABLES not in environ and _leaves_fragments():
        added[_TUNABLES] = _NO_CACHE
    return added


_flushes_tcache = False  # whether this process must empty malloc's cache before it frees large blocks


def keep(topology: Topology, rank: int) -> None:
    """Make malloc keep memory in this process, which has this rank. Further calls are harmless."""
    global _flushes_tcache
    _flushes_tcache = native_core.available() and _leaves_fragments() and _NO_CACHE not in os.environ.get(_TUNABLES, "")
    ranks_of_host = topology.hosts[topology.host_of(rank)]
    kept = min(_kept_bytes(os.environ, len(ranks_of_host)), _MAX_OPTION)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, or one that does nothing
    if kept and mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, kept)
        mallopt(_M_MMAP_THRESHOLD, kept)


def about_to_free(nbytes: int) -> None:
    """Prepare the current thread to free an aligned block of `nbytes`.

    The fragments beside the block are taken out of the cache, so that they merge with the freed block.
    """
    if nbytes >= _LARGE_BLOCK and _flushes_tcache:
        native_core.native.flush_tcache(_MAX_FRAGMENT)


def between_passes() -> None:
    """Empty malloc's cache after a forward or backward pass, so that no cached chunk separates free larger ones."""
    if _flushes_tcache:
        native_core.native.flush_tcache(_MAX_CACHED)


def _kept_bytes(environ: Mapping[str, str], ranks: int) -> int:
    """Return how many bytes one process keeps; 0 if the user has set an option of malloc."""
    tunables = environ.get(_TUNABLES, "").replace(_NO_CACHE, "")  # gradwire sets this one itself
    if any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in tunables:
        return 0
    return min(_MAX_KEPT, machine.memory() // (8 * ranks))


def _leaves_fragments() -> bool:
    return () < _glibc_version() < _FRAGMENTS_FIXED


def _glibc_version() -> tuple[int, ...]:
    """Return the version of glibc; () if the C library is another one."""
    try:
        _, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition("glibc ")
        return tuple(map(int, version.split("."))) if version else ()
    except (ValueError, OSError):
        return ()
