// Copies bytes: a memmove without the worst case of the string instructions, and a copy with non-temporal stores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gradwire {

// memmove without its worst case. If the target's offset within a page is 1 to 31 bytes above the source's, the string
// instruction that memmove uses beyond a few KiB treats each store as a dependency of the next loads, and is three to
// four times slower. The case is common: shared memory begins at a page, and a large malloc block 16 bytes after one.
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

// Copies whole cache lines with non-temporal stores: no line is read before it is overwritten, and none is evicted. The
// fence at the end lets a following release store publish the bytes.
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
