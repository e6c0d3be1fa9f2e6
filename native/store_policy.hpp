// Chooses how bytes are stored into staging: with ordinary stores, or with non-temporal stores that bypass the caches.
//
// If the writer's and the reader's processors share a cache, ordinary stores are twice as fast, because the reader
// finds the bytes in that cache. If they do not, the reader has to fetch the bytes from the writer's private cache, and
// non-temporal stores make the transfer twice as fast. Virtual processors migrate within minutes, so no choice stays
// right for long.
//
// The policy therefore times both kinds of store during normal use: the cost per byte for the writer and for the reader
// (each message carries how it was stored). Every 32nd call uses the other kind, so that both costs stay up to date.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace gradwire {

class StorePolicy {
  public:
    static constexpr std::size_t SMALLEST = 32 << 10;  // bytes of a message; the time of a shorter one is mostly noise

    void begin_call() {
        if (!staged_) return;  // no message of the last call was timed
        staged_ = false;
        choose();
        probes_ = ++calls_ % PROBE_INTERVAL == 0;
    }
    // Whether to store this message with non-temporal stores.
    bool streams(std::size_t nbytes) const { return nbytes >= SMALLEST && (streams_ != probes_); }

    // Record how long it took to store, or to read, a message that was stored this way.
    void record_write(bool streamed, std::size_t nbytes, double nanoseconds) {
        staged_ = true;
        update(costs_[streamed].write, nanoseconds / static_cast<double>(nbytes));
    }
    void record_read(bool streamed, std::size_t nbytes, double nanoseconds) {
        update(costs_[streamed].read, nanoseconds / static_cast<double>(nbytes));
    }

  private:
    static constexpr std::uint64_t PROBE_INTERVAL = 32;  // calls
    static constexpr double SWITCH_BELOW = 0.85;         // of the current cost; smaller gains would cause oscillation
    static constexpr double OUTLIER = 4;                 // times the average: the thread was preempted
    static constexpr double WEIGHT = 1.0 / 8;            // of the newest sample in the moving average

    struct Cost {  // nanoseconds per byte; 0: not measured yet
        double write = 0, read = 0;
        bool known() const { return write > 0 && read > 0; }
        double sum() const { return write + read; }
    };

    static void update(double& cost, double sample) {
        cost = cost > 0 ? cost + WEIGHT * (std::min(sample, OUTLIER * cost) - cost) : sample;
    }
    void choose() {
        const Cost &current = costs_[streams_], &other = costs_[!streams_];
        if (current.known() && other.known() && other.sum() < SWITCH_BELOW * current.sum()) streams_ = !streams_;
    }

    Cost costs_[2];
    std::uint64_t calls_ = 0;  // that staged a timed message
    bool staged_ = false, streams_ = false, probes_ = false;
};

}  // namespace gradwire
