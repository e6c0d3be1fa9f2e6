// One rank's part of a collective, bound to counts and a dtype: the native form of gradwire/executors/plan.py.
//
// A program runs once per tile; the rounds of neighbouring tiles overlap in waves (docs/decisions/013-waves.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace gradwire {

// --- the schedule's operations, over segments

// The three buffers of a schedule. `accumulator` holds partial results, in the accumulator's type.
enum class Buffer : std::uint8_t { input, output, accumulator };

struct Slice {
    Buffer buffer;
    std::uint32_t first;  // segment
    std::uint32_t count;
};

struct FoldTerm {
    bool received;  // from `rank`; otherwise the local `slice`
    bool partial;   // a received term of the accumulator's type
    std::uint32_t rank;
    Slice slice;

    static FoldTerm local(Slice slice) { return {false, false, 0, slice}; }
    static FoldTerm from(std::uint32_t rank, bool partial) { return {true, partial, rank, {}}; }
};

enum class Opcode : std::uint8_t { send, recv, fold, finish, copy };

struct Operation {
    Opcode opcode;
    Slice dst;
    Slice src;
    std::vector<std::uint32_t> peers;
    std::vector<FoldTerm> terms;

    static Operation send(Slice slice, std::vector<std::uint32_t> to) {
        return {Opcode::send, slice, {}, std::move(to), {}};
    }
    static Operation recv(Slice slice, std::uint32_t from) { return {Opcode::recv, slice, {}, {from}, {}}; }
    static Operation fold(Slice dst, std::vector<FoldTerm> terms) { return {Opcode::fold, dst, {}, {}, std::move(terms)}; }
    static Operation finish(Slice dst, Slice src) { return {Opcode::finish, dst, src, {}, {}}; }
    static Operation copy(Slice dst, Slice src) { return {Opcode::copy, dst, src, {}, {}}; }
};

using Round = std::vector<Operation>;

// Element offsets of each segment in the input, the output and the scratch memory; -1 if the segment is not there.
struct Segments {
    std::vector<std::int64_t> lengths, in_offset, out_offset, scratch_index;
};

struct Tiling {
    std::size_t tile = 1;       // elements of a segment per tile
    std::size_t tiles = 1;      // of the longest segment
    std::size_t stride = 1;     // elements between two segments in scratch
    std::size_t in_flight = 1;  // tiles that run concurrently
};

// --- waves: operations that run concurrently, with slices resolved to memory

enum Memory : std::uint8_t { IN = 0, OUT = 1, SCRATCH = 2 };

struct Piece {
    Memory memory;
    std::size_t offset;  // bytes
    std::size_t nbytes;
};

struct Outgoing {
    const std::vector<std::uint32_t>* peers;
    std::vector<Piece> pieces;
    std::size_t nbytes;
    std::uint32_t tile, round;
};
struct Incoming {
    std::uint32_t peer;
    std::vector<Piece> pieces;  // empty: a term of a fold
    std::size_t nbytes;
    std::uint32_t tile, round;
};
struct WaveTerm {
    std::vector<Piece> pieces;
    int message;  // index into receives, or -1
    bool partial;
};
struct Folding {
    std::vector<Piece> dst;
    std::vector<WaveTerm> terms;
    std::size_t bytes() const {  // of the result
        std::size_t sum = 0;
        for (const Piece& piece : dst) sum += piece.nbytes;
        return sum;
    }
};
struct Moving {
    std::vector<Piece> dst, src;
    bool finishes;
};
struct Wave {
    std::vector<Moving> moves;
    std::vector<Outgoing> sends;
    std::vector<Incoming> receives;
    std::vector<Folding> folds;
    void clear() {
        moves.clear();
        sends.clear();
        receives.clear();
        folds.clear();
    }
    bool empty() const { return moves.empty() && sends.empty() && receives.empty() && folds.empty(); }
};

class Program {
  public:
    std::vector<Round> rounds;
    Segments segments;
    Tiling tiling;
    bool folds_last = false;  // a result may overwrite bytes that the same round sends: fold after all messages are sent
    bool one_shot = false;    // one tile and one round: every rank sends its whole input to all others and folds all inputs
    bool mirrored = false;    // see gradwire/collectives/claims.py
    std::size_t itemsize = 1;  // bytes of an element; `reduce_with` sets it too
    std::size_t out_bytes = 0;

    bool reduces = false, widens = false;
    Kernels kernels{};
    std::size_t divisor = 0;  // 0: no division

    void reduce_with(const Kernels& found, std::size_t by = 0) {
        reduces = true;
        kernels = found;
        widens = kernels.element != kernels.accumulator;
        itemsize = kernels.element;
        divisor = by;
    }
    // Call once, after all fields above are set. Builds the waves in advance if they are few.
    void prepare();

    std::size_t element() const { return itemsize; }
    std::size_t accumulator() const { return reduces ? kernels.accumulator : itemsize; }
    std::size_t scratch_bytes() const { return scratch_segments_ * tiling.stride * tiling.in_flight * accumulator(); }

    // Returns the operations of step `step` in the batch of tiles that begins with tile `first`; null after the last
    // step. The wave may be built in `buffer`.
    const Wave* wave(std::size_t first, std::size_t step, Wave& buffer) const;

  private:
    std::size_t steps(std::size_t first) const;
    void make(std::size_t first, std::size_t step, Wave& wave) const;
    void add_round(Wave& wave, std::size_t tile, std::size_t number) const;
    std::vector<Piece> pieces(const Slice& slice, std::size_t tile) const;

    std::size_t scratch_segments_ = 0;
    std::vector<Wave> prepared_;  // if all tiles are in one batch
};

}  // namespace gradwire
