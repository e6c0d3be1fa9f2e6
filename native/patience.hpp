// How a rank waits that can do nothing: first busily, then giving way to others, in the end asleep.
//
// A message through memory wakes nobody. A rank with a core of its own therefore looks for it again and again; ranks that
// share cores give way to each other; and who waits for long sleeps a little longer each time. How long a rank with a core of
// its own stays awake it is told: a processor that has slept comes back late, and a virtual one, whose place somebody else
// may have taken, milliseconds late.
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

class Patience {
  public:
    explicit Patience(int alarm) { polled_.push_back({alarm, POLLIN, 0}); }

    double awake_for = 0;  // seconds in which whoever waits may keep a core busy; 0: it has none for itself

    // There was something to do.
    void refresh() {
        looks_ = 0;
        timed_ = limited_ = false;
        ended = -1;
    }
    // Give up once this much time has passed with nothing to do. Who goes on after that is as tired as before.
    void limit(double seconds) {
        seconds_ = seconds;
        limited_ = false;
    }

    enum class Step { look, sleep, over };
    // What to do after another look that found nothing.
    Step step() {
        if (spins() && ++looks_ % LOOKS_PER_TIME != 0) {
            relax();
            return Step::look;
        }
        const double time = now();
        if (!timed_) began_ = checked_ = time;
        if (!limited_) until_ = time + seconds_;
        timed_ = limited_ = true;
        waited_ = time - began_;
        left_ = until_ - time;
        if (left_ <= 0) return Step::over;
        if (waited_ >= longest_awake() || time - checked_ >= CHECK_SECONDS) {
            checked_ = time;
            return Step::sleep;
        }
        if (spins() || ++looks_ < FEW_LOOKS) relax();
        else ::sched_yield();
        return Step::look;
    }

    // What ends the next sleep: a socket that can be used, or the end of one whose peer writes into memory, where that
    // wakes nobody. A descriptor of −1 is no socket.
    void wake_by(int socket, short events) { polled_.push_back({socket, events, 0}); }
    void wake_by_end(int socket) {
        polled_.push_back({socket, POLLRDHUP, 0});
        look_at_memory();
    }
    // What is waited for is in memory, and may have come since the last look.
    void look_at_memory() { by_memory_ = true; }
    // True if the alarm has rung. What woke this rank up is forgotten, but for `ended`: a socket that has, or −1.
    bool sleep() {
        const bool awake = waited_ < (by_memory_ ? longest_awake() : AWAKE_SECONDS);  // sockets wake who sleeps
        if (awake && spins()) ::sched_yield();  // the core may be wanted after all: by loaders of data, say
        double pause = awake ? 0 : left_;
        // A nap makes a wait longer by an eighth at most, and a long one by a fiftieth.
        const double nap = std::max(spins() ? SHORT_NAP : LONG_NAP, waited_ / 50);
        if (by_memory_) pause = std::min({pause, LONGEST_NAP, waited_ / 8, nap});
        const auto nanoseconds = static_cast<long>(pause * 1e9);
        const timespec timeout{nanoseconds / 1000000000, nanoseconds % 1000000000};
        ::ppoll(polled_.data(), polled_.size(), &timeout, nullptr);
        ended = -1;
        for (const pollfd& polled : polled_)
            if (polled.events == POLLRDHUP && polled.revents) ended = polled.fd;
        polled_.resize(1);
        by_memory_ = false;
        return polled_[0].revents != 0;
    }
    int ended = -1;

  private:
    static constexpr unsigned LOOKS_PER_TIME = 16;  // the clock takes longer than a look
    static constexpr unsigned FEW_LOOKS = 2;
    static constexpr double AWAKE_SECONDS = 1e-3;  // at least
    static constexpr double CHECK_SECONDS = 200e-6;  // between looks at the alarm, and for others who want this core
    static constexpr double SHORT_NAP = 200e-6, LONG_NAP = 5e-3, LONGEST_NAP = 50e-3;

    bool spins() const { return awake_for > 0; }
    double longest_awake() const { return std::max(AWAKE_SECONDS, awake_for); }

    std::vector<pollfd> polled_;
    bool by_memory_ = false;
    unsigned looks_ = 0;
    bool timed_ = false, limited_ = false;  // whether the times below are those of this wait
    double seconds_ = 0, waited_ = 0, left_ = 0;
    double began_ = 0, until_ = 0, checked_ = 0;
};

}  // namespace gradwire
