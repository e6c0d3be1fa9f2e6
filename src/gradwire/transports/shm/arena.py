"""Arenas: memory files that several processes map."""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from gradwire.arrays import Array
from gradwire.host import native_core

log = logging.getLogger("gradwire.transports")

ARENA_BYTES = 64 << 30  # of address space; pages use memory only after the first write
RESERVED = 64 << 10  # at the beginning of each arena, for the directory of the native core
PAGE = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # missing in older versions of Python


class Arena:
    """The memory of one rank, mapped into this process: `nbytes` from `address`."""

    def __init__(self, descriptor: int) -> None:
        self.nbytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.nbytes, flags=mmap.MAP_SHARED | _NO_RESERVE)
        self._anchor = ctypes.c_char.from_buffer(self._map)  # gives the address, and keeps the map from closing
        self.address = ctypes.addressof(self._anchor)


class OwnArena(Arena):
    """This rank's arena, from which any thread may allocate and free regions."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, ARENA_BYTES)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        super().__init__(self.descriptor)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._free = [(RESERVED, self.nbytes - RESERVED)]  # (offset, bytes), by offset; adjacent regions are merged
        self._arrays: dict[int, int] = {}  # regions of users' arrays: offset and bytes
        self._detached = False
        self._retired: list[tuple[int, int, Callable[[], bool]]] = []
        self._freed: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int, *, for_array: bool = False) -> int:
        """Allocate a zeroed, page-aligned region, and return its offset. Raise `MemoryError` if there is no room."""
        nbytes = _pages(nbytes)
        if os.getpid() != self._owner:
            raise MemoryError("this process was forked from a rank: the arena belongs to the parent")
        try:
            with self._lock:
                if self._detached and for_array:
                    raise MemoryError("the arrays of this arena were detached: new ones would be shared again")
                self._merge_freed()
                for index, (offset, room) in enumerate(self._free):
                    if room >= nbytes:
                        self._free[index : index + 1] = [(offset + nbytes, room - nbytes)] if room > nbytes else []
                        if for_array:
                            self._arrays[offset] = nbytes
                        return offset
        finally:
            self._merge_pending()
        raise MemoryError(f"no {nbytes} bytes left in the shared arena of {self.nbytes}")

    def free(self, offset: int, nbytes: int) -> None:
        """Free a region. Its memory goes back to the system at once.

        The garbage collector may call this at any moment, even in the middle of `allocate` on the same thread. So it
        never waits for the lock: if another thread holds the lock, that thread merges the region.
        """
        if os.getpid() != self._owner:
            return
        nbytes = _pages(nbytes)
        if self._detached:
            native_core.native.map_shared(self.address, self.descriptor, offset, nbytes)
        try:
            self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)
        except OSError:  # some sandboxes do not support it
            ctypes.memset(self.address + offset, 0, nbytes)
        self._freed.append((offset, nbytes))
        self._merge_pending()

    def _merge_pending(self) -> None:
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._merge_freed()
            finally:
                self._lock.release()

    def _merge_freed(self) -> None:
        """Merge freed regions with adjacent free regions. The caller holds the lock."""
        while self._freed:
            offset, nbytes = self._freed.popleft()
            self._arrays.pop(offset, None)
            index = bisect.bisect(self._free, (offset, nbytes))
            first, last = index, index
            if index and sum(self._free[index - 1]) == offset:
                first, offset, nbytes = index - 1, self._free[index - 1][0], self._free[index - 1][1] + nbytes
            if index < len(self._free) and self._free[index][0] == offset + nbytes:
                last, nbytes = index + 1, nbytes + self._free[index][1]
            self._free[first:last] = [(offset, nbytes)]

    def retire(self, offset: int, nbytes: int, ended: Callable[[], bool]) -> None:
        """Free a region as soon as `ended()` is true. It is checked now and at each `sweep`."""
        with self._lock:
            self._retired.append((offset, nbytes, ended))
        self.sweep()

    @property
    def retired(self) -> int:
        """The number of retired regions that are still in use."""
        return len(self._retired)

    def sweep(self) -> None:
        """Free the retired regions that are no longer in use."""
        with self._lock:
            used = [entry for entry in self._retired if not entry[2]()]
            unused = [entry for entry in self._retired if entry not in used]
            self._retired = used
        for offset, nbytes, _ in unused:
            self.free(offset, nbytes)

    def detach_arrays(self) -> None:
        """Make the memory of all arrays private, at the same addresses. Calling it again has no effect.

        The arena is marked as detached first, so that other processes do not trust what they read there: they see zeros
        in place of the arrays, and their writes do not reach this process. The arrays are copied piece by piece, and
        the shared memory of each piece goes back to the system. The rest of the arena stays shared.
        """
        with self._lock:
            if self._detached or native_core.native is None or os.getpid() != self._owner:
                return
            self._detached = True  # set first: a second run would copy what other processes have written since
            self._merge_freed()
            if not native_core.native.map_private(self.address, self.descriptor, _joined(self._arrays)):
                log.warning("not enough memory to copy shared arrays: a lost rank may still write into them")

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset of these bytes in the arena; None if they lie outside."""
        offset = address - self.address
        return offset if offset >= RESERVED and nbytes >= 0 and offset + nbytes <= self.nbytes else None

    def array(self, nbytes: int) -> Array:
        """Return an array of bytes in a new region. The region is freed with the last view of the array."""
        region = _Region(self, self.allocate(nbytes, for_array=True), nbytes)
        return np.asarray(region)


class _Region:
    """The owner of an array's memory in an arena. Views of views refer to it too, because NumPy collapses bases."""

    def __init__(self, arena: OwnArena, offset: int, nbytes: int) -> None:
        data = (arena.address + offset, False)
        self.__array_interface__ = {"version": 3, "data": data, "shape": (nbytes,), "typestr": "|u1"}
        # Not at the exit of the process: threads may still use the region, and the system frees it anyway.
        weakref.finalize(self, arena.free, offset, nbytes).atexit = False


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE


def _joined(regions: dict[int, int]) -> list[tuple[int, int]]:
    """Merge adjacent regions: each region becomes a mapping, and Linux allows 65,530 mappings in a process."""
    joined: list[tuple[int, int]] = []
    for offset, nbytes in sorted(regions.items()):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = joined[-1][0], joined[-1][1] + nbytes
        else:
            joined.append((offset, nbytes))
    return joined
