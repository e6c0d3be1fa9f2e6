// The layout of the shared memory through which ranks of one host exchange messages.
//
// Each rank has, per group, one region in its own arena, which its peers map: a lane to every other rank of the group,
// and staging for bytes that do not fit into a lane. A lane is a queue of entries with one writer (the owner) and one
// reader. An entry identifies a message and says where its bytes are: in the entry itself, in the owner's staging, or
// in an array of the owner's program, if the array is in its arena.
//
//     the writer   fills an entry, then stores its turn (release)
//                  a reader that loads the turn (acquire) sees the whole entry
//     the reader   stores the number of entries that it has consumed (release)
//                  a writer that loads the number (acquire) may reuse these entries
//
// Memory can be reused as soon as its readers have read it: a rank that has finished a collective blocks no other rank.
//
// The arena begins with a directory of the groups that its owner has opened; peers find a group's region there. The
// owner's heartbeat follows, which its lifeline updates: native/lifeline.hpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace gradwire {

constexpr std::size_t LINE = 64;
constexpr std::uint64_t LANE_ENTRIES = 128;
constexpr std::size_t INLINE_BYTES = 16;
constexpr std::size_t DIRECTORY_SLOTS = 2048;
constexpr std::size_t DIRECTORY_BYTES = DIRECTORY_SLOTS * 2 * sizeof(std::uint64_t);
constexpr std::size_t RESERVED_BYTES = 64 << 10;  // at the beginning of each arena: directory and heartbeat

inline std::size_t padded(std::size_t nbytes) { return (nbytes + LINE - 1) / LINE * LINE; }

// Where the bytes of a message are: `inlined` in the entry; `exposed` in an array in the owner's arena; `pushed`,
// already written to the reader's result; in the owner's staging, `staged` by ordinary stores or `streamed` by
// non-temporal stores.
enum class Place : std::uint16_t { inlined = 0, exposed = 1, pushed = 2, staged = 3, streamed = 4 };

struct alignas(LINE) Entry {
    std::atomic<std::uint32_t> turn;  // the number of entries posted to the lane, including this one; stored last
    std::uint16_t round;
    Place place;
    std::uint32_t tile;
    std::uint32_t nbytes;
    std::uint64_t sequence;
    std::uint64_t fingerprint;
    std::uint64_t offset;  // in the owner's arena, of the bytes
    std::uint64_t result;  // in the owner's arena, of the array for the result; 0 if the result is not in the arena
    std::byte bytes[INLINE_BYTES];
};
static_assert(sizeof(Entry) == LINE);

struct alignas(LINE) Lane {
    alignas(LINE) std::atomic<std::uint64_t> consumed;
    alignas(LINE) Entry entries[LANE_ENTRIES];
};

// The lanes to all ranks of the group (the owner's own stays empty), then the staging.
inline std::size_t lanes_bytes(std::size_t size) { return size * sizeof(Lane); }

struct Directory {
    struct Slot {
        std::atomic<std::uint64_t> group;
        std::atomic<std::uint64_t> offset;
    };
    Slot slots[DIRECTORY_SLOTS];

    static constexpr std::uint64_t WITHDRAWN = ~std::uint64_t{0};

    // Returns false if the directory is full.
    bool publish(std::uint64_t group, std::uint64_t offset) {
        for (std::size_t i = 0; i < DIRECTORY_SLOTS; ++i) {
            Slot& slot = slots[(group + i) % DIRECTORY_SLOTS];
            const std::uint64_t found = slot.group.load(std::memory_order_relaxed);
            if (found != 0 && found != WITHDRAWN) continue;
            slot.offset.store(offset, std::memory_order_release);  // ordered after the withdrawal of the previous group
            slot.group.store(group, std::memory_order_release);
            return true;
        }
        return false;
    }
    void withdraw(std::uint64_t group) {
        for (Slot& slot : slots)
            if (slot.group.load(std::memory_order_relaxed) == group) slot.group.store(WITHDRAWN, std::memory_order_release);
    }
    // Returns 0 if the group is not open (yet).
    std::uint64_t find(std::uint64_t group) const {
        for (std::size_t i = 0; i < DIRECTORY_SLOTS; ++i) {
            const Slot& slot = slots[(group + i) % DIRECTORY_SLOTS];
            const std::uint64_t found = slot.group.load(std::memory_order_acquire);
            if (found == 0) return 0;
            if (found != group) continue;
            const std::uint64_t offset = slot.offset.load(std::memory_order_acquire);
            // If the slot was reused in between, the offset is another group's.
            return slot.group.load(std::memory_order_relaxed) == group ? offset : 0;
        }
        return 0;
    }
};
static_assert(sizeof(Directory) == DIRECTORY_BYTES);

struct alignas(LINE) Pulse {
    std::atomic<std::uint64_t> beat;  // changes with each heartbeat; 0: none yet
    // Not 0 if the generation is broken and the owner has reclaimed its arrays: bytes read from them are not valid.
    std::atomic<std::uint64_t> reclaimed;

    static Pulse& of(std::byte* arena) { return *reinterpret_cast<Pulse*>(arena + DIRECTORY_BYTES); }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "other processes read it");
static_assert(DIRECTORY_BYTES % LINE == 0 && DIRECTORY_BYTES + sizeof(Pulse) <= RESERVED_BYTES);

}  // namespace gradwire
