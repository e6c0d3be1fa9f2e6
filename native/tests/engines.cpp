// Tests programs of several engines, each in its own thread: through memory, over sockets, and both at once.
#include "ranks.hpp"

using namespace gradwire;

namespace {

constexpr double LONG = 60;  // seconds: a bound for calls that take microseconds

// Numbers whose sums are exact in every type, different for each rank, call and element.
std::int64_t value(std::uint32_t rank, std::size_t call, std::size_t i) {
    return static_cast<std::int64_t>((call + i) % 16 + rank + 1);
}
std::int64_t sum(std::uint32_t size, std::size_t call, std::size_t i) {
    return size * static_cast<std::int64_t>((call + i) % 16) + size * (size + 1) / 2;
}
struct BFloat {
    std::uint16_t bits;
    static BFloat of(std::int64_t number) {
        const float wide = static_cast<float>(number);
        std::uint32_t bits;
        std::memcpy(&bits, &wide, sizeof bits);
        return {static_cast<std::uint16_t>(bits >> 16)};
    }
    bool operator==(const BFloat&) const = default;
};
template <class T>
T number(std::int64_t of) {
    if constexpr (std::is_same_v<T, BFloat>) return BFloat::of(of);
    else return static_cast<T>(of);
}

void finish(Engine& engine) {
    const Status status = engine.advance(LONG);
    if (status != Status::done) std::fprintf(stderr, "status %d, culprit %u\n", static_cast<int>(status), engine.culprit);
    CHECK(status == Status::done);
}

enum class Where { ordinary, in_place, arena, arena_in_place, into_arena };
constexpr int PLACES = 5;

// One all-reduce. All ranks draw the same kind of call; each rank draws the memory of its arrays itself.
template <class T>
void reduce_once(Ranks& ranks, std::uint32_t rank, std::size_t call, std::size_t count, bool direct, DType dtype, Where where) {
    const Program program = direct ? two_shot(rank, ranks.size, count, dtype) : one_shot(rank, ranks.size, count, dtype);
    std::vector<T> in(count), out(count);
    T* registered = reinterpret_cast<T*>(ranks.array(rank));
    T *from = in.data(), *to = out.data();
    if (where == Where::arena || where == Where::arena_in_place) from = registered;
    if (where == Where::in_place || where == Where::arena_in_place) to = from;
    if (where == Where::arena) to = registered + (ARRAYS / 2) / sizeof(T);
    if (where == Where::into_arena) to = registered;
    for (std::size_t i = 0; i < count; ++i) from[i] = number<T>(value(rank, call, i));
    ranks.engine(rank).begin(program, from, to, call + 1, 1000 + count, 0);
    finish(ranks.engine(rank));
    for (std::size_t i = 0; i < count; ++i) CHECK(to[i] == number<T>(sum(ranks.size, call, i)));
    // The caller may write its arrays again: ThreadSanitizer reports any later access of the engines.
    for (std::size_t i = 0; i < count; ++i) from[i] = to[i] = number<T>(0);
}

void reduce_often(const std::string& hosts, std::size_t calls) {
    Ranks ranks(hosts);
    in_threads(ranks.size, [&](std::uint32_t rank) {
        ranks.open(rank);
        Random common(hosts.size() + 7), own(rank);
        for (std::size_t call = 0; call < calls; ++call) {
            const std::size_t most = common.below(4) ? 600 : 12000;
            const std::size_t count = 1 + common.below(most);
            const bool direct = common.below(2) || count > 1500;
            const auto where = static_cast<Where>(own.below(PLACES));
            switch (common.below(3)) {
                case 0: reduce_once<std::int64_t>(ranks, rank, call, count, direct, DType::i64, where); break;
                case 1: reduce_once<float>(ranks, rank, call, count, direct, DType::f32, where); break;
                default: reduce_once<BFloat>(ranks, rank, call, count, direct, DType::bf16, where); break;
            }
        }
    });
}

void all_reduce_of_two_ranks_in_shared_memory() { reduce_often("aa", 400 * MANY); }
void all_reduce_of_three_ranks_in_shared_memory() { reduce_often("aaa", 300 * MANY); }
void all_reduce_of_four_ranks_in_shared_memory() { reduce_often("aaaa", 200 * MANY); }
void all_reduce_of_three_ranks_over_sockets() { reduce_often("abc", 150 * MANY); }
void all_reduce_of_four_ranks_on_two_hosts() { reduce_often("aabb", 150 * MANY); }
void all_reduce_of_four_ranks_of_which_three_share_memory() { reduce_often("abaa", 150 * MANY); }

// Lanes wrap around many times, and ranks run ahead of each other.
void all_reduce_of_8_bytes_repeated() {
    Ranks ranks("aaa");
    in_threads(ranks.size, [&](std::uint32_t rank) {
        ranks.open(rank);
        const Program program = one_shot(rank, ranks.size, 1, DType::i64);
        for (std::int64_t call = 0; call < 3000 * MANY; ++call) {
            std::int64_t x = call + rank;
            ranks.engine(rank).begin(program, &x, &x, static_cast<std::uint64_t>(call) + 1, 5, 0);
            finish(ranks.engine(rank));
            CHECK(x == 3 * call + 3);
        }
    });
}

// Rank 0 sends and receives nothing back: it runs ahead until lanes and staging are full.
void sender_ahead_of_its_receivers_waits_for_room() {
    Ranks ranks("aaa");
    in_threads(ranks.size, [&](std::uint32_t rank) {
        ranks.open(rank);
        Random random(3);
        for (std::uint64_t call = 1; call <= 1000u * MANY; ++call) {
            const std::size_t count = 1 + random.below(random.below(2) ? 1000 : 2);
            Program program;
            program.rounds.resize(1);
            program.rounds[0].push_back(rank ? Operation::recv(output(0), 0) : Operation::send(input(0), {1, 2}));
            bind(program, 1, 0, count, DType::i64);
            program.prepare();
            std::vector<std::uint64_t> x(count, rank ? 0 : call);
            ranks.engine(rank).begin(program, x.data(), x.data(), call, 5, 0);
            finish(ranks.engine(rank));
            for (std::uint64_t one : x) CHECK(one == call);
        }
        while (!ranks.engine(rank).withdraw()) std::this_thread::yield();
    });
}

// Rank 0 folds messages of the others, which run ahead and overwrite their arrays as soon as they may.
void root_behind_its_senders_folds_their_original_bytes() {
    Ranks ranks("aaa");
    in_threads(ranks.size, [&](std::uint32_t rank) {
        ranks.open(rank);
        Random common(5), own(rank);
        for (std::uint64_t call = 1; call <= 1000u * MANY; ++call) {
            const std::size_t count = 1 + common.below(common.below(2) ? 1000 : 2);
            Program program;
            program.rounds.resize(1);
            program.rounds[0].push_back(rank ? Operation::send(input(0), {0}) : fold(0, 0, ranks.size));
            bind(program, 1, 0, count, DType::i64);
            program.prepare();
            std::vector<std::uint64_t> ordinary(count);
            const bool registered = own.below(2);
            auto* x = registered ? reinterpret_cast<std::uint64_t*>(ranks.array(rank)) : ordinary.data();
            std::fill(x, x + count, call + rank);
            ranks.engine(rank).begin(program, x, x, call, 5, 0);
            finish(ranks.engine(rank));
            for (std::size_t i = 0; i < count; ++i) CHECK(x[i] == (rank ? call + rank : 3 * call + 3));
        }
        while (!ranks.engine(rank).withdraw()) std::this_thread::yield();
    });
}

void advance_after_a_wait_resumes() {
    for (const char* hosts : {"aa", "ab"}) {
        Ranks ranks(hosts);
        for (std::uint32_t rank : {0u, 1u}) ranks.open(rank);
        for (const std::size_t count : {1u, 5000u}) {
            Program programs[2];
            std::vector<std::int64_t> x[2];
            for (std::uint32_t rank : {0u, 1u}) {
                programs[rank] = count == 1 ? one_shot(rank, 2, count, DType::i64) : two_shot(rank, 2, count, DType::i64);
                x[rank].assign(count, rank + 1);
            }
            ranks.engine(0).begin(programs[0], x[0].data(), x[0].data(), count, 5, 0);
            for (int turn = 0; turn < 3; ++turn) CHECK(ranks.engine(0).advance(0.001) == Status::waiting);
            ranks.engine(1).begin(programs[1], x[1].data(), x[1].data(), count, 5, 0);
            // Alternately on one thread: neither engine needs the other to run concurrently.
            bool done[2] = {false, false};
            for (int turn = 0; turn < 100000 && !(done[0] && done[1]); ++turn)
                if (!done[turn % 2]) done[turn % 2] = ranks.engine(turn % 2).advance(0) == Status::done;
            CHECK(done[0] && done[1]);
            for (std::size_t i = 0; i < count; ++i) CHECK(x[0][i] == 3 && x[1][i] == 3);
        }
    }
}

void alarm_during_a_wait_ends_it() {
    for (const char* hosts : {"aa", "ab"})
        for (const std::size_t count : {1u, 5000u})
            for (const double spin_seconds : {0.0, 1e-3, 50e-3}) {
                Ranks ranks(hosts);
                ranks.open(0);
                const Program program = count == 1 ? one_shot(0, 2, count, DType::i64) : two_shot(0, 2, count, DType::i64);
                std::vector<std::int64_t> x(count);
                ranks.engine(0).begin(program, x.data(), x.data(), 1, 5, spin_seconds);
                CHECK(ranks.engine(0).advance(0.005) == Status::waiting);
                std::thread other([&] { ranks.raise_alarm(0); });
                CHECK(ranks.engine(0).advance(LONG) == Status::alarmed);
                other.join();
            }
}

// Rank 0 exposes its array to rank 1, then reclaims it: rank 1 must neither finish nor send the bytes to another rank.
void array_reclaimed_by_its_owner_stalls_its_reader() {
    constexpr std::size_t COUNT = 4096;
    for (const bool reclaims : {false, true})
        for (const bool reduces : {false, true}) {
            Ranks ranks("aa");
            Program programs[2];
            std::vector<std::int64_t> x(COUNT, 1);
            for (std::uint32_t rank : {0u, 1u}) {
                ranks.open(rank);
                if (reduces) {
                    programs[rank] = one_shot(rank, 2, COUNT, DType::i64);
                    programs[rank].one_shot = true;
                } else {  // rank 0 sends, rank 1 receives
                    programs[rank].rounds.resize(1);
                    programs[rank].rounds[0].push_back(rank ? Operation::recv(output(0), 0) : Operation::send(input(0), {1}));
                    bind(programs[rank], 1, 0, COUNT, DType::i64);
                    programs[rank].prepare();
                }
            }
            auto* mine = reinterpret_cast<std::int64_t*>(ranks.array(0));
            std::fill_n(mine, COUNT, 2);
            ranks.engine(0).begin(programs[0], mine, mine, 1, 5, 0);
            CHECK(ranks.engine(0).advance(0) == Status::waiting);
            ranks.engine(1).begin(programs[1], x.data(), x.data(), 1, 5, 0);
            if (reclaims) Pulse::of(ranks.arena(0)).reclaimed.store(1);
            Status status = ranks.engine(1).advance(0);
            for (int turn = 0; turn < 100 && status == Status::waiting && !reclaims; ++turn) {
                ranks.engine(0).advance(0);
                status = ranks.engine(1).advance(0);
            }
            CHECK(status == (reclaims ? Status::waiting : Status::done));
            if (!reclaims) CHECK(x.back() == (reduces ? 3 : 2));
            if (!reclaims) continue;
            CHECK(ranks.engine(1).advance(0.002) == Status::waiting);
            ranks.raise_alarm(1);
            CHECK(ranks.engine(1).advance(LONG) == Status::alarmed);
        }
}

void link_closed_by_a_peer_reports_it_lost() {
    Ranks ranks("aba");
    for (std::uint32_t rank : {0u, 2u}) ranks.open(rank);
    CHECK(::shutdown(ranks.socket(1, 0), SHUT_RDWR) == 0);
    const Program program = two_shot(0, 3, 5000, DType::i64);
    std::vector<std::int64_t> x(5000);
    ranks.engine(0).begin(program, x.data(), x.data(), 1, 5, 0);
    CHECK(ranks.engine(0).advance(LONG) == Status::lost && ranks.engine(0).culprit == 1);
}

}  // namespace

int main() {
    RUN(all_reduce_of_two_ranks_in_shared_memory);
    RUN(all_reduce_of_three_ranks_in_shared_memory);
    RUN(all_reduce_of_four_ranks_in_shared_memory);
    RUN(all_reduce_of_three_ranks_over_sockets);
    RUN(all_reduce_of_four_ranks_on_two_hosts);
    RUN(all_reduce_of_four_ranks_of_which_three_share_memory);
    RUN(all_reduce_of_8_bytes_repeated);
    RUN(sender_ahead_of_its_receivers_waits_for_room);
    RUN(root_behind_its_senders_folds_their_original_bytes);
    RUN(advance_after_a_wait_resumes);
    RUN(alarm_during_a_wait_ends_it);
    RUN(array_reclaimed_by_its_owner_stalls_its_reader);
    RUN(link_closed_by_a_peer_reports_it_lost);
}
