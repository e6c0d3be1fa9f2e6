// The header of every message on a socket, field by field as in gradwire/wire.py.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace gradwire {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

#pragma pack(push, 1)
struct Header {
    char magic[4];
    std::uint8_t kind;
    std::uint8_t zero[3];
    std::uint64_t job;
    std::uint32_t generation;
    std::uint32_t source;
    std::uint64_t group;
    std::uint64_t sequence;
    std::uint64_t fingerprint;
    std::uint32_t tile;
    std::uint32_t round;
    std::uint64_t nbytes;
};
#pragma pack(pop)
static_assert(sizeof(Header) == 64);

// The fields that all messages of one call share.
struct CallHeader {
    std::uint8_t kind = 0;  // a number of `Kind` in gradwire/wire.py
    std::uint64_t job = 0;
    std::uint32_t generation = 0;
    std::uint64_t group = 0;
    std::uint32_t rank = 0;
    std::uint64_t sequence = 0;
    std::uint64_t fingerprint = 0;

    Header header(std::uint32_t source, std::uint32_t tile, std::uint32_t round, std::uint64_t nbytes) const {
        return {.magic = {'G', 'W', 'R', '1'},
                .kind = kind,
                .zero = {},
                .job = job,
                .generation = generation,
                .source = source,
                .group = group,
                .sequence = sequence,
                .fingerprint = fingerprint,
                .tile = tile,
                .round = round,
                .nbytes = nbytes};
    }
};

}  // namespace gradwire
