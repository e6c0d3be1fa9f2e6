// Tests lanes, staging and directory with one writer and several readers, each in its own thread.
#include <array>
#include <memory>

#include "check.hpp"
#include "inbox.hpp"
#include "outbox.hpp"

using namespace gradwire;

namespace {

constexpr std::uint64_t GROUP = 77;
constexpr std::uint64_t REGION = DIRECTORY_BYTES;

// A writer's arena: its directory, and one region for a group of `size` ranks, of which it is rank 0.
struct Arena {
    Arena(std::size_t size, std::size_t staging)
        : nbytes(padded(REGION + lanes_bytes(size) + staging)),
          memory(static_cast<std::byte*>(std::aligned_alloc(LINE, nbytes)), std::free) {
        std::memset(memory.get(), 0, nbytes);
    }
    std::byte* data() { return memory.get(); }
    Directory& directory() { return *reinterpret_cast<Directory*>(data()); }
    Inbox inbox(std::uint32_t rank) { return {data(), nbytes, GROUP, rank}; }

    std::size_t nbytes;
    std::unique_ptr<std::byte, void (*)(void*)> memory;
};

std::byte message_byte(std::uint64_t sequence, std::size_t i) { return std::byte(sequence * 31 + i * 7); }

// Messages of random sizes, some in the entry and some in staging, to all readers or to one, read and released in
// random batches: lanes and staging wrap around many times.
void messages_of_random_sizes_arrive_whole_and_in_order() {
    constexpr std::uint32_t SIZE = 4;
    constexpr std::size_t STAGING = 10240, LARGEST = 3000;
    const std::uint64_t messages = 3000 * MANY;
    Arena arena(SIZE, STAGING);

    auto reads = [&](std::uint32_t rank) {
        Inbox inbox = arena.inbox(rank);
        Random random(rank);
        std::size_t unreleased = 0;
        for (std::uint64_t sequence = 1; sequence <= messages; ++sequence) {
            if (sequence % 5 == 0 && sequence / 5 % (SIZE - 1) + 1 != rank) continue;  // for one reader only
            const Entry* entry;
            while (!(entry = inbox.peek())) {
                if (unreleased) inbox.release(), unreleased = 0;
                std::this_thread::yield();
            }
            CHECK(entry->sequence == sequence && entry->fingerprint == ~sequence && entry->tile == sequence % 1000);
            CHECK(entry->round == sequence % 50000 && entry->result == 4242);
            const std::byte* bytes = inbox.bytes(*entry);
            CHECK(bytes);
            for (std::size_t i = 0; i < entry->nbytes; ++i) CHECK(bytes[i] == message_byte(sequence, i));
            inbox.take();
            if (++unreleased > random.below(20)) inbox.release(), unreleased = 0;
        }
        inbox.release();
    };
    auto writes = [&] {
        Outbox outbox(arena.data(), REGION, SIZE, STAGING);
        outbox.result = 4242;
        CHECK(arena.directory().publish(GROUP, REGION));
        Random random(99);
        std::vector<std::uint32_t> peers;
        for (std::uint64_t sequence = 1; sequence <= messages; ++sequence) {
            peers = {1, 2, 3};
            if (sequence % 5 == 0) peers = {static_cast<std::uint32_t>(sequence / 5 % (SIZE - 1) + 1)};
            const std::size_t nbytes = 1 + random.below(random.below(2) ? LARGEST : INLINE_BYTES);
            const MessageInfo info{sequence, ~sequence, static_cast<std::uint32_t>(sequence % 1000),
                                static_cast<std::uint32_t>(sequence % 50000), static_cast<std::uint32_t>(nbytes)};
            for (std::uint32_t peer : peers)
                while (!outbox.has_room(peer)) std::this_thread::yield();
            std::byte small[INLINE_BYTES], *to = small;
            if (nbytes > INLINE_BYTES)
                while (!(to = outbox.reserve(nbytes))) std::this_thread::yield();
            for (std::size_t i = 0; i < nbytes; ++i) to[i] = message_byte(sequence, i);
            if (nbytes > INLINE_BYTES) outbox.post_reserved(peers, info);
            else
                for (std::uint32_t peer : peers) outbox.post(peer, info, Place::inlined, 0, small);
        }
        for (std::uint32_t peer = 1; peer < SIZE; ++peer)
            while (!outbox.read_by(peer)) std::this_thread::yield();
    };
    in_threads(SIZE, [&](std::uint32_t rank) { rank ? reads(rank) : writes(); });
}

// On one thread, so that the order of all steps is fixed.
void staging_with_unread_bytes_is_not_reused() {
    constexpr std::size_t STAGING = 4 * LINE;
    Arena arena(3, STAGING);
    Outbox outbox(arena.data(), REGION, 3, STAGING);
    CHECK(arena.directory().publish(GROUP, REGION));
    Inbox fast = arena.inbox(1), slow = arena.inbox(2);
    const std::array<std::uint32_t, 2> both{1, 2};
    auto info = [](std::uint64_t sequence, std::uint32_t nbytes) { return MessageInfo{sequence, 0, 0, 0, nbytes}; };

    CHECK(!outbox.reserve(STAGING + 1));
    for (std::uint64_t turn = 1; turn <= 1000; ++turn) {
        std::byte* first = outbox.reserve(3 * LINE);
        CHECK(first);
        outbox.post_reserved(both, info(2 * turn, 3 * LINE));
        CHECK(!outbox.reserve(2 * LINE));
        for (Inbox* inbox : {&fast, &slow}) {
            CHECK(!outbox.reserve(2 * LINE));
            const Entry* entry = inbox->peek();
            CHECK(entry && entry->sequence == 2 * turn && inbox->bytes(*entry) == first);
            inbox->take();
            CHECK(!inbox->peek());
            CHECK(!outbox.reserve(2 * LINE));  // taken, not released
            inbox->release();
        }
        CHECK(outbox.reserve(2 * LINE));
        outbox.post_reserved(std::array<std::uint32_t, 1>{1}, info(2 * turn + 1, 2 * LINE));
        CHECK(!outbox.read_by(1) && outbox.read_by(2));
        CHECK(fast.peek() && fast.peek()->sequence == 2 * turn + 1);
        fast.take();
        fast.release();
        CHECK(outbox.read_by(1));
    }
}

void lane_when_full_has_no_room_until_its_reader_releases() {
    Arena arena(3, LINE);
    Outbox outbox(arena.data(), REGION, 3, LINE);
    CHECK(arena.directory().publish(GROUP, REGION));
    Inbox slow = arena.inbox(2);
    for (int around = 0; around < 50; ++around) {
        for (std::uint64_t i = 0; i < LANE_ENTRIES; ++i) {
            CHECK(outbox.has_room(2));
            outbox.post(2, MessageInfo{i, 0, 0, 0, 1}, Place::pushed, 0);
        }
        CHECK(!outbox.has_room(2) && outbox.has_room(1));
        CHECK(slow.peek() && slow.peek()->sequence == 0);
        slow.take();
        CHECK(!outbox.has_room(2));
        slow.release();
        CHECK(outbox.has_room(2));
        for (std::uint64_t i = 1; i < LANE_ENTRIES; ++i) {
            CHECK(slow.peek() && slow.peek()->sequence == i);
            slow.take();
        }
        CHECK(!slow.peek());
        slow.release();
        CHECK(outbox.read_by(2));
    }
}

void directory_finds_published_groups_only() {
    Arena arena(1, LINE);
    Directory& directory = arena.directory();
    CHECK(directory.find(5) == 0);
    CHECK(directory.publish(5, 50) && directory.publish(5 + DIRECTORY_SLOTS, 60));  // the same slot
    CHECK(directory.find(5) == 50 && directory.find(5 + DIRECTORY_SLOTS) == 60);
    directory.withdraw(5);
    CHECK(directory.find(5) == 0 && directory.find(5 + DIRECTORY_SLOTS) == 60);
    CHECK(directory.publish(5 + 2 * DIRECTORY_SLOTS, 70));  // in the slot of the first
    CHECK(directory.find(5 + DIRECTORY_SLOTS) == 60 && directory.find(5 + 2 * DIRECTORY_SLOTS) == 70);
    directory.withdraw(5 + DIRECTORY_SLOTS);
    directory.withdraw(5 + 2 * DIRECTORY_SLOTS);
    for (std::uint64_t group = 1; group <= DIRECTORY_SLOTS; ++group) CHECK(directory.publish(group, 1000 + group));
    CHECK(!directory.publish(DIRECTORY_SLOTS + 1, 1));
    for (std::uint64_t group = 1; group <= DIRECTORY_SLOTS; ++group) CHECK(directory.find(group) == 1000 + group);
    CHECK(directory.find(DIRECTORY_SLOTS + 1) == 0);
    directory.withdraw(17);
    CHECK(directory.publish(DIRECTORY_SLOTS + 1, 1) && directory.find(DIRECTORY_SLOTS + 1) == 1);
}

// Groups that hash to the same slot are published and withdrawn: a reader finds a group's own offset or nothing.
void directory_read_during_changes_never_returns_another_group() {
    Arena arena(1, LINE);
    Directory& directory = arena.directory();
    std::atomic<bool> over{false};
    in_threads(3, [&](std::uint32_t rank) {
        if (rank == 0) {
            for (std::uint64_t i = 0; i < 5000u * MANY; ++i) {
                const std::uint64_t group = 3 + i % 4 * DIRECTORY_SLOTS;
                CHECK(directory.publish(group, group * 10));
                if (i % 8 < 4) directory.withdraw(group);
                if (i % 8 == 7)
                    for (std::uint64_t k = 0; k < 4; ++k) directory.withdraw(3 + k * DIRECTORY_SLOTS);
            }
            over = true;
            return;
        }
        while (!over)
            for (std::uint64_t k = 0; k < 4; ++k) {
                const std::uint64_t group = 3 + k * DIRECTORY_SLOTS, found = directory.find(group);
                CHECK(found == 0 || found == group * 10);
            }
    });
}

}  // namespace

int main() {
    RUN(messages_of_random_sizes_arrive_whole_and_in_order);
    RUN(staging_with_unread_bytes_is_not_reused);
    RUN(lane_when_full_has_no_room_until_its_reader_releases);
    RUN(directory_finds_published_groups_only);
    RUN(directory_read_during_changes_never_returns_another_group);
}
