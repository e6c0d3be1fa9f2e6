"""Arenas: memory files that this process and others map."""

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

ARENA_BYTES = 64 << 30  # of address space; memory is taken when it is first written
RESERVED = 64 << 10  # at the beginning of each, for the core's directory
PAGE = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # older Pythons do not name it


class Arena:
    """Memory of one rank, as it is mapped here: `nbytes` from `address`."""

    def __init__(self, descriptor: int) -> None:
        self.nbytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.nbytes, flags=mmap.MAP_SHARED | _NO_RESERVE)
        self._anchor = ctypes.c_char.from_buffer(self._map)  # keeps the map where it is
        self.address = ctypes.addressof(self._anchor)


class OwnArena(Arena):
    """This rank's arena: regions are carved from it and given back, by any thread."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, ARENA_BYTES)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        super().__init__(self.descriptor)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._free = [(RESERVED, self.nbytes - RESERVED)]  # (offset, bytes), by offset, no two of them neighbours
        self._arrays: dict[int, int] = {}  # regions that users' arrays lie in: offset and bytes
        self._detached = False
        self._retired: list[tuple[int, int, Callable[[], bool]]] = []
        self._freed: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int, *, for_array: bool = False) -> int:
        """The offset of a fresh region: zeroed, page-aligned. `MemoryError` if there is no room for it."""
        nbytes = _pages(nbytes)
        if os.getpid() != self._owner:
            raise MemoryError("this process was forked from a rank: the arena belongs to the parent")
        try:
            with self._lock:
                if self._detached and for_array:
                    raise MemoryError("the arena was left behind: nobody else may see new arrays")
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
        """Return a region; its memory goes back to the system at once.

        The garbage collector calls this at any moment, also in the middle of `carve` on the same thread: so it never
        waits for the lock. Who holds it takes the region back.
        """
        if os.getpid() != self._owner:
            return
        nbytes = _pages(nbytes)
        if self._detached:
            native_core.native.map_shared(self.address, self.descriptor, offset, nbytes)
        try:
            self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)
        except OSError:  # some sandboxes cannot
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
        """With the lock held: join what was returned with its free neighbours."""
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
        """Give a region back as soon as its use has ended, which is asked from time to time."""
        with self._lock:
            self._retired.append((offset, nbytes, ended))
        self.sweep()

    @property
    def retired(self) -> int:
        """How many blocks wait until nobody reads them any more."""
        return len(self._retired)

    def sweep(self) -> None:
        """Give back what was retired and is no longer in use."""
        with self._lock:
            used = [entry for entry in self._retired if not entry[2]()]
            unused = [entry for entry in self._retired if entry not in used]
            self._retired = used
        for offset, nbytes, _ in unused:
            self.free(offset, nbytes)

    def detach_arrays(self) -> None:
        """Move all arrays out of the reach of other processes, at their addresses; idempotent, by any thread.

        Others are warned and see zeros there, and what they write reaches nobody. It takes the time of a copy, and the
        shared memory goes back to the system piece by piece meanwhile. What else is in the arena stays shared.
        """
        with self._lock:
            if self._detached or native_core.native is None or os.getpid() != self._owner:
                return
            self._detached = True  # first: a second time would bring back what others have written
            self._merge_freed()
            if not native_core.native.map_private(self.address, self.descriptor, _joined(self._arrays)):
                log.warning("no memory to copy shared arrays to: a rank that was given up may still write into them")

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where these bytes lie in the arena, if they do."""
        offset = address - self.address
        return offset if offset >= RESERVED and nbytes >= 0 and offset + nbytes <= self.nbytes else None

    def array(self, nbytes: int) -> Array:
        """Bytes of a region of their own, which is given back when the last view of them is gone."""
        region = _Region(self, self.allocate(nbytes, for_array=True), nbytes)
        return np.asarray(region)


class _Region:
    """What arrays in an arena are views of. Views of views refer to it too: NumPy shortens the way to the owner."""

    def __init__(self, arena: OwnArena, offset: int, nbytes: int) -> None:
        data = (arena.address + offset, False)
        self.__array_interface__ = {"version": 3, "data": data, "shape": (nbytes,), "typestr": "|u1"}
        # Not at the end of the process, when threads may still use it and the system takes it back anyway.
        weakref.finalize(self, arena.free, offset, nbytes).atexit = False


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE


def _joined(regions: dict[int, int]) -> list[tuple[int, int]]:
    """Neighbouring regions in one piece: each piece is a mapping, and a process may have 65,530 of them."""
    joined: list[tuple[int, int]] = []
    for offset, nbytes in sorted(regions.items()):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = joined[-1][0], joined[-1][1] + nbytes
        else:
            joined.append((offset, nbytes))
    return joined
