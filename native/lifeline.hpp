// Shows that this process is alive: a thread that sends heartbeats, whatever the interpreter does.
//
// At each beat it updates the pulse in this rank's arena, for processes that map it, and writes to each link: on some links
// the same record every time, on others the next token of a stock, each of which is used once. It never blocks, never needs
// the interpreter's lock, and does not interpret the bytes of records and tokens, which Python prepares.
//
// Python refills the stocks. While it does not (a call into C holds its lock), a stock below its low-water mark is used five
// times more slowly, so that it lasts for hours.
//
// A forked child has no such thread, and all methods do nothing there: the mutex may have been locked during the fork.
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

    // Update the pulse in this arena, too.
    void write_to(std::byte* arena);
    // Write this record to a socket at each beat.
    void add(int socket, std::string record);
    // Write the next token, of `token_bytes` bytes, to a socket at each beat; at each fifth beat while fewer than `mark` tokens
    // are left.
    void add_tokens(int socket, std::size_t token_bytes, std::size_t mark);
    // Add whole tokens to a socket's stock.
    void feed(int socket, std::string tokens);
    // The number of tokens that a socket has left, including one that is partly written; 0 for other sockets.
    std::size_t ahead(int socket) const;
    // Nothing is written to a socket once this has returned.
    void drop(int socket);

    void start();
    void stop();

  private:
    struct State;
    static void beat(State& state);
    bool ours() const;

    std::unique_ptr<State> state_;
    std::thread thread_;
    pid_t owner_;
};

}  // namespace gradwire
