#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gradwire {

// memmove, without its worst case. Where the target lies 1 … 31 bytes behind the source, counted within a page, the string
// instruction that it uses for more than a few KiB takes each store for one that the next loads depend on, and is three
// to four times slower. That is no rare case: memory that processes share begins at a page, and what malloc got from the
// system 16 bytes behind one.
inline void copy_bytes(void* to, const void* from, std::size_t nbytes) {
    constexpr std::size_t FEW = 2048, PAGE = 4096, TOO_NEAR = 32, BLOCK = 128;
    const std::size_t ahead = (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % PAGE;
    auto* target = static_cast<std::byte*>(to);
    const auto* source = static_cast<const std::byte*>(from);
    const bool overlap = target < source + nbytes && source < target + nbytes;
    if (nbytes < FEW || ahead == 0 || ahead >= TOO_NEAR || overlap) {
        std::memmove(to, from, nbytes);
        return;
    }
    std::size_t done = 0;
    for (; done + BLOCK <= nbytes; done += BLOCK) {
        std::byte block[BLOCK];  // in registers
        std::memcpy(block, source + done, BLOCK);
        std::memcpy(target + done, block, BLOCK);
    }
    std::memcpy(target + done, source + done, nbytes - done);
}

}  // namespace gradwire
