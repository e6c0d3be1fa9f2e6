// The order of a group's calls and the log of recent ones, shared by Python and the core.
//
// All members require the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace gradwire {

namespace nb = nanobind;

// A ticket lock: a call takes a ticket when it is made, and runs when all earlier tickets have been served.
struct Turns {
    std::uint64_t issued = 0;
    std::uint64_t serving = 0;
};

// The last calls of a group; gradwire/liveness/call_log.py has the same class in Python, for use without the core.
class CallRing {
  public:
    struct Call {
        std::uint64_t sequence = 0;
        std::uint64_t chain = 0;
        nb::object description;
        nb::object code;  // of the caller, and the instruction in that code
        int instruction = 0;
    };

    explicit CallRing(std::size_t kept) : calls_(kept) {}
    std::uint64_t record(nb::handle description, std::uint64_t fingerprint, nb::object code, int instruction) {
        chain = (chain ^ fingerprint) * 0x9E3779B97F4A7C15u + 1;
        Call& call = calls_[++sequence % calls_.size()];
        call.sequence = sequence;
        call.chain = chain;
        if (call.description.ptr() != description.ptr()) call.description = nb::borrow(description);
        call.code = std::move(code);
        call.instruction = instruction;
        return sequence;
    }
    // Null if the call was overwritten, or not made yet.
    const Call* call(std::uint64_t number) const {
        const Call& call = calls_[number % calls_.size()];
        return number && call.sequence == number ? &call : nullptr;
    }

    std::uint64_t sequence = 0;  // of the last call; 0: none yet
    std::uint64_t finished = 0;  // the last completed call
    std::uint64_t chain = 0;     // hash of all fingerprints so far

  private:
    std::vector<Call> calls_;
};

void register_calls(nb::module_& module);

}  // namespace gradwire
