// Sends messages of this rank to its group through shared memory: the writer's side of its lanes, and its staging.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "memory.hpp"
#include "ring.hpp"

namespace gradwire {

// The fields that all entries of one message share.
struct MessageInfo {
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
          ring_bytes_(std::min(staging, SMALLEST_RING)),
          sides_(size) {}

    std::uint64_t result = 0;  // copied into every entry: the offset of this call's result, if peers may write there

    bool has_room(std::uint32_t peer) {
        const std::uint64_t posted = sides_[peer].posted;
        return posted < LANE_ENTRIES || read_by(peer, posted - LANE_ENTRIES + 1);
    }

    // Returns staging for the bytes of a message; null while peers still read the bytes there.
    std::byte* reserve(std::size_t nbytes) {
        const std::uint64_t length = padded(nbytes);
        // The part of the staging in use grows with the messages: a small part stays in the cache and touches few
        // pages.
        ring_bytes_ = std::min(capacity_, std::max(ring_bytes_, RING_MESSAGES * length));
        if (!place(length)) {
            reclaim();
            if (!place(length)) return nullptr;
        }
        return arena_ + staging_ + begin_;
    }
    // Posts the reserved bytes to these peers. The bytes are free again when all peers have read them.
    template <class Peers>
    void post_reserved(const Peers& peers, const MessageInfo& info, Place place = Place::staged) {
        std::uint32_t readers = 0;
        for (std::uint32_t peer : peers) {
            claims_.push({peer, post(peer, info, place, staging_ + begin_)});
            ++readers;
        }
        held_.push({begin_, readers});
        head_ = begin_ + padded(info.nbytes);
    }

    // Posts one entry to a peer. Its bytes are at an offset of the arena, or, `inlined` (up to INLINE_BYTES), in the
    // entry. Returns the number of entries posted to the peer so far.
    std::uint64_t post(std::uint32_t peer, const MessageInfo& info, Place place, std::uint64_t offset,
                       const void* bytes = nullptr) {
        Side& side = sides_[peer];
        Entry& entry = lanes_[peer].entries[side.posted % LANE_ENTRIES];
        entry.round = static_cast<std::uint16_t>(info.round);
        entry.place = place;
        entry.tile = info.tile;
        entry.nbytes = info.nbytes;
        entry.sequence = info.sequence;
        entry.fingerprint = info.fingerprint;
        entry.offset = offset;
        entry.result = result;
        if (bytes) std::memcpy(entry.bytes, bytes, info.nbytes);
        ++side.posted;
        entry.turn.store(static_cast<std::uint32_t>(side.posted), std::memory_order_release);
        return side.posted;
    }

    // Whether a peer has consumed that many entries.
    bool read_by(std::uint32_t peer, std::uint64_t number) {
        return sides_[peer].consumed >= number || load_consumed(peer) >= number;
    }

    bool read_by(std::uint32_t peer) { return read_by(peer, sides_[peer].posted); }

  private:
    static constexpr std::uint64_t RING_MESSAGES = 8;  // that the ring buffer has room for
    static constexpr std::uint64_t SMALLEST_RING = 64 << 10;

    struct Side {
        std::uint64_t posted = 0;
        std::uint64_t consumed = 0;  // as last loaded
    };
    struct Claim {
        std::uint32_t peer;
        std::uint64_t until;  // the peer has read the bytes when it has consumed this many entries
    };
    struct Held {
        std::uint64_t begin;
        std::uint32_t readers;  // number of claims that belong to it
    };

    std::uint64_t load_consumed(std::uint32_t peer) {
        return sides_[peer].consumed = lanes_[peer].consumed.load(std::memory_order_acquire);
    }

    // Staging is a ring buffer: bytes are freed in the order in which they were reserved.
    bool place(std::uint64_t length) {
        if (held_.empty()) {
            begin_ = head_ + length <= ring_bytes_ ? head_ : 0;
            return begin_ + length <= ring_bytes_;
        }
        const std::uint64_t tail = held_.front().begin;
        const bool wrapped = head_ <= tail;
        begin_ = head_;
        if (wrapped || head_ + length <= ring_bytes_) return head_ + length <= (wrapped ? tail : ring_bytes_);
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
    std::uint64_t ring_bytes_;  // bytes of the staging that are in use as a ring buffer
    std::uint64_t head_ = 0;   // where free staging begins
    std::uint64_t begin_ = 0;  // of the last reservation
    std::vector<Side> sides_;
    Ring<Claim> claims_;
    Ring<Held> held_;
};

}  // namespace gradwire
