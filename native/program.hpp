// One rank's part in a collective, bound to counts and a dtype: what gradwire/executors/plan.py binds, in native form.
//
// A program runs once for each tile; the rounds of neighbouring tiles overlap in waves (see docs/decisions/013-waves.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace gradwire {

enum Memory : std::uint8_t { IN = 0, OUT = 1, SCRATCH = 2 };

struct Piece {
    Memory memory;
    std::size_t offset;  // bytes
    std::size_t nbytes;
};

struct Slice {
    std::uint8_t buffer;  // 0 in, 1 out, 2 acc
    std::uint32_t first;
    std::uint32_t count;
};

struct FoldTerm {
    bool arrives;  // from a rank, else a local slice
    bool partial;
    std::uint32_t rank;
    Slice slice;
};

enum class Kind : std::uint8_t { send, recv, fold, finish, copy };

struct Operation {
    Kind kind;
    Slice dst;
    Slice src;
    std::vector<std::uint32_t> peers;
    std::vector<FoldTerm> terms;
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
    // homes: for each segment its element offset in `in` and in `out`, or -1; scratch: its index in scratch, or -1.
    std::vector<std::vector<Operation>> rounds;
    std::vector<std::int64_t> lengths, in_home, out_home, scratch_index;
    std::size_t tile = 1, tiles = 1, stride = 1, in_flight = 1, homeless = 0;
    bool reduces = false, widens = false, folds_last = false;
    bool one_shot = false;  // one tile, one round: everybody sends everything to everybody, and folds it
    bool mirrored = false;  // all ranks' results lie alike, and who sends a part of it is the last to read that part
    std::size_t divisor = 0;
    Kernels kernels{};
    std::size_t out_bytes = 0;
    std::size_t item = 1;  // bytes of an element where nothing is reduced

    std::size_t element() const { return reduces ? kernels.element : item; }
    std::size_t accumulator() const { return reduces ? kernels.accumulator : item; }
    std::size_t scratch_bytes() const { return homeless * stride * in_flight * accumulator(); }

    // Make the waves of a program that has few of them, once and for all.
    void prepare();
    // What runs side by side in step `step` of the batch of tiles that begins with `first`; null when the batch is over.
    // It may be made in `room`.
    const Wave* wave(std::size_t first, std::size_t step, Wave& room) const;

  private:
    std::size_t steps(std::size_t first) const;
    void make(std::size_t first, std::size_t step, Wave& wave) const;
    void add_round(Wave& wave, std::size_t tile, std::size_t number) const;
    std::vector<Piece> pieces(const Slice& slice, std::size_t tile) const;

    std::vector<Wave> prepared_;  // if all tiles are one batch
};

}  // namespace gradwire
