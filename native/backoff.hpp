// How a rank waits while it cannot progress: it spins, then yields its core, then sleeps for growing intervals.
//
// A message through shared memory does not wake a sleeping process. A rank with a core of its own therefore polls.
// Ranks that share cores yield to each other. The sleeps of a long wait grow. The caller passes how long a rank with
// its own core may spin. Spinning matters because a processor takes time to resume after a sleep; a virtual processor,
// whose core may be in use by another machine, takes milliseconds.
#pragma once

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <vector>

namespace gradwire {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Backoff {
  public:
    explicit Backoff(int alarm) { polled_.push_back({alarm, POLLIN, 0}); }

    double spin_seconds = 0;  // for which a wait may keep a core busy; 0: this rank has no core of its own

    // Call after progress: the next wait begins with spinning.
    void reset() {
        polls_ = 0;
        timed_ = limited_ = false;
        closed_socket = -1;
    }
    // Report `expired` after this many seconds without progress. Continuing after that keeps the current back-off
    // level.
    void limit(double seconds) {
        seconds_ = seconds;
        limited_ = false;
    }

    enum class Step { poll, sleep, expired };
    // The next step after a poll that found nothing.
    Step step() {
        if (spins() && ++polls_ % POLLS_PER_CLOCK_READ != 0) {
            relax();
            return Step::poll;
        }
        const double time = now();
        if (!timed_) began_ = checked_ = time;
        if (!limited_) until_ = time + seconds_;
        timed_ = limited_ = true;
        waited_ = time - began_;
        left_ = until_ - time;
        if (left_ <= 0) return Step::expired;
        if (waited_ >= longest_awake() || time - checked_ >= CHECK_SECONDS) {
            checked_ = time;
            return Step::sleep;
        }
        if (spins() || ++polls_ < POLLS_BEFORE_YIELD) relax();
        else ::sched_yield();
        return Step::poll;
    }

    // Events that end the next sleep: those of a socket, or only its close if the peer writes to shared memory, which
    // raises no event. A descriptor of -1 is ignored.
    void wake_by(int socket, short events) { polled_.push_back({socket, events, 0}); }
    void wake_by_close(int socket) {
        polled_.push_back({socket, POLLRDHUP, 0});
        poll_memory();
    }
    // The next message comes through shared memory and may already be there: sleep only briefly.
    void poll_memory() { by_memory_ = true; }
    // Returns whether the alarm was raised. Clears the list of sockets, and sets `closed_socket` if one of them is
    // closed.
    bool sleep() {
        const bool awake = waited_ < (by_memory_ ? longest_awake() : AWAKE_SECONDS);  // a socket wakes a sleeping process
        if (awake && spins()) ::sched_yield();  // another thread may need this core: a data loader, for example
        double pause = awake ? 0 : left_;
        // A sleep prolongs a wait by an eighth at most, and a long wait by a fiftieth.
        const double short_sleep = std::max(spins() ? SPINNING_SLEEP : SHARING_SLEEP, waited_ / 50);
        if (by_memory_) pause = std::min({pause, MAX_SLEEP, waited_ / 8, short_sleep});
        const auto nanoseconds = static_cast<long>(pause * 1e9);
        const timespec timeout{nanoseconds / 1000000000, nanoseconds % 1000000000};
        ::ppoll(polled_.data(), polled_.size(), &timeout, nullptr);
        closed_socket = -1;
        for (const pollfd& polled : polled_)
            if (polled.events == POLLRDHUP && polled.revents) closed_socket = polled.fd;
        polled_.resize(1);
        by_memory_ = false;
        return polled_[0].revents != 0;
    }
    int closed_socket = -1;

  private:
    static constexpr unsigned POLLS_PER_CLOCK_READ = 16;  // reading the clock takes longer than a poll
    static constexpr unsigned POLLS_BEFORE_YIELD = 2;
    static constexpr double AWAKE_SECONDS = 1e-3;    // a wait does not sleep before this time
    static constexpr double CHECK_SECONDS = 200e-6;  // between checks of the alarm, which also yield the core
    // Seconds of a sleep: of a rank with its own core, of ranks that share cores, and the maximum.
    static constexpr double SPINNING_SLEEP = 200e-6, SHARING_SLEEP = 5e-3, MAX_SLEEP = 50e-3;

    bool spins() const { return spin_seconds > 0; }
    double longest_awake() const { return std::max(AWAKE_SECONDS, spin_seconds); }

    std::vector<pollfd> polled_;
    bool by_memory_ = false;
    unsigned polls_ = 0;
    bool timed_ = false, limited_ = false;  // whether the times below belong to the current wait
    double seconds_ = 0, waited_ = 0, left_ = 0;
    double began_ = 0, until_ = 0, checked_ = 0;
};

}  // namespace gradwire
