// Empties the small size classes of this thread's malloc cache (glibc: tcache), so that freed blocks are merged again.
//
// Before 2.39, glibc cuts fragments off both ends of an aligned block and caches them per thread. While they are
// cached, the hole that the block leaves is too small for the next block of its size, and the heap grows. Only `malloc`
// and `free` are called, so another allocator just serves a few requests.

#pragma once

#include <array>
#include <cstddef>
#include <cstdlib>

namespace gradwire {

inline void* allocate(std::size_t nbytes) {
    void* block = std::malloc(nbytes);
    asm volatile("" : "+r"(block));  // otherwise the compiler removes the allocation as unused
    return block;
}

// Flushes all size classes of up to `largest` bytes. Allocates as many blocks as a class caches, then as many again;
// the blocks freed first fill the cache, and the cached fragments, freed last, go back to the heap.
inline void flush_tcache(std::size_t largest) {
    constexpr std::size_t CACHED = 7, SMALLEST = 24, STEP = 16;
    std::array<void*, 2 * CACHED> blocks;
    for (std::size_t nbytes = SMALLEST; nbytes <= largest; nbytes += STEP) {
        for (void*& block : blocks) block = allocate(nbytes);
        for (std::size_t i = blocks.size(); i-- > 0;) std::free(blocks[i]);
    }
}

}  // namespace gradwire
