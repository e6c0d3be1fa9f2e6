// What a peer must not say is reported, and never followed out of its arena. Rank 1 misbehaves, by hand.
#include "ranks.hpp"

using namespace gradwire;

namespace {

constexpr double LONG = 60;
constexpr std::uint64_t SEQUENCE = 7, FINGERPRINT = 99;

struct Case {
    explicit Case(std::size_t count, bool direct = false, const char* hosts = "aa")
        : ranks(hosts),
          program(direct ? two_shot(0, 2, count, DType::i64) : one_shot(0, 2, count, DType::i64)),
          nbytes(static_cast<std::uint32_t>((direct ? static_cast<std::size_t>(program.lengths[0]) : count) * 8)),
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
    Letter letter() const { return {SEQUENCE, FINGERPRINT, 0, 0, nbytes}; }

    Ranks ranks;
    Program program;
    std::uint32_t nbytes;  // of a message
    std::vector<std::int64_t> x;
    Outbox theirs;
};

// The program with one thing wrong in what rank 1 says.
template <class Change>
void expect_mismatch(std::size_t count, bool direct, Place place, std::uint64_t offset, Change change) {
    Case one(count, direct);
    Letter letter = one.letter();
    change(letter);
    one.theirs.post(0, letter, place, offset);
    CHECK(one.run() == Status::mismatch);
    const Engine& engine = one.ranks.engine(0);
    CHECK(engine.culprit == 1 && engine.heard.source == 1 && engine.heard.sequence == letter.sequence);
    CHECK(engine.heard.fingerprint == letter.fingerprint && engine.heard.nbytes == letter.nbytes);
}

void other_calls_are_mismatches() {
    for (const bool direct : {false, true}) {
        const std::size_t count = direct ? 1000 : 300;
        expect_mismatch(count, direct, Place::away, DIRECTORY_BYTES, [](Letter& letter) { ++letter.fingerprint; });
        expect_mismatch(count, direct, Place::away, DIRECTORY_BYTES, [](Letter& letter) { ++letter.sequence; });
        expect_mismatch(count, direct, Place::away, DIRECTORY_BYTES, [](Letter& letter) { ++letter.tile; });
        expect_mismatch(count, direct, Place::away, DIRECTORY_BYTES, [](Letter& letter) { ++letter.round; });
        expect_mismatch(count, direct, Place::away, DIRECTORY_BYTES, [](Letter& letter) { letter.nbytes += 8; });
        expect_mismatch(count, direct, Place::away, DIRECTORY_BYTES, [](Letter& letter) { letter.nbytes = ~0u; });
    }
}

void bytes_outside_the_arena_are_not_read() {
    auto nothing = [](Letter&) {};
    const std::uint64_t end = Ranks("aa").nbytes;
    for (const bool direct : {false, true}) {
        const std::size_t count = direct ? 1000 : 300;
        for (const std::uint64_t offset : {end, end - 8, end + 4096, ~std::uint64_t{0}, ~std::uint64_t{0} - 2000})
            expect_mismatch(count, direct, Place::away, offset, nothing);
        // More than an entry has room for, and what nobody has asked to be put anywhere.
        expect_mismatch(count, direct, Place::here, 0, nothing);
        expect_mismatch(count, direct, Place::there, 0, nothing);
    }
}

// A term that is said to be "there" although terms have no place of their own.
void a_term_is_never_there() {
    Case one(1000, true);
    one.theirs.post(0, one.letter(), Place::there, ~std::uint64_t{0} - 8);
    one.begin(one.ranks.array(0));  // rank 0's result lies in its arena: peers may write it
    CHECK(one.ranks.engine(0).advance(LONG) == Status::mismatch);
}

// Where rank 1's result goes, as it says, is written to only in its arena.
void results_outside_the_arena_are_not_written() {
    for (const std::uint64_t result : {~std::uint64_t{0}, ~std::uint64_t{0} - 4000, Ranks("aa").nbytes - 8}) {
        Case one(2000, true);
        CHECK(one.nbytes > 4096);
        one.theirs.result = result;
        std::byte* terms = one.theirs.reserve(2 * TILE_BYTES);
        std::memset(terms, 0, 2 * TILE_BYTES);
        const std::uint64_t at = static_cast<std::uint64_t>(terms - one.ranks.arena(1));
        const auto rest = static_cast<std::uint32_t>(one.nbytes - TILE_BYTES);
        const auto back = static_cast<std::uint32_t>(8 * one.program.lengths[1] - TILE_BYTES);
        one.theirs.post(0, {SEQUENCE, FINGERPRINT, 0, 0, TILE_BYTES}, Place::away, at);
        one.theirs.post(0, {SEQUENCE, FINGERPRINT, 1, 0, rest}, Place::away, at);
        one.theirs.post(0, {SEQUENCE, FINGERPRINT, 0, 2, TILE_BYTES}, Place::away, at);
        one.theirs.post(0, {SEQUENCE, FINGERPRINT, 1, 2, back}, Place::away, at);
        CHECK(one.run() == Status::done);
    }
}

void regions_outside_the_arena_are_not_found() {
    for (const std::uint64_t region : {std::uint64_t{DIRECTORY_BYTES + 4}, Ranks("aa").nbytes, ~std::uint64_t{0} - 63}) {
        Case one(300);
        auto* directory = reinterpret_cast<Directory*>(one.ranks.arena(1));
        directory->withdraw(GROUP);
        CHECK(directory->publish(GROUP, region));
        one.begin(one.x.data());
        CHECK(one.ranks.engine(0).advance(0.002) == Status::waiting);
    }
}

void other_headers_are_mismatches() {
    Case one(300, false, "ab");
    const Header header = Sheet{9, 1, GROUP, 1, SEQUENCE, FINGERPRINT + 1}.header(1, 0, 0, one.nbytes);
    CHECK(::send(one.ranks.socket(1, 0), &header, sizeof header, 0) == sizeof header);
    CHECK(one.run() == Status::mismatch && one.ranks.engine(0).culprit == 1);
    CHECK(one.ranks.engine(0).heard.fingerprint == FINGERPRINT + 1);
}

#ifndef __SANITIZE_THREAD__  // it would say that rank 1 does not keep to the protocol
// An entry that changes while it is read: whatever is believed, it was checked.
void what_was_checked_stays_as_it_was() {
    Case one(64);
    Entry& entry = reinterpret_cast<Lane*>(one.ranks.arena(1) + one.ranks.region())->entries[0];
    volatile std::uint64_t& offset = entry.offset;
    volatile std::uint32_t& nbytes = entry.nbytes;
    one.theirs.post(0, one.letter(), Place::away, DIRECTORY_BYTES);
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
    RUN(other_calls_are_mismatches);
    RUN(bytes_outside_the_arena_are_not_read);
    RUN(a_term_is_never_there);
    RUN(results_outside_the_arena_are_not_written);
    RUN(regions_outside_the_arena_are_not_found);
    RUN(other_headers_are_mismatches);
#ifndef __SANITIZE_THREAD__
    RUN(what_was_checked_stays_as_it_was);
#endif
}
