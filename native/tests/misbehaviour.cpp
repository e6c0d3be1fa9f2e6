// Tests that invalid messages of a peer are reported, and that no offset leads out of its arena. Rank 1 misbehaves.
#include "ranks.hpp"

using namespace gradwire;

namespace {

constexpr double LONG = 60;
constexpr std::uint64_t SEQUENCE = 7, FINGERPRINT = 99;

struct Case {
    explicit Case(std::size_t count, bool direct = false, const char* hosts = "aa")
        : ranks(hosts),
          program(direct ? two_shot(0, 2, count, DType::i64) : one_shot(0, 2, count, DType::i64)),
          nbytes(static_cast<std::uint32_t>((direct ? static_cast<std::size_t>(program.segments.lengths[0]) : count) * 8)),
          x(count, 1),
          theirs(ranks.arena(1), ranks.region(), 2, STAGING) {
        ranks.open(0);
        CHECK(reinterpret_cast<Directory*>(ranks.arena(1))->publish(GROUP, ranks.region()));
    }
    void begin(void* data) { ranks.engine(0).begin(program, data, data, SEQUENCE, FINGERPRINT, 0); }
    Status run() {
        begin(x.data());
        return ranks.engine(0).advance(LONG);
    }
    MessageInfo info() const { return {SEQUENCE, FINGERPRINT, 0, 0, nbytes}; }

    Ranks ranks;
    Program program;
    std::uint32_t nbytes;  // of a message
    std::vector<std::int64_t> x;
    Outbox theirs;
};

// Runs the program with one wrong field in rank 1's message.
template <class Change>
void expect_mismatch(std::size_t count, bool direct, Place place, std::uint64_t offset, Change change) {
    Case one(count, direct);
    MessageInfo info = one.info();
    change(info);
    one.theirs.post(0, info, place, offset);
    CHECK(one.run() == Status::mismatch);
    const Engine& engine = one.ranks.engine(0);
    CHECK(engine.culprit == 1 && engine.received_header.source == 1 && engine.received_header.sequence == info.sequence);
    CHECK(engine.received_header.fingerprint == info.fingerprint && engine.received_header.nbytes == info.nbytes);
}

void entry_of_another_call_is_a_mismatch() {
    for (const bool direct : {false, true}) {
        const std::size_t count = direct ? 1000 : 300;
        expect_mismatch(count, direct, Place::exposed, DIRECTORY_BYTES, [](MessageInfo& info) { ++info.fingerprint; });
        expect_mismatch(count, direct, Place::exposed, DIRECTORY_BYTES, [](MessageInfo& info) { ++info.sequence; });
        expect_mismatch(count, direct, Place::exposed, DIRECTORY_BYTES, [](MessageInfo& info) { ++info.tile; });
        expect_mismatch(count, direct, Place::exposed, DIRECTORY_BYTES, [](MessageInfo& info) { ++info.round; });
        expect_mismatch(count, direct, Place::exposed, DIRECTORY_BYTES, [](MessageInfo& info) { info.nbytes += 8; });
        expect_mismatch(count, direct, Place::exposed, DIRECTORY_BYTES, [](MessageInfo& info) { info.nbytes = ~0u; });
    }
}

void entry_with_bytes_outside_the_arena_is_a_mismatch() {
    auto nothing = [](MessageInfo&) {};
    const std::uint64_t end = Ranks("aa").nbytes;
    for (const bool direct : {false, true}) {
        const std::size_t count = direct ? 1000 : 300;
        for (const std::uint64_t offset : {end, end - 8, end + 4096, ~std::uint64_t{0}, ~std::uint64_t{0} - 2000})
            expect_mismatch(count, direct, Place::exposed, offset, nothing);
        // More inline bytes than an entry has, and a pushed message although rank 0 has not sent the offset of its
        // result.
        expect_mismatch(count, direct, Place::inlined, 0, nothing);
        expect_mismatch(count, direct, Place::pushed, 0, nothing);
    }
}

// A term cannot be pushed: it has no memory of its own.
void entry_that_claims_a_pushed_term_is_a_mismatch() {
    Case one(1000, true);
    one.theirs.post(0, one.info(), Place::pushed, ~std::uint64_t{0} - 8);
    one.begin(one.ranks.array(0));  // rank 0's result lies in its arena, so peers may push it
    CHECK(one.ranks.engine(0).advance(LONG) == Status::mismatch);
}

// Rank 1 announces a result outside its arena.
void result_offset_outside_the_arena_is_not_written() {
    for (const std::uint64_t result : {~std::uint64_t{0}, ~std::uint64_t{0} - 4000, Ranks("aa").nbytes - 8}) {
        Case one(2000, true);
        CHECK(one.nbytes > 4096);
        one.theirs.result = result;
        std::byte* terms = one.theirs.reserve(2 * TILE_BYTES);
        std::memset(terms, 0, 2 * TILE_BYTES);
        const std::uint64_t at = static_cast<std::uint64_t>(terms - one.ranks.arena(1));
        const auto rest = static_cast<std::uint32_t>(one.nbytes - TILE_BYTES);
        const auto back = static_cast<std::uint32_t>(8 * one.program.segments.lengths[1] - TILE_BYTES);
        one.theirs.post(0, {SEQUENCE, FINGERPRINT, 0, 0, TILE_BYTES}, Place::exposed, at);
        one.theirs.post(0, {SEQUENCE, FINGERPRINT, 1, 0, rest}, Place::exposed, at);
        one.theirs.post(0, {SEQUENCE, FINGERPRINT, 0, 2, TILE_BYTES}, Place::exposed, at);
        one.theirs.post(0, {SEQUENCE, FINGERPRINT, 1, 2, back}, Place::exposed, at);
        CHECK(one.run() == Status::done);
    }
}

void region_outside_the_arena_is_not_found() {
    for (const std::uint64_t region : {std::uint64_t{DIRECTORY_BYTES + 4}, Ranks("aa").nbytes, ~std::uint64_t{0} - 63}) {
        Case one(300);
        auto* directory = reinterpret_cast<Directory*>(one.ranks.arena(1));
        directory->withdraw(GROUP);
        CHECK(directory->publish(GROUP, region));
        one.begin(one.x.data());
        CHECK(one.ranks.engine(0).advance(0.002) == Status::waiting);
    }
}

void header_of_another_call_is_a_mismatch() {
    Case one(300, false, "ab");
    CallHeader call = call_header(1);
    call.sequence = SEQUENCE;
    call.fingerprint = FINGERPRINT + 1;
    const Header header = call.header(1, 0, 0, one.nbytes);
    CHECK(::send(one.ranks.socket(1, 0), &header, sizeof header, 0) == sizeof header);
    CHECK(one.run() == Status::mismatch && one.ranks.engine(0).culprit == 1);
    CHECK(one.ranks.engine(0).received_header.fingerprint == FINGERPRINT + 1);
}

#ifndef __SANITIZE_THREAD__  // ThreadSanitizer would report that rank 1 violates the protocol
// An entry changes while it is read: the engine uses only the copy that it has checked.
void entry_changed_after_its_check_has_no_effect() {
    Case one(64);
    Entry& entry = reinterpret_cast<Lane*>(one.ranks.arena(1) + one.ranks.region())->entries[0];
    volatile std::uint64_t& offset = entry.offset;
    volatile std::uint32_t& nbytes = entry.nbytes;
    one.theirs.post(0, one.info(), Place::exposed, DIRECTORY_BYTES);
    std::atomic<bool> over{false};
    std::thread changes([&] {
        while (!over) {
            offset = std::uint64_t{1} << 60;
            nbytes = 8;
            offset = DIRECTORY_BYTES;
            nbytes = 512;
        }
    });
    for (int turn = 0; turn < 20000 * MANY; ++turn) {
        Inbox inbox(one.ranks.arena(1), one.ranks.nbytes, GROUP, 0);
        const Entry* copy = inbox.peek();
        CHECK(copy);
        const std::byte* bytes = inbox.bytes(*copy);
        CHECK((bytes != nullptr) == (inbox.bytes(*copy) != nullptr));
        CHECK(!bytes || (copy->offset == DIRECTORY_BYTES && bytes == one.ranks.arena(1) + DIRECTORY_BYTES));
    }
    over = true;
    changes.join();
}
#endif

}  // namespace

int main() {
    RUN(entry_of_another_call_is_a_mismatch);
    RUN(entry_with_bytes_outside_the_arena_is_a_mismatch);
    RUN(entry_that_claims_a_pushed_term_is_a_mismatch);
    RUN(result_offset_outside_the_arena_is_not_written);
    RUN(region_outside_the_arena_is_not_found);
    RUN(header_of_another_call_is_a_mismatch);
#ifndef __SANITIZE_THREAD__
    RUN(entry_changed_after_its_check_has_no_effect);
#endif
}
