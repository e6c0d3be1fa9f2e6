#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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

// A copy that passes the caches by, whole lines at a time: nothing is read only to be overwritten, and nothing is driven out.
// Who is told of it afterwards, by a store with release, sees all of it.
inline void stream_bytes(void* to, const void* from, std::size_t nbytes) {
#if defined(__SSE2__)
    constexpr std::size_t LINE_BYTES = 64;
    auto* target = static_cast<std::byte*>(to);
    const auto* source = static_cast<const std::byte*>(from);
    const std::size_t head = (LINE_BYTES - reinterpret_cast<std::uintptr_t>(to) % LINE_BYTES) % LINE_BYTES;
    if (nbytes < head + LINE_BYTES) return copy_bytes(to, from, nbytes);
    std::memcpy(target, source, head);
    std::size_t done = head;
    for (; done + LINE_BYTES <= nbytes; done += LINE_BYTES) {
        const auto* in = reinterpret_cast<const __m128i*>(source + done);
        auto* out = reinterpret_cast<__m128i*>(target + done);
        const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                      d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    _mm_sfence();
    std::memcpy(target + done, source + done, nbytes - done);
#else
    copy_bytes(to, from, nbytes);
#endif
}

}  // namespace gradwire
