// Measures elapsed time.
#pragma once

#include <chrono>

namespace gradwire {

class Stopwatch {
  public:
    explicit Stopwatch(bool runs) : runs_(runs) {
        if (runs) began_ = Clock::now();
    }
    bool runs() const { return runs_; }
    double nanoseconds() const { return std::chrono::duration<double, std::nano>(Clock::now() - began_).count(); }

  private:
    using Clock = std::chrono::steady_clock;
    bool runs_;
    Clock::time_point began_;
};

}  // namespace gradwire
