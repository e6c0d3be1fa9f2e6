// What a rank has called, and in which turn: the parts of a group's engine room that Python and the core both use.
//
// All of it is used with the interpreter's lock held.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace gradwire {

namespace nb = nanobind;

// Whose turn it is. A call takes a ticket when it is made, and runs when all before it are done.
struct Turns {
    std::uint64_t issued = 0;
    std::uint64_t serving = 0;
};

// The last calls of a group: gradwire/liveness/call_log.py.
class CallRing {
  public:
    struct Call {
        std::uint64_t sequence = 0;
        std::uint64_t chain = 0;
        nb::object meaning;
        nb::object code;  // of the caller, and the instruction in it
        int instruction = 0;
    };

    explicit CallRing(std::size_t kept) : calls_(kept) {}
    std::uint64_t record(nb::handle meaning, std::uint64_t fingerprint, nb::object code, int instruction) {
        chain = (chain ^ fingerprint) * 0x9E3779B97F4A7C15u + 1;
        Call& call = calls_[++sequence % calls_.size()];
        call.sequence = sequence;
        call.chain = chain;
        if (call.meaning.ptr() != meaning.ptr()) call.meaning = nb::borrow(meaning);
        call.code = std::move(code);
        call.instruction = instruction;
        return sequence;
    }
    // Null if it is forgotten, or was not made yet.
    const Call* call(std::uint64_t number) const {
        const Call& call = calls_[number % calls_.size()];
        return number && call.sequence == number ? &call : nullptr;
    }

    std::uint64_t sequence = 0;  // of the last call; 0: none yet
    std::uint64_t finished = 0;  // the last call whose work is done
    std::uint64_t chain = 0;     // all fingerprints so far, folded into one number

  private:
    std::vector<Call> calls_;
};

void register_calls(nb::module_& module);

}  // namespace gradwire
