// The lifeline: beats in memory and over sockets, and children that have none of it. And pages that are left behind.
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

void beats_are_seen_in_memory_until_it_stops() {
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

void tokens_come_one_for_each_beat_and_in_order() {
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
    lifeline.feed(12345, "nobody's");
    char more;
    ::usleep(5000);
    CHECK(::recv(each.ends[1], &more, 1, MSG_DONTWAIT) < 0);  // none is made up
}

void parts_of_tokens_are_refused() {
    Pair pair;
    Lifeline lifeline(QUICK);
    lifeline.add_tokens(pair.ends[0], 3, 0);
    int refused = 0;
    try { lifeline.feed(pair.ends[0], "four"); } catch (const std::invalid_argument&) { ++refused; }
    try { lifeline.add_tokens(pair.ends[0], 0, 0); } catch (const std::invalid_argument&) { ++refused; }
    CHECK(refused == 2);
    CHECK(lifeline.ahead(pair.ends[0]) == 0);
}

// The record tells how many beats there were meanwhile. Both links are written to in the same beat, in this order.
void a_stock_that_is_not_filled_up_is_used_more_slowly() {
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
    CHECK(count >= 6 + 3 * 5);  // down to 3 that are left, one for each; then one for five
}

void whoever_does_not_read_holds_nobody_up() {
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

void what_was_dropped_is_not_written_to() {
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

void a_peer_that_is_gone_ends_its_link_only() {
    Pair gone, other;
    Lifeline lifeline(QUICK);
    lifeline.add(gone.ends[0], "beat");
    lifeline.add(other.ends[0], "beat");
    ::shutdown(gone.ends[1], SHUT_RDWR);
    lifeline.start();
    for (int i = 0; i < 10; ++i) CHECK(other.read(4) == "beat");
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow forks of threads, and takes a new mapping for a write
void children_do_not_beat_and_end_in_peace() {
    Pair pair;
    auto lifeline = std::make_unique<Lifeline>(QUICK);
    lifeline->add(pair.ends[0], "beat");
    lifeline->start();
    for (int i = 0; i < 20; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            lifeline->drop(pair.ends[0]);  // none of it waits for a lock that nobody will release
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

// Threads write to the pages while they are left behind: all that they wrote is there afterwards.
void nothing_is_lost_of_pages_that_are_left_behind() {
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
    CHECK(map_alone(reinterpret_cast<std::byte*>(mine), NBYTES, descriptor, 0));
    CHECK(blocks(descriptor) == 0);  // the file has given its memory back
    for (std::size_t word = 0; word < WORDS; ++word) __atomic_store_n(&theirs[word], ~0ull, __ATOMIC_RELAXED);
    over = true;
    writer.join();
    for (std::size_t word = 0; word < WORDS; ++word) CHECK(mine[word] == written[word]);
    CHECK(map_jointly(reinterpret_cast<std::byte*>(mine), NBYTES, descriptor, 0));
    for (std::size_t word = 0; word < WORDS; ++word) CHECK(mine[word] == ~0ull);
    CHECK(!map_alone(reinterpret_cast<std::byte*>(mine), NBYTES, -1, 0));
    ::munmap(mine, NBYTES), ::munmap(theirs, NBYTES), ::close(descriptor);
}
#endif

}  // namespace

int main() {
    RUN(beats_are_seen_in_memory_until_it_stops);
    RUN(tokens_come_one_for_each_beat_and_in_order);
    RUN(parts_of_tokens_are_refused);
    RUN(a_stock_that_is_not_filled_up_is_used_more_slowly);
    RUN(whoever_does_not_read_holds_nobody_up);
    RUN(what_was_dropped_is_not_written_to);
    RUN(a_peer_that_is_gone_ends_its_link_only);
#if !defined(__SANITIZE_THREAD__)
    RUN(children_do_not_beat_and_end_in_peace);
    RUN(nothing_is_lost_of_pages_that_are_left_behind);
#endif
}
