// How a rank shows that it lives: a thread that beats, whatever the interpreter does.
//
// At each beat it renews the pulse in this rank's arena, for those who map it, and writes one record to each link to
// others. It never blocks, never needs the interpreter's lock, and knows nothing of what is in a record: that comes ready-made,
// either one for all beats or one for each, in order.
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
    // Write to a socket: this record at each beat, or, if there is none, those that it is fed, one for each.
    void add(int socket, std::string record = {});
    void feed(int socket, std::vector<std::string> records);
    // How many beats the records of a socket last; 0 for one that is not known.
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
