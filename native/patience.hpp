// How a rank waits that can do nothing: first busily, then giving way to others, in the end asleep.
//
// A message through memory wakes nobody. A rank with a core of its own therefore looks for it again and again; ranks that
// share cores give way to each other; and who waits for long sleeps a little longer each time.
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

    bool spins = false;  // a core is there for this rank alone

    // There was something to do.
    void refresh() { looks_ = 0; }
    // Give up once this much time has passed with nothing to do. Who goes on after that is as tired as before.
    void limit(double seconds) {
        seconds_ = seconds;
        resumed_ = over_;
        over_ = false;
        if (!resumed_) refresh();
    }

    enum class Step { look, sleep, over };
    // What to do after another look that found nothing.
    Step step() {
        const double time = now();
        if (looks_ == 0) began_ = checked_ = time;
        if (looks_ == 0 || resumed_) limited_ = time;
        resumed_ = false;
        ++looks_;
        waited_ = time - began_;
        left_ = seconds_ - (time - limited_);
        over_ = left_ <= 0;
        if (over_) return Step::over;
        if (!awake() || time - checked_ >= CHECK_SECONDS) {
            checked_ = time;
            return Step::sleep;
        }
        if (spins || looks_ < FEW_LOOKS) relax();
        else ::sched_yield();
        return Step::look;
    }

    // What ends a sleep; forgotten after it.
    void wake_by(int descriptor, short events) { polled_.push_back({descriptor, events, 0}); }
    // True if the alarm has rung. `by_memory`: what is waited for does not wake a sleeper.
    bool sleep(bool by_memory) {
        double pause = awake() ? 0 : left_;
        // A nap makes a wait longer by an eighth at most, and a long one by a fiftieth.
        if (by_memory) pause = std::min({pause, LONGEST_NAP, waited_ / 8, std::max(LONG_NAP, waited_ / 50)});
        const auto nanoseconds = static_cast<long>(pause * 1e9);
        const timespec timeout{nanoseconds / 1000000000, nanoseconds % 1000000000};
        ::ppoll(polled_.data(), polled_.size(), &timeout, nullptr);
        polled_.resize(1);
        return polled_[0].revents != 0;
    }

  private:
    static constexpr int FEW_LOOKS = 20;
    static constexpr double AWAKE_SECONDS = 1e-3;
    static constexpr double CHECK_SECONDS = 200e-6;  // between looks at the alarm
    static constexpr double LONG_NAP = 5e-3, LONGEST_NAP = 50e-3;

    bool awake() const { return waited_ < AWAKE_SECONDS; }

    std::vector<pollfd> polled_;
    int looks_ = 0;
    bool over_ = false, resumed_ = false;
    double seconds_ = 0, left_ = 0, waited_ = 0;
    double began_ = 0, limited_ = 0, checked_ = 0;  // when
};

}  // namespace gradwire
