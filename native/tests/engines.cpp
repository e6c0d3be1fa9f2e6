// Programs of several engines, each in a thread of its own: through memory, over sockets, and both at once.
#include "ranks.hpp"

using namespace gradwire;

namespace {

constexpr double LONG = 60;  // seconds: a bound for what takes microseconds

// Numbers that every type adds up exactly, different for each rank, call and element.
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

// One all-reduce; all ranks draw the same kind of call, but where its arrays lie is each rank's own affair.
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
    // It is the caller's again: whoever still reads or writes it is found by ThreadSanitizer.
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

void two_ranks_share_memory() { reduce_often("aa", 400 * MANY); }
void three_ranks_share_memory() { reduce_often("aaa", 300 * MANY); }
void four_ranks_share_memory() { reduce_often("aaaa", 200 * MANY); }
void three_ranks_use_sockets() { reduce_often("abc", 150 * MANY); }
void four_ranks_on_two_hosts() { reduce_often("aabb", 150 * MANY); }
void three_of_four_ranks_share_memory() { reduce_often("abaa", 150 * MANY); }

// Nothing but 8 bytes, over and over: lanes go around, and ranks run ahead of each other.
void tiny_calls() {
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

// Messages of one rank to the others, who need not answer: it runs ahead until lanes and staging are full.
void a_sender_runs_ahead() {
    Ranks ranks("aaa");
    in_threads(ranks.size, [&](std::uint32_t rank) {
        ranks.open(rank);
        Random random(3);
        for (std::uint64_t call = 1; call <= 1000u * MANY; ++call) {
            const std::size_t count = 1 + random.below(random.below(2) ? 1000 : 2);
            Program program;
            program.rounds.resize(1);
            program.rounds[0].push_back(rank ? recv({1, 0, 1}, 0) : send({0, 0, 1}, {1, 2}));
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

// Messages to one rank, which folds them: senders run ahead, and change what they have sent, as soon as they may.
void a_root_falls_behind() {
    Ranks ranks("aaa");
    in_threads(ranks.size, [&](std::uint32_t rank) {
        ranks.open(rank);
        Random common(5), own(rank);
        for (std::uint64_t call = 1; call <= 1000u * MANY; ++call) {
            const std::size_t count = 1 + common.below(common.below(2) ? 1000 : 2);
            Program program;
            program.rounds.resize(1);
            program.rounds[0].push_back(rank ? send({0, 0, 1}, {0}) : fold(0, 0, ranks.size));
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

void waiting_can_be_resumed() {
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
            // In turns, on one thread: neither depends on the other to be awake.
            bool done[2] = {false, false};
            for (int turn = 0; turn < 100000 && !(done[0] && done[1]); ++turn)
                if (!done[turn % 2]) done[turn % 2] = ranks.engine(turn % 2).advance(0) == Status::done;
            CHECK(done[0] && done[1]);
            for (std::size_t i = 0; i < count; ++i) CHECK(x[0][i] == 3 && x[1][i] == 3);
        }
    }
}

void the_alarm_ends_a_wait() {
    for (const char* hosts : {"aa", "ab"})
        for (const std::size_t count : {1u, 5000u})
            for (const double awake_for : {0.0, 1e-3, 50e-3}) {
                Ranks ranks(hosts);
                ranks.open(0);
                const Program program = count == 1 ? one_shot(0, 2, count, DType::i64) : two_shot(0, 2, count, DType::i64);
                std::vector<std::int64_t> x(count);
                ranks.engine(0).begin(program, x.data(), x.data(), 1, 5, awake_for);
                CHECK(ranks.engine(0).advance(0.005) == Status::waiting);
                std::thread other([&] { ranks.ring(0); });
                CHECK(ranks.engine(0).advance(LONG) == Status::alarmed);
                other.join();
            }
}

// Rank 0 shows its array to rank 1, then takes it back: rank 1 must neither be done nor hand on what it found there.
void what_was_read_of_a_rank_that_left_counts_for_nothing() {
    constexpr std::size_t COUNT = 4096;
    for (const bool leaves : {false, true})
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
                    programs[rank].rounds[0].push_back(rank ? recv({1, 0, 1}, 0) : send({0, 0, 1}, {1}));
                    bind(programs[rank], 1, 0, COUNT, DType::i64);
                    programs[rank].prepare();
                }
            }
            auto* mine = reinterpret_cast<std::int64_t*>(ranks.array(0));
            std::fill_n(mine, COUNT, 2);
            ranks.engine(0).begin(programs[0], mine, mine, 1, 5, 0);
            CHECK(ranks.engine(0).advance(0) == Status::waiting);
            ranks.engine(1).begin(programs[1], x.data(), x.data(), 1, 5, 0);
            if (leaves) Pulse::of(ranks.arena(0)).left.store(1);
            Status status = ranks.engine(1).advance(0);
            for (int turn = 0; turn < 100 && status == Status::waiting && !leaves; ++turn) {
                ranks.engine(0).advance(0);
                status = ranks.engine(1).advance(0);
            }
            CHECK(status == (leaves ? Status::waiting : Status::done));
            if (!leaves) CHECK(x.back() == (reduces ? 3 : 2));
            if (!leaves) continue;
            CHECK(ranks.engine(1).advance(0.002) == Status::waiting);
            ranks.ring(1);
            CHECK(ranks.engine(1).advance(LONG) == Status::alarmed);
        }
}

void a_closed_link_is_a_loss() {
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
    RUN(two_ranks_share_memory);
    RUN(three_ranks_share_memory);
    RUN(four_ranks_share_memory);
    RUN(three_ranks_use_sockets);
    RUN(four_ranks_on_two_hosts);
    RUN(three_of_four_ranks_share_memory);
    RUN(tiny_calls);
    RUN(a_sender_runs_ahead);
    RUN(a_root_falls_behind);
    RUN(waiting_can_be_resumed);
    RUN(the_alarm_ends_a_wait);
    RUN(what_was_read_of_a_rank_that_left_counts_for_nothing);
    RUN(a_closed_link_is_a_loss);
}
