// How bytes are stored into staging: as usual, or past the caches.
//
// Where the writer's and the reader's processor share a cache, the reader finds there what was stored as usual, and that is
// twice as fast. Where they do not, it has to get it out of the writer's own, and stores past the caches make the whole
// twice as fast. Virtual processors move between the two from one minute to the next, so neither can be chosen for good.
//
// Both ways are timed as they are used: what a byte costs the writer, and what it costs the reader, who is told how it was
// stored. Now and then a call goes the other way, so that it stays known.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace gradwire {

class Manner {
  public:
    static constexpr std::size_t SMALLEST = 32 << 10;  // bytes of a message; shorter ones tell nothing

    // A call begins.
    void begin() {
        if (!staged_) return;  // the last one was none of those that matter
        staged_ = false;
        settle();
        tries_ = ++calls_ % BETWEEN_TRIES == 0;
    }
    // Whether to store this message past the caches.
    bool streams(std::size_t nbytes) const { return nbytes >= SMALLEST && (streams_ != tries_); }

    // So long it took to store, or to read, a message that is stored so.
    void wrote(bool streamed, std::size_t nbytes, double nanoseconds) {
        staged_ = true;
        learn(costs_[streamed].write, nanoseconds / static_cast<double>(nbytes));
    }
    void has_read(bool streamed, std::size_t nbytes, double nanoseconds) {
        learn(costs_[streamed].read, nanoseconds / static_cast<double>(nbytes));
    }

  private:
    static constexpr std::uint64_t BETWEEN_TRIES = 32;  // calls
    static constexpr double WORTH = 0.85;               // to change for less is to change back and forth
    static constexpr double OUTLIER = 4;                // somebody else had the processor
    static constexpr double WEIGHT = 1.0 / 8;           // of what is new

    struct Cost {  // of a byte, in nanoseconds; 0: not known yet
        double write = 0, read = 0;
        bool known() const { return write > 0 && read > 0; }
        double sum() const { return write + read; }
    };

    static void learn(double& cost, double found) {
        cost = cost > 0 ? cost + WEIGHT * (std::min(found, OUTLIER * cost) - cost) : found;
    }
    void settle() {
        const Cost &mine = costs_[streams_], &other = costs_[!streams_];
        if (mine.known() && other.known() && other.sum() < WORTH * mine.sum()) streams_ = !streams_;
    }

    Cost costs_[2];
    std::uint64_t calls_ = 0;  // in which something was staged
    bool staged_ = false, streams_ = false, tries_ = false;
};

}  // namespace gradwire
