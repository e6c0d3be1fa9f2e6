// Carries a program out over the links of one group, without the interpreter.
//
// Within a wave all messages progress together. `advance` returns when the program is done, when it has waited for as long as
// it was told to (the caller then looks at signals, deadlines and the log), or when a peer is gone or says something else
// than expected. It can be called again after a wait.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "log.hpp"
#include "program.hpp"
#include "wire.hpp"

namespace gradwire {

enum class Status : int { done = 0, waiting = 1, lost = 2, mismatch = 3, alarmed = 4 };

// How a rank is reached: a socket, or a log that it writes (and mine, that it reads).
struct Peer {
    int socket = -1;
    std::unique_ptr<LogReader> log;
};

struct Links {
    std::vector<Peer> peers;             // by rank in the group
    std::unique_ptr<LogWriter> log;      // mine; null without shared memory
    std::uint64_t log_readers = 0;       // who reads it
    int alarm = -1;                      // a descriptor that becomes readable when the group breaks
    double spin = 0;                     // seconds to poll before sleeping
    std::vector<std::byte> scratch, staging;
};

struct IoPart {
    const std::byte* data;
    std::size_t nbytes;
};

class Run {
  public:
    Run(const Program& program, Links& links, const Sheet& sheet, void* in, void* out);
    Status advance(double seconds);
    std::uint32_t culprit = 0;
    Header heard{};

  private:
    struct Sending {
        std::uint32_t peer;
        std::vector<Header> heads;
        std::vector<IoPart> parts;
        std::size_t at = 0;
    };
    struct Receiving {
        std::uint32_t peer;
        std::vector<std::uint32_t> messages;  // indices into the wave's receives
        std::size_t at = 0;                   // the current one
        Header head{};
        std::size_t got = 0;  // bytes of it, header included
    };

    void begin_wave();
    bool exchange_once(bool& progress);
    bool push_socket(Sending& sending, bool& progress);
    bool push_log(bool& progress);
    bool pull_socket(Receiving& receiving, bool& progress);
    bool pull_log(Receiving& receiving, bool& progress);
    void fold_ready();
    void fold(const Folding& folding);
    void move(const Moving& moving);
    std::byte* at(const Piece& piece) const { return memories_[piece.memory] + piece.offset; }
    bool matches(const Incoming& message, std::uint64_t sequence, std::uint64_t fingerprint, std::uint32_t tile,
                 std::uint32_t round, std::uint64_t nbytes, std::uint32_t peer);
    void copy_in(const Incoming& message, std::size_t offset, const std::byte* data, std::size_t nbytes);
    bool sleep(double waited, double left);

    const Program& program_;
    Links& links_;
    const Sheet& sheet_;
    std::byte* memories_[3];
    Wave wave_;
    std::size_t first_ = 0, step_ = 0;
    bool in_wave_ = false;
    std::vector<Sending> sending_;
    std::vector<Receiving> receiving_;
    std::vector<std::size_t> log_queue_;  // sends that go into my log
    std::size_t log_at_ = 0;
    std::size_t pending_sends_ = 0, pending_receives_ = 0;
    std::vector<const std::byte*> staged_;   // where each message of a fold lies
    std::vector<char> arrived_;
    std::vector<char> folded_;
    std::vector<std::uint32_t> read_logs_;   // peers whose log was read in this wave
    Status status_ = Status::waiting;
    int hung_up_ = -1;  // a peer whose socket has ended: what it wrote into its log before still counts
};

}  // namespace gradwire
