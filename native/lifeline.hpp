// How a rank shows that it lives: a thread that beats, whatever the interpreter does.
//
// At each beat it renews the pulse in this rank's arena, for those who map it, and writes to each link to others: on some the
// same record again and again, on others the next of a stock of tokens, each of which is used once. It never blocks, never
// needs the interpreter's lock, and knows nothing of what is in records and tokens: they come ready-made.
//
// The interpreter fills the stocks up. While it does not (a call into C holds its lock), a stock that has sunk below its mark
// is used five times more slowly, so that it lasts for hours.
//
// A forked child has no such thread. What it inherits does nothing there: the lock may be held by nobody for ever.
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

    // Show each beat here too.
    void write_to(std::byte* arena);
    // Write this record to a socket at each beat.
    void add(int socket, std::string record);
    // Write to a socket, at each beat, the next token of so many bytes of those that it is fed; below `mark` tokens that are
    // left, at each fifth beat.
    void add_tokens(int socket, std::size_t token_bytes, std::size_t mark);
    // Whole tokens, any number of them.
    void feed(int socket, std::string tokens);
    // How many tokens a socket has left, counting one that is written in part; 0 for one that is not known or needs none.
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
