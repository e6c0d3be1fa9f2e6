// Shows that this process is alive: a thread sends heartbeats even while the interpreter is blocked.
//
// At each heartbeat the thread updates the pulse in this rank's arena, for processes that map it, and writes to each
// link. On some links it writes the same record every time, on others the next token of a stock; each token is used
// once. The thread never blocks and never needs the interpreter's lock. Python prepares the records and tokens; their
// bytes have no meaning here.
//
// Python refills the stocks. While it cannot (because a call into C holds the interpreter's lock), a stock below its
// low-water mark is used five times more slowly, so that it lasts for hours.
//
// A forked child has no such thread, and all methods do nothing there, because the mutex may have been locked during
// the fork.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "memory.hpp"

namespace gradwire {

class Lifeline {
  public:
    explicit Lifeline(double seconds);
    ~Lifeline();
    Lifeline(const Lifeline&) = delete;

    // Update the pulse in this arena at each heartbeat.
    void write_to(std::byte* arena);
    // Write this record to a socket at each heartbeat.
    void add(int socket, std::string record);
    // Write the next token, of `token_bytes` bytes, to a socket at each heartbeat. While fewer than `mark` tokens are
    // left, write one at each fifth heartbeat only.
    void add_tokens(int socket, std::size_t token_bytes, std::size_t mark);
    // Add whole tokens to a socket's stock.
    void feed(int socket, std::string tokens);
    // The number of tokens that a socket has left, including one that is partly written; 0 for other sockets.
    std::size_t ahead(int socket) const;
    // Remove a socket. After this has returned, nothing is written to it.
    void drop(int socket);

    void start();
    void stop();

  private:
    struct State;
    static void beat(State& state);
    bool in_owner_process() const;  // false in a forked child

    std::unique_ptr<State> state_;
    std::thread thread_;
    pid_t owner_;
};

}  // namespace gradwire
