// What this rank says to the others of a group through memory: the writer's side of its lanes, and its staging.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "memory.hpp"
#include "ring.hpp"

namespace gradwire {

// What all entries of one message have in common.
struct Letter {
    std::uint64_t sequence;
    std::uint64_t fingerprint;
    std::uint32_t tile;
    std::uint32_t round;
    std::uint32_t nbytes;
};

class Outbox {
  public:
    // `region` is the offset of this group's region in the arena.
    Outbox(std::byte* arena, std::uint64_t region, std::size_t size, std::size_t staging)
        : arena_(arena),
          lanes_(reinterpret_cast<Lane*>(arena + region)),
          staging_(region + lanes_bytes(size)),
          capacity_(staging),
          circle_(std::min(staging, SMALLEST_CIRCLE)),
          sides_(size) {}

    std::uint64_t result = 0;  // said in every entry: where this call's result goes, if peers may write it there

    bool has_room(std::uint32_t peer) {
        const std::uint64_t posted = sides_[peer].posted;
        return posted < LANE_ENTRIES || read_by(peer, posted - LANE_ENTRIES + 1);
    }

    // Memory for the bytes of a message; null while others still read what lies there.
    std::byte* reserve(std::size_t nbytes) {
        const std::uint64_t length = padded(nbytes);
        // A circle that is just large enough stays in the cache, and takes no more memory than it needs.
        circle_ = std::min(capacity_, std::max(circle_, ROOM * length));
        if (!place(length)) {
            reclaim();
            if (!place(length)) return nullptr;
        }
        return arena_ + staging_ + begin_;
    }
    // Tell these peers of it; the memory is free again when all of them have read it.
    template <class Peers>
    void post_reserved(const Peers& peers, const Letter& letter, Place place = Place::staged) {
        std::uint32_t readers = 0;
        for (std::uint32_t peer : peers) {
            claims_.push({peer, post(peer, letter, place, staging_ + begin_)});
            ++readers;
        }
        held_.push({begin_, readers});
        head_ = begin_ + padded(letter.nbytes);
    }

    // Tell one peer of bytes that lie at an offset of the arena, or (`here`, up to INLINE_BYTES) in the entry itself.
    // Returns how many entries the peer has had.
    std::uint64_t post(std::uint32_t peer, const Letter& letter, Place place, std::uint64_t offset,
                       const void* bytes = nullptr) {
        Side& side = sides_[peer];
        Entry& entry = lanes_[peer].entries[side.posted % LANE_ENTRIES];
        entry.round = static_cast<std::uint16_t>(letter.round);
        entry.place = place;
        entry.tile = letter.tile;
        entry.nbytes = letter.nbytes;
        entry.sequence = letter.sequence;
        entry.fingerprint = letter.fingerprint;
        entry.offset = offset;
        entry.result = result;
        if (bytes) std::memcpy(entry.bytes, bytes, letter.nbytes);
        ++side.posted;
        entry.turn.store(static_cast<std::uint32_t>(side.posted), std::memory_order_release);
        return side.posted;
    }

    // Whether a peer is done with that many entries.
    bool read_by(std::uint32_t peer, std::uint64_t number) {
        return sides_[peer].consumed >= number || learn(peer) >= number;
    }

    bool read_by(std::uint32_t peer) { return read_by(peer, sides_[peer].posted); }

  private:
    static constexpr std::uint64_t ROOM = 8;  // messages
    static constexpr std::uint64_t SMALLEST_CIRCLE = 64 << 10;

    struct Side {
        std::uint64_t posted = 0;
        std::uint64_t consumed = 0;  // as far as this rank knows
    };
    struct Claim {
        std::uint32_t peer;
        std::uint64_t until;  // read when the peer has consumed this many
    };
    struct Held {
        std::uint64_t begin;
        std::uint32_t readers;  // that many claims belong to it
    };

    std::uint64_t learn(std::uint32_t peer) {
        return sides_[peer].consumed = lanes_[peer].consumed.load(std::memory_order_acquire);
    }

    // Memory is given out in a circle, and comes back in the same order.
    bool place(std::uint64_t length) {
        if (held_.empty()) {
            begin_ = head_ + length <= circle_ ? head_ : 0;
            return begin_ + length <= circle_;
        }
        const std::uint64_t tail = held_.front().begin;
        const bool wrapped = head_ <= tail;
        begin_ = head_;
        if (wrapped || head_ + length <= circle_) return head_ + length <= (wrapped ? tail : circle_);
        begin_ = 0;
        return length <= tail;
    }

    void reclaim() {
        while (!held_.empty()) {
            Held& held = held_.front();
            for (; held.readers; --held.readers) {
                const Claim& claim = claims_.front();
                if (!read_by(claim.peer, claim.until)) return;
                claims_.pop();
            }
            held_.pop();
        }
    }

    std::byte* arena_;
    Lane* lanes_;
    std::uint64_t staging_, capacity_;
    std::uint64_t circle_;  // the part of the staging that is in use
    std::uint64_t head_ = 0;   // where free memory begins
    std::uint64_t begin_ = 0;  // of what was reserved last
    std::vector<Side> sides_;
    Ring<Claim> claims_;
    Ring<Held> held_;
};

}  // namespace gradwire
