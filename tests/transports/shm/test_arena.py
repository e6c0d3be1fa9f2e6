"""Arenas: regions are zeroed and do not overlap, freed regions are merged, and their memory goes back to the system."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import itertools
import mmap
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from gradwire.host import native_core
from gradwire.transports.shm.arena import ARENA_BYTES, PAGE, RESERVED, Arena, OwnArena

MIB = 1 << 20


@pytest.fixture(name="arena")
def arena_fixture() -> OwnArena:
    return OwnArena()


def write(arena: Arena, offset: int, data: bytes) -> None:
    ctypes.memmove(arena.address + offset, data, len(data))


def read(arena: Arena, offset: int, nbytes: int) -> bytes:
    return ctypes.string_at(arena.address + offset, nbytes)


def used(arena: OwnArena) -> int:
    """Return the bytes of memory that the arena uses."""
    return os.fstat(arena.descriptor).st_blocks * 512


def test_own_arena_new_is_large_and_uses_no_memory(arena: OwnArena) -> None:
    assert arena.nbytes == ARENA_BYTES
    assert used(arena) == 0
    assert arena.address % PAGE == 0


def test_allocate_regions_are_page_aligned_and_do_not_overlap_the_directory(arena: OwnArena) -> None:
    sizes = [1, PAGE, PAGE + 1, 0, 3 * PAGE]
    regions = sorted((arena.allocate(size), size) for size in sizes)
    assert all(offset % PAGE == 0 for offset, _ in regions)
    assert regions[0][0] == RESERVED
    assert all(a + max(size, 1) <= b for (a, size), (b, _) in itertools.pairwise(regions))


def test_allocate_freed_region_is_zeroed_and_used_no_memory_meanwhile(arena: OwnArena) -> None:
    offset = arena.allocate(MIB)
    write(arena, offset, b"\xff" * MIB)
    assert used(arena) == MIB
    arena.free(offset, MIB)
    assert used(arena) == 0
    assert arena.allocate(MIB) == offset
    assert read(arena, offset, MIB) == bytes(MIB)


def test_free_without_madvise_still_zeroes_the_region(arena: OwnArena, monkeypatch: pytest.MonkeyPatch) -> None:
    offset = arena.allocate(PAGE)
    write(arena, offset, b"\xff" * PAGE)
    monkeypatch.setattr(mmap, "MADV_REMOVE", 12345)  # invalid on every system
    arena.free(offset, PAGE)
    assert arena.allocate(PAGE) == offset
    assert read(arena, offset, PAGE) == bytes(PAGE)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_free_merges_neighbouring_regions(arena: OwnArena, order: tuple[int, ...]) -> None:
    regions = [arena.allocate(2 * PAGE) for _ in range(3)]
    kept = arena.allocate(PAGE)
    for index in order:
        arena.free(regions[index], 2 * PAGE)
    assert arena.allocate(6 * PAGE) == regions[0]
    arena.free(kept, PAGE)
    arena.free(regions[0], 6 * PAGE)
    everything = ARENA_BYTES - RESERVED
    assert arena.allocate(everything) == RESERVED, "the free regions must be merged into one"


def test_allocate_without_room_raises_memory_error(arena: OwnArena) -> None:
    with pytest.raises(MemoryError, match=str(ARENA_BYTES)):
        arena.allocate(ARENA_BYTES)
    assert arena.allocate(PAGE) == RESERVED


def test_offset_of_address_inside_and_outside_the_arena(arena: OwnArena) -> None:
    offset = arena.allocate(PAGE)
    assert arena.offset_of(arena.address + offset, PAGE) == offset
    assert arena.offset_of(arena.address + offset + 8, 8) == offset + 8
    assert arena.offset_of(arena.address + ARENA_BYTES - 8, 8) == ARENA_BYTES - 8
    assert arena.offset_of(arena.address + ARENA_BYTES - 8, 9) is None
    assert arena.offset_of(arena.address - 8, 8) is None
    assert arena.offset_of(arena.address, 8) is None, "the directory must not count as memory of arrays"
    outside = np.zeros(8)
    assert arena.offset_of(outside.ctypes.data, 8) is None


def test_own_arena_size_cannot_be_changed(arena: OwnArena) -> None:
    for size in (PAGE, ARENA_BYTES + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_arena_mapped_twice_shows_the_same_bytes(arena: OwnArena) -> None:
    other = Arena(arena.descriptor)
    offset = arena.allocate(PAGE)
    write(arena, offset, b"hello")
    assert read(other, offset, 5) == b"hello"
    write(other, offset, b"world")
    assert read(arena, offset, 5) == b"world"
    assert other.nbytes == arena.nbytes


def test_array_without_views_frees_its_memory(arena: OwnArena) -> None:
    array = arena.array(MIB)
    assert arena.offset_of(array.ctypes.data, array.nbytes) == RESERVED
    view = array.view(np.float32)[7::3].reshape(-1, 1)
    array[:] = 255
    del array
    gc.collect()
    assert used(arena) == MIB
    assert np.isnan(view).all()
    del view
    gc.collect()
    assert used(arena) == 0
    assert arena.allocate(MIB) == RESERVED


def test_array_outlives_its_arena_object() -> None:
    arena = OwnArena()
    array = arena.array(PAGE)
    del arena
    gc.collect()
    array[:] = 7
    assert array.sum() == 7 * PAGE


def test_free_while_this_thread_holds_the_lock_does_not_deadlock(arena: OwnArena) -> None:
    offset, retired = arena.allocate(PAGE), arena.allocate(PAGE)

    def ended() -> bool:  # called on this thread with the arena's lock held
        arena.free(offset, PAGE)
        return True

    arena.retire(retired, PAGE, ended)
    assert arena.allocate(2 * PAGE) == offset


def test_arena_in_forked_child_allocates_and_frees_nothing(arena: OwnArena) -> None:
    array = arena.array(PAGE)
    array[:] = 5
    child = os.fork()
    if child == 0:
        del array
        gc.collect()
        try:
            arena.allocate(PAGE)
        except MemoryError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert array.sum() == 5 * PAGE


def test_allocate_and_free_by_several_threads_give_separate_regions(arena: OwnArena) -> None:
    troubles: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        held: list[tuple[int, int]] = []
        for _ in range(400):
            if held and chance.random() < 0.5:
                offset, nbytes = held.pop(chance.randrange(len(held)))
                if read(arena, offset, 1) != bytes([seed]):
                    troubles.append(f"somebody else wrote at {offset}")
                arena.free(offset, nbytes)
            else:
                nbytes = chance.randrange(1, 8 * PAGE)
                offset = arena.allocate(nbytes)
                if read(arena, offset, nbytes) != bytes(nbytes):
                    troubles.append(f"not zeroed at {offset}")
                write(arena, offset, bytes([seed]))
                held.append((offset, nbytes))
        for offset, nbytes in held:
            arena.free(offset, nbytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not troubles
    assert used(arena) == 0
    assert arena.allocate(ARENA_BYTES - RESERVED) == RESERVED


# -- detached memory ---------------------------------------------------------------------------------------------------

needs_core = pytest.mark.skipif(native_core.native is None, reason="only the core maps memory anew")


@needs_core
def test_detach_arrays_keeps_arrays_at_their_addresses_with_their_values(arena: OwnArena) -> None:
    peer = Arena(arena.descriptor)
    arrays = [arena.array(3 * PAGE) for _ in range(3)]
    staging = arena.allocate(PAGE)
    places = [array.ctypes.data for array in arrays]
    for number, array in enumerate(arrays):
        array[:] = number + 1
    arena.detach_arrays()
    for number, (array, place) in enumerate(zip(arrays, places, strict=True)):
        assert array.ctypes.data == place
        assert (array == number + 1).all()
    for array in arrays:
        write(peer, array.ctypes.data - arena.address, b"\xee" * 3 * PAGE)  # a rank that was frozen continues
    assert [set(array.tolist()) for array in arrays] == [{1}, {2}, {3}]
    arrays[0][:] = 9
    assert read(peer, places[0] - arena.address, 1) == b"\xee", "the peer must not see later changes"
    write(arena, staging, b"still")
    assert read(peer, staging, 5) == b"still", "memory outside of arrays must stay shared"


def unshared() -> int:
    """Return the bytes of private memory of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


@needs_core
def test_detach_arrays_does_not_use_the_memory_twice(arena: OwnArena) -> None:
    size = 256 * MIB
    array = arena.array(size)
    array[:] = 7
    before, held, over = unshared(), [used(arena)], threading.Event()

    def measure() -> None:
        while not over.is_set():
            mine = unshared()  # first, so that memory that moves between the two reads is not counted twice
            held.append(mine - before + used(arena))

    measuring = threading.Thread(target=measure)
    measuring.start()
    arena.detach_arrays()
    over.set()
    measuring.join()
    assert max(held) < size + 64 * MIB
    assert used(arena) <= PAGE
    assert (array == 7).all()


@needs_core
def test_detach_arrays_twice_changes_nothing(arena: OwnArena) -> None:
    peer = Arena(arena.descriptor)
    array = arena.array(PAGE)
    array[:] = 5
    arena.detach_arrays()
    write(peer, array.ctypes.data - arena.address, b"\xee" * PAGE)
    threads = [threading.Thread(target=arena.detach_arrays) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(array.tolist()) == {5}


@needs_core
def test_detach_arrays_refuses_new_arrays_and_frees_the_memory_of_old_ones(arena: OwnArena) -> None:
    arrays = [arena.array(MIB) for _ in range(3)]
    for array in arrays:
        array[:] = 1
    arena.detach_arrays()
    with pytest.raises(MemoryError, match="were detached"):
        arena.array(PAGE)
    del arrays[1], array
    gc.collect()
    assert set(arrays[0].tolist()) == set(arrays[1].tolist()) == {1}
    assert arena.allocate(MIB) == RESERVED + MIB
    assert read(arena, RESERVED + MIB, MIB) == bytes(MIB)


@needs_core
def test_detach_arrays_in_forked_child_leaves_the_parents_memory_shared(arena: OwnArena) -> None:
    array = arena.array(PAGE)
    child = os.fork()
    if child == 0:
        arena.detach_arrays()
        array[:] = 3
        os._exit(0)
    os.waitpid(child, 0)
    assert set(array.tolist()) == {3}
