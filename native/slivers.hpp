// Small pieces of memory that malloc keeps aside for a thread, given back to the free memory beside them.
//
// glibc cuts slivers off both ends of an aligned block and keeps them among such pieces (before 2.39): then the hole that
// the block leaves is too small for the next one of its size, and the heap grows. Only `malloc` and `free` are used, so
// another allocator is asked for some memory in vain, and nothing more.

#pragma once

#include <array>
#include <cstddef>
#include <cstdlib>

namespace gradwire {

inline void* taken(std::size_t nbytes) {
    void* piece = std::malloc(nbytes);
    asm volatile("" : "+r"(piece));  // or the compiler sees that nobody uses it, and takes none
    return piece;
}

// Those of up to `largest` bytes. As many are taken as are kept, then as many again; the second ones are freed into the
// room that was made, and there is none for the first.
inline void join_slivers(std::size_t largest) {
    constexpr std::size_t KEPT = 7, SMALLEST = 24, STEP = 16;
    std::array<void*, 2 * KEPT> pieces;
    for (std::size_t nbytes = SMALLEST; nbytes <= largest; nbytes += STEP) {
        for (void*& piece : pieces) piece = taken(nbytes);
        for (std::size_t i = pieces.size(); i-- > 0;) std::free(pieces[i]);
    }
}

}  // namespace gradwire
