// Engines of several ranks for tests, connected through memory within a host and by sockets between hosts; and two
// programs.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <string>

#include "check.hpp"
#include "engine.hpp"

namespace gradwire {

constexpr std::uint64_t GROUP = 1;
constexpr std::size_t STAGING = 32 << 10;  // twice the bytes of a wave of four ranks
constexpr std::size_t ARRAYS = 256 << 10;  // for registered arrays, after the region
constexpr std::size_t TILE_BYTES = 4096;   // small, so that there are many tiles; still large enough to be exposed

inline CallHeader call_header(std::uint32_t rank) {
    return {.kind = 1, .job = 9, .generation = 1, .group = GROUP, .rank = rank};
}

// `hosts` has one character per rank; ranks with equal characters share a host.
class Ranks {
  public:
    explicit Ranks(const std::string& hosts) : size(static_cast<std::uint32_t>(hosts.size())), region_(RESERVED_BYTES) {
        arrays_ = region_ + padded(lanes_bytes(size) + STAGING);
        nbytes = arrays_ + ARRAYS;
        for (std::uint32_t rank = 0; rank < size; ++rank) {
            CHECK(::pipe(alarms_.emplace_back().ends) == 0);
            arenas_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(LINE, nbytes)), std::free);
            std::memset(arena(rank), 0, nbytes);
            engines_.push_back(std::make_unique<Engine>(call_header(rank), size, alarms_[rank].ends[0]));
        }
        for (std::uint32_t a = 0; a < size; ++a)
            for (std::uint32_t b = 0; b < a; ++b) {
                Pair& link = links_.emplace_back();
                CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, link.ends) == 0);
                engine(a).connect(b, link.ends[0]);
                engine(b).connect(a, link.ends[1]);
            }
        for (std::uint32_t a = 0; a < size; ++a)
            for (std::uint32_t b = 0; b < size; ++b)
                if (a != b && hosts[a] == hosts[b]) engine(a).map(b, arena(b), nbytes);
    }
    // Each rank opens its own region; peers may search for it before that.
    void open(std::uint32_t rank) { CHECK(engine(rank).open(arena(rank), nbytes, region_, STAGING)); }
    void raise_alarm(std::uint32_t rank) { CHECK(::write(alarms_[rank].ends[1], "!", 1) == 1); }
    // A rank's end of its link to another rank.
    int socket(std::uint32_t rank, std::uint32_t peer) const {
        const std::uint32_t high = std::max(rank, peer), low = std::min(rank, peer);
        return links_[high * (high - 1) / 2 + low].ends[rank == high ? 0 : 1];
    }

    Engine& engine(std::uint32_t rank) { return *engines_[rank]; }
    std::byte* arena(std::uint32_t rank) { return arenas_[rank].get(); }
    std::byte* array(std::uint32_t rank) { return arena(rank) + arrays_; }
    std::uint64_t region() const { return region_; }

    std::uint32_t size;
    std::size_t nbytes;

  private:
    struct Pair {
        ~Pair() {
            for (int end : ends)
                if (end >= 0) ::close(end);
        }
        int ends[2] = {-1, -1};
    };
    std::uint64_t region_;
    std::size_t arrays_;
    std::deque<Pair> alarms_, links_;
    std::vector<std::unique_ptr<std::byte, void (*)(void*)>> arenas_;
    std::vector<std::unique_ptr<Engine>> engines_;
};

// --- programs, as gradwire/executors/native.py lowers them

inline Slice input(std::uint32_t segment) { return {Buffer::input, segment, 1}; }
inline Slice output(std::uint32_t segment) { return {Buffer::output, segment, 1}; }
inline Slice accumulator(std::uint32_t segment) { return {Buffer::accumulator, segment, 1}; }
// The sum of a segment's inputs on all ranks.
inline Operation fold(std::uint32_t segment, std::uint32_t rank, std::uint32_t size) {
    std::vector<FoldTerm> terms;
    for (std::uint32_t r = 0; r < size; ++r)
        terms.push_back(r == rank ? FoldTerm::local(input(segment)) : FoldTerm::from(r, false));
    return Operation::fold(accumulator(segment), std::move(terms));
}
inline std::vector<std::uint32_t> others(std::uint32_t rank, std::uint32_t size) {
    std::vector<std::uint32_t> found;
    for (std::uint32_t i = 1; i < size; ++i) found.push_back((rank + i) % size);
    return found;
}

// Sets the fields that follow from counts and dtype, for `segments` segments of which the rank folds one.
inline void bind(Program& program, std::size_t segments, std::uint32_t folded, std::size_t count, DType dtype) {
    program.reduce_with(kernels(dtype, ReduceOp::sum));
    const std::size_t grain = LINE / program.element();
    const std::size_t step = ((count + segments - 1) / segments + grain - 1) / grain * grain;
    std::size_t longest = 0;
    for (std::size_t s = 0; s < segments; ++s) {
        const std::size_t begin = std::min(s * step, count), end = std::min((s + 1) * step, count);
        program.segments.lengths.push_back(static_cast<std::int64_t>(end - begin));
        program.segments.in_offset.push_back(static_cast<std::int64_t>(begin));
        program.segments.out_offset.push_back(static_cast<std::int64_t>(begin));
        program.segments.scratch_index.push_back(program.widens && s == folded ? 0 : -1);
        longest = std::max(longest, end - begin);
    }
    Tiling& tiling = program.tiling;
    tiling.tile = TILE_BYTES / program.element();
    tiling.tiles = std::max<std::size_t>(1, (longest + tiling.tile - 1) / tiling.tile);
    tiling.stride = std::min(tiling.tile, (std::max<std::size_t>(1, longest) + grain - 1) / grain * grain);
    tiling.in_flight = std::min<std::size_t>({3, tiling.tiles, program.rounds.size()});
    program.out_bytes = count * program.element();
}

// Two-shot all-reduce: rank s folds segment s and sends the result to all others.
inline Program two_shot(std::uint32_t rank, std::uint32_t size, std::size_t count, DType dtype) {
    Program program;
    program.rounds.resize(3);
    for (std::uint32_t peer : others(rank, size)) program.rounds[0].push_back(Operation::send(input(peer), {peer}));
    program.rounds[0].push_back(fold(rank, rank, size));
    program.rounds[1].push_back(Operation::finish(output(rank), accumulator(rank)));
    program.rounds[2].push_back(Operation::send(output(rank), others(rank, size)));
    for (std::uint32_t peer : others(rank, size)) program.rounds[2].push_back(Operation::recv(output(peer), peer));
    program.mirrored = true;
    bind(program, size, rank, count, dtype);
    program.prepare();
    return program;
}

// One-shot all-reduce: every rank folds all inputs.
inline Program one_shot(std::uint32_t rank, std::uint32_t size, std::size_t count, DType dtype) {
    Program program;
    program.rounds.resize(2);
    program.rounds[0].push_back(Operation::send(input(0), others(rank, size)));
    program.rounds[0].push_back(fold(0, rank, size));
    program.rounds[1].push_back(Operation::finish(output(0), accumulator(0)));
    program.folds_last = true;
    bind(program, 1, 0, count, dtype);
    program.one_shot = program.tiling.tiles == 1;
    program.prepare();
    return program;
}

}  // namespace gradwire
