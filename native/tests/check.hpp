// Helpers of the core's tests: checks that are active in every build, reproducible random numbers, and ranks as
// threads, which share one mapping of all memory, so that ThreadSanitizer sees the synchronisation between ranks.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);       \
            std::_Exit(1);                                                                       \
        }                                                                                        \
    } while (false)

#define RUN(test)                            \
    do {                                     \
        test();                              \
        std::printf("  %s\n", #test);        \
        std::fflush(stdout);                 \
    } while (false)

// Sanitizers slow the tests down.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int MANY = 3;
#else
constexpr int MANY = 10;
#endif

class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
    // 0 … bound - 1
    std::size_t below(std::size_t bound) {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return static_cast<std::size_t>((state_ >> 11) % bound);
    }

  private:
    std::uint64_t state_;
};

template <class Body>
void in_threads(std::uint32_t number, Body body) {
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < number; ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
}
