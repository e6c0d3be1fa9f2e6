// Sets the processor's floating-point state to the IEEE defaults while an object of this class lives: rounding to
// nearest, denormals honoured, no traps. Libraries change the state of a thread or a process (torch.set_flush_denormal,
// libraries linked with -ffast-math); equal expressions would then give different bits on different ranks.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#else
#include <cfenv>
#endif

namespace gradwire {

class DefaultFloatState {
  public:
    DefaultFloatState(const DefaultFloatState&) = delete;
    DefaultFloatState& operator=(const DefaultFloatState&) = delete;

#if defined(__x86_64__) || defined(__i386__)
    DefaultFloatState() : found_(_mm_getcsr()) {
        // The lowest six bits are sticky flags. Writing the register costs more than reading it.
        if ((found_ & ~0x3fu) != 0x1f80u) _mm_setcsr(0x1f80u);
    }
    ~DefaultFloatState() {
        if ((found_ & ~0x3fu) != 0x1f80u) _mm_setcsr(found_);
    }

  private:
    unsigned found_;
#elif defined(__aarch64__)
    DefaultFloatState() {
        asm volatile("mrs %0, fpcr" : "=r"(found_));
        if (found_ != 0) asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}) : "memory");
    }
    ~DefaultFloatState() {
        if (found_ != 0) asm volatile("msr fpcr, %0" ::"r"(found_) : "memory");
    }

  private:
    std::uint64_t found_;
#else
    DefaultFloatState() {
        std::fegetenv(&found_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatState() { std::fesetenv(&found_); }

  private:
    std::fenv_t found_;
#endif
};

}  // namespace gradwire
