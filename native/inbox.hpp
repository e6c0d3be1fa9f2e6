// Receives messages from one peer through shared memory: the reader's side of a lane in the peer's arena.
#pragma once

#include "memory.hpp"

namespace gradwire {

class Inbox {
  public:
    Inbox(std::byte* arena, std::size_t nbytes, std::uint64_t group, std::uint32_t rank)
        : arena_(arena), nbytes_(nbytes), group_(group), rank_(rank) {}

    // Returns the next entry, or null while there is none (the peer may not have opened the group yet). The entry is a
    // copy, so a peer cannot change a field after it was checked. Only inline bytes stay in the lane.
    const Entry* peek() {
        if (!lane_ && !find()) return nullptr;
        const volatile Entry& entry = lane_->entries[taken_ % LANE_ENTRIES];
        if (entry.turn.load(std::memory_order_acquire) != static_cast<std::uint32_t>(taken_ + 1)) return nullptr;
        next_.round = entry.round;
        next_.place = entry.place;
        next_.tile = entry.tile;
        next_.nbytes = entry.nbytes;
        next_.sequence = entry.sequence;
        next_.fingerprint = entry.fingerprint;
        next_.offset = entry.offset;
        next_.result = entry.result;
        return &next_;
    }
    void take() { ++taken_; }
    // Lets the peer reuse all entries taken so far, and their bytes.
    void release() { lane_->consumed.store(taken_, std::memory_order_release); }

    // Returns the bytes of the next entry; null if they are outside the arena.
    const std::byte* bytes(const Entry& entry) const {
        if (entry.place == Place::inlined)
            return entry.nbytes <= INLINE_BYTES ? lane_->entries[taken_ % LANE_ENTRIES].bytes : nullptr;
        return at(entry.offset, entry.nbytes);
    }
    std::byte* at(std::uint64_t offset, std::size_t nbytes) const {
        return offset <= nbytes_ && nbytes <= nbytes_ - offset ? arena_ + offset : nullptr;
    }

    // Returns whether the peer has reclaimed its arrays: bytes read from them before may be invalid.
    bool reclaimed() const { return Pulse::of(arena_).reclaimed.load(std::memory_order_relaxed) != 0; }

  private:
    bool find() {
        const std::uint64_t region = reinterpret_cast<const Directory*>(arena_)->find(group_);
        const std::uint64_t offset = region + rank_ * sizeof(Lane);
        if (region && offset % alignof(Lane) == 0) lane_ = reinterpret_cast<Lane*>(at(offset, sizeof(Lane)));
        return lane_ != nullptr;
    }

    std::byte* arena_;
    std::size_t nbytes_;
    std::uint64_t group_;
    std::uint32_t rank_;
    Lane* lane_ = nullptr;
    Entry next_{};
    std::uint64_t taken_ = 0;
};

}  // namespace gradwire
