// Binds one rank's part of a collective to counts and a dtype.
#include "program.hpp"

#include <algorithm>

namespace gradwire {

namespace {
std::size_t total(const std::vector<Piece>& pieces) {
    std::size_t sum = 0;
    for (const Piece& piece : pieces) sum += piece.nbytes;
    return sum;
}
bool same(const std::vector<Piece>& a, const std::vector<Piece>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Piece& x, const Piece& y) {
        return x.memory == y.memory && x.offset == y.offset && x.nbytes == y.nbytes;
    });
}
}  // namespace

std::vector<Piece> Program::pieces(const Slice& slice, std::size_t tile_number) const {
    std::vector<Piece> result;
    const bool accumulates = slice.buffer == Buffer::accumulator;
    const std::size_t size = accumulates ? accumulator() : element();
    for (std::uint32_t s = slice.first; s < slice.first + slice.count; ++s) {
        const std::int64_t begin = static_cast<std::int64_t>(tile_number * tiling.tile);
        const std::int64_t length = std::min<std::int64_t>(static_cast<std::int64_t>(tiling.tile), segments.lengths[s] - begin);
        if (length <= 0) continue;
        Memory memory = SCRATCH;
        std::size_t start = 0;
        if (slice.buffer == Buffer::input && segments.in_offset[s] >= 0) {
            memory = IN;
            start = static_cast<std::size_t>(segments.in_offset[s] + begin);
        } else if (!(accumulates && reduces && widens) && slice.buffer != Buffer::input && segments.out_offset[s] >= 0) {
            memory = OUT;
            start = static_cast<std::size_t>(segments.out_offset[s] + begin);
        } else {
            const std::size_t slot = tile_number % tiling.in_flight;
            start = (slot * scratch_segments_ + static_cast<std::size_t>(segments.scratch_index[s])) * tiling.stride;
        }
        const Piece piece{memory, start * size, static_cast<std::size_t>(length) * size};
        if (!result.empty() && result.back().memory == memory && result.back().offset + result.back().nbytes == piece.offset)
            result.back().nbytes += piece.nbytes;
        else
            result.push_back(piece);
    }
    return result;
}

std::size_t Program::steps(std::size_t first) const {
    return rounds.size() + std::min(tiling.in_flight, tiling.tiles - first) - 1;
}

void Program::prepare() {
    const auto& scratch = segments.scratch_index;
    scratch_segments_ = static_cast<std::size_t>(std::count_if(scratch.begin(), scratch.end(), [](auto i) { return i >= 0; }));
    if (tiling.tiles > tiling.in_flight) return;
    prepared_.resize(steps(0));
    for (std::size_t step = 0; step < prepared_.size(); ++step) make(0, step, prepared_[step]);
}

const Wave* Program::wave(std::size_t first, std::size_t step, Wave& buffer) const {
    if (step >= steps(first)) return nullptr;
    if (!prepared_.empty()) return &prepared_[step];
    make(first, step, buffer);
    return &buffer;
}

void Program::make(std::size_t first, std::size_t step, Wave& wave) const {
    wave.clear();
    const std::size_t last = std::min(first + tiling.in_flight, tiling.tiles);
    for (std::size_t t = first; t < last; ++t) {
        const std::size_t behind = t - first;
        if (step >= behind && step - behind < rounds.size()) add_round(wave, t, step - behind);
    }
}

void Program::add_round(Wave& wave, std::size_t t, std::size_t number) const {
    const auto tile_number = static_cast<std::uint32_t>(t), round = static_cast<std::uint32_t>(number);
    for (const Operation& operation : rounds[number]) {
        std::vector<Piece> dst = pieces(operation.dst, t);
        if (dst.empty()) continue;
        switch (operation.opcode) {
            case Opcode::send:
                wave.sends.push_back({&operation.peers, dst, total(dst), tile_number, round});
                break;
            case Opcode::recv:
                wave.receives.push_back({operation.peers[0], dst, total(dst), tile_number, round});
                break;
            case Opcode::fold: {
                Folding folding{std::move(dst), {}};
                const std::size_t count = total(folding.dst) / accumulator();
                for (const FoldTerm& term : operation.terms) {
                    if (term.received) {
                        const std::size_t size = term.partial ? accumulator() : element();
                        folding.terms.push_back({{}, static_cast<int>(wave.receives.size()), term.partial});
                        wave.receives.push_back({term.rank, {}, count * size, tile_number, round});
                    } else {
                        folding.terms.push_back({pieces(term.slice, t), -1, term.slice.buffer == Buffer::accumulator});
                    }
                }
                wave.folds.push_back(std::move(folding));
                break;
            }
            case Opcode::finish:
            case Opcode::copy: {
                std::vector<Piece> src = pieces(operation.src, t);
                const bool finishes = operation.opcode == Opcode::finish;
                if (!same(dst, src) || (finishes && divisor)) wave.moves.push_back({std::move(dst), std::move(src), finishes});
                break;
            }
        }
    }
}

}  // namespace gradwire
