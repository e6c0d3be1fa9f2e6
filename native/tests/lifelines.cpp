// Tests the lifeline (heartbeats in memory, over sockets and in forked children) and page remapping.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "check.hpp"
#include "lifeline.hpp"
#include "pages.hpp"

using namespace gradwire;

namespace {

constexpr double QUICK = 1e-3;

struct Pair {
    Pair() { CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0); }
    ~Pair() { ::close(ends[0]), ::close(ends[1]); }
    std::string read(std::size_t nbytes) {
        std::string found(nbytes, 0);
        for (std::size_t at = 0; at < nbytes;) {
            const ssize_t got = ::recv(ends[1], found.data() + at, nbytes - at, 0);
            CHECK(got > 0);
            at += static_cast<std::size_t>(got);
        }
        return found;
    }
    int ends[2];
};

struct Arena {
    Arena() : memory(static_cast<std::byte*>(std::aligned_alloc(LINE, 65536)), std::free) { std::memset(data(), 0, 65536); }
    std::byte* data() { return memory.get(); }
    std::uint64_t beat() { return Pulse::of(data()).beat.load(std::memory_order_acquire); }
    std::unique_ptr<std::byte, void (*)(void*)> memory;
};

void lifeline_with_an_arena_beats_until_it_stops() {
    Arena arena;
    Lifeline lifeline(QUICK);
    lifeline.write_to(arena.data());
    CHECK(arena.beat() == 0);
    lifeline.start();
    lifeline.start();
    std::uint64_t last = 0;
    for (int beats = 0; beats < 20;) {
        const std::uint64_t beat = arena.beat();
        CHECK(beat >= last);
        if (beat != last) ++beats;
        last = beat;
        std::this_thread::yield();
    }
    lifeline.stop();
    last = arena.beat();
    ::usleep(5000);
    CHECK(arena.beat() == last);
    lifeline.stop();
}

void lifeline_with_tokens_sends_one_per_beat_in_order() {
    Pair same, each;
    Lifeline lifeline(QUICK);
    lifeline.add(same.ends[0], "again;");
    lifeline.add_tokens(each.ends[0], 3, 0);
    lifeline.start();
    std::string expected;
    for (int i = 10; i < 40; i += 2) {
        const std::string tokens = std::to_string(i) + ";" + std::to_string(i + 1) + ";";
        lifeline.feed(each.ends[0], tokens);
        lifeline.feed(each.ends[0], "");
        expected += tokens;
    }
    CHECK(each.read(expected.size()) == expected);
    CHECK(same.read(12) == "again;again;");
    CHECK(lifeline.ahead(each.ends[0]) == 0);
    CHECK(lifeline.ahead(same.ends[0]) == 0);
    CHECK(lifeline.ahead(12345) == 0);
    lifeline.feed(12345, "unknown");
    char more;
    ::usleep(5000);
    CHECK(::recv(each.ends[1], &more, 1, MSG_DONTWAIT) < 0);  // nothing is sent without a token
}

void lifeline_given_a_part_of_a_token_refuses_it() {
    Pair pair;
    Lifeline lifeline(QUICK);
    lifeline.add_tokens(pair.ends[0], 3, 0);
    int refused = 0;
    try { lifeline.feed(pair.ends[0], "four"); } catch (const std::invalid_argument&) { ++refused; }
    try { lifeline.add_tokens(pair.ends[0], 0, 0); } catch (const std::invalid_argument&) { ++refused; }
    CHECK(refused == 2);
    CHECK(lifeline.ahead(pair.ends[0]) == 0);
}

// The record's bytes count the beats. Both links are written in the same beat, in this order.
void lifeline_below_its_mark_sends_tokens_more_slowly() {
    Pair same, each;
    Lifeline lifeline(QUICK);
    lifeline.add(same.ends[0], "x");
    lifeline.add_tokens(each.ends[0], 1, 4);
    lifeline.feed(each.ends[0], "abcdefghi");
    lifeline.start();
    CHECK(each.read(9) == "abcdefghi");
    lifeline.stop();
    char beats[65536];
    const ssize_t count = ::recv(same.ends[1], beats, sizeof beats, MSG_DONTWAIT);
    CHECK(count >= 6 + 3 * 5);  // one token per beat until 3 are left, then one per five beats
}

void lifeline_with_a_full_link_serves_the_others() {
    Pair full, other;
    int small = 1;
    CHECK(::setsockopt(full.ends[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
    const std::string large(300000, 'x'), then(300000, 'y');  // more than its buffer: tokens are written in part
    Lifeline lifeline(QUICK);
    lifeline.add_tokens(full.ends[0], large.size(), 0);
    lifeline.feed(full.ends[0], large + then);
    lifeline.add(other.ends[0], "beat");
    lifeline.start();
    for (int i = 0; i < 20; ++i) CHECK(other.read(4) == "beat");
    CHECK(full.read(large.size()) == large);
    CHECK(full.read(then.size()) == then);
}

void lifeline_after_drop_writes_nothing() {
    Pair pair;
    Lifeline lifeline(QUICK);
    lifeline.add(pair.ends[0], "beat");
    lifeline.start();
    CHECK(pair.read(4) == "beat");
    lifeline.drop(pair.ends[0]);
    char rest[65536];
    while (::recv(pair.ends[1], rest, sizeof rest, MSG_DONTWAIT) > 0) {
    }
    ::usleep(5000);
    CHECK(::recv(pair.ends[1], rest, sizeof rest, MSG_DONTWAIT) < 0);
}

void lifeline_with_a_closed_link_serves_the_others() {
    Pair closed, other;
    Lifeline lifeline(QUICK);
    lifeline.add(closed.ends[0], "beat");
    lifeline.add(other.ends[0], "beat");
    ::shutdown(closed.ends[1], SHUT_RDWR);
    lifeline.start();
    for (int i = 0; i < 10; ++i) CHECK(other.read(4) == "beat");
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not follow forks, and reports a new mapping as a write
void lifeline_in_a_forked_child_does_nothing() {
    Pair pair;
    auto lifeline = std::make_unique<Lifeline>(QUICK);
    lifeline->add(pair.ends[0], "beat");
    lifeline->start();
    for (int i = 0; i < 20; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            lifeline->drop(pair.ends[0]);  // these calls must not wait for the mutex: no thread would unlock it
            lifeline->add(pair.ends[0], "child");
            lifeline->start();
            lifeline->stop();
            CHECK(lifeline->ahead(pair.ends[0]) == 0);
            lifeline.reset();
            ::_exit(7);
        }
        int status = 0;
        CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    }
    for (int i = 0; i < 20; ++i) CHECK(pair.read(4) == "beat");
}

std::uint64_t blocks(int descriptor) {
    struct stat status;
    CHECK(::fstat(descriptor, &status) == 0);
    return static_cast<std::uint64_t>(status.st_blocks);
}

// A thread writes to the pages while they become private: all its writes are there afterwards.
void map_private_during_writes_loses_none() {
    constexpr std::size_t NBYTES = 64 * 4096, WORDS = NBYTES / sizeof(std::uint64_t);
    const int descriptor = ::memfd_create("pages", MFD_CLOEXEC);
    CHECK(descriptor >= 0 && ::ftruncate(descriptor, NBYTES) == 0);
    auto view = [&] {
        void* at = ::mmap(nullptr, NBYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        CHECK(at != MAP_FAILED);
        return static_cast<std::uint64_t*>(at);
    };
    std::uint64_t *mine = view(), *theirs = view();
    std::atomic<bool> started{false}, over{false};
    std::vector<std::uint64_t> written(WORDS);
    std::thread writer([&] {
        for (std::uint64_t number = 1; !over; ++number) {
            const std::size_t word = number * 769 % WORDS;
            __atomic_store_n(&mine[word], number, __ATOMIC_RELAXED);
            written[word] = number;
            started = true;
        }
    });
    while (!started) std::this_thread::yield();
    CHECK(map_private(reinterpret_cast<std::byte*>(mine), NBYTES, descriptor, 0));
    CHECK(blocks(descriptor) == 0);  // the file's memory is freed
    for (std::size_t word = 0; word < WORDS; ++word) __atomic_store_n(&theirs[word], ~0ull, __ATOMIC_RELAXED);
    over = true;
    writer.join();
    for (std::size_t word = 0; word < WORDS; ++word) CHECK(mine[word] == written[word]);
    CHECK(map_shared(reinterpret_cast<std::byte*>(mine), NBYTES, descriptor, 0));
    for (std::size_t word = 0; word < WORDS; ++word) CHECK(mine[word] == ~0ull);
    CHECK(!map_private(reinterpret_cast<std::byte*>(mine), NBYTES, -1, 0));
    ::munmap(mine, NBYTES), ::munmap(theirs, NBYTES), ::close(descriptor);
}
#endif

}  // namespace

int main() {
    RUN(lifeline_with_an_arena_beats_until_it_stops);
    RUN(lifeline_with_tokens_sends_one_per_beat_in_order);
    RUN(lifeline_given_a_part_of_a_token_refuses_it);
    RUN(lifeline_below_its_mark_sends_tokens_more_slowly);
    RUN(lifeline_with_a_full_link_serves_the_others);
    RUN(lifeline_after_drop_writes_nothing);
    RUN(lifeline_with_a_closed_link_serves_the_others);
#if !defined(__SANITIZE_THREAD__)
    RUN(lifeline_in_a_forked_child_does_nothing);
    RUN(map_private_during_writes_loses_none);
#endif
}
