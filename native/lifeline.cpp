#include "lifeline.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <mutex>

namespace gradwire {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int NICE = -5;  // a little ahead of those who compute

struct Line {
    int socket;
    bool repeats;
    std::deque<std::string> records;
    std::size_t sent = 0;  // bytes of the first

    void write() {
        if (records.empty()) return;
        const std::string& record = records.front();
        const ssize_t sent_now = ::send(socket, record.data() + sent, record.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent_now < 0) return;  // no room, or no link any more: that is for its reader to tell
        sent += static_cast<std::size_t>(sent_now);
        if (sent < record.size()) return;  // half a record: the rest goes first
        sent = 0;
        if (!repeats) records.pop_front();
    }
};

std::uint64_t number_of(Clock::time_point time) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(time.time_since_epoch()).count());
}

}  // namespace

struct Lifeline::State {
    Clock::duration period;
    mutable std::mutex mutex;
    std::condition_variable changed;
    bool ending = false;
    Pulse* pulse = nullptr;
    std::vector<Line> lines;

    Line* line(int socket) {
        auto found = std::find_if(lines.begin(), lines.end(), [&](const Line& one) { return one.socket == socket; });
        return found == lines.end() ? nullptr : &*found;
    }
};

Lifeline::Lifeline(double seconds) : state_(std::make_unique<State>()), owner_(::getpid()) {
    state_->period = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Lifeline::~Lifeline() { stop(); }

bool Lifeline::ours() const { return owner_ == ::getpid(); }

void Lifeline::write_to(std::byte* arena) {
    if (!ours()) return;
    std::lock_guard lock(state_->mutex);
    state_->pulse = &Pulse::of(arena);
}

void Lifeline::add(int socket, std::string record) {
    if (!ours()) return;
    std::lock_guard lock(state_->mutex);
    Line line{socket, !record.empty(), {}};
    if (line.repeats) line.records.push_back(std::move(record));
    state_->lines.push_back(std::move(line));
}

void Lifeline::feed(int socket, std::vector<std::string> records) {
    if (!ours()) return;
    std::lock_guard lock(state_->mutex);
    Line* line = state_->line(socket);
    if (!line) return;
    for (std::string& record : records)
        if (!record.empty()) line->records.push_back(std::move(record));
}

std::size_t Lifeline::ahead(int socket) const {
    if (!ours()) return 0;
    std::lock_guard lock(state_->mutex);
    const Line* line = state_->line(socket);
    return line ? line->records.size() : 0;
}

void Lifeline::drop(int socket) {
    if (!ours()) return;
    std::lock_guard lock(state_->mutex);
    std::erase_if(state_->lines, [&](const Line& line) { return line.socket == socket; });
}

void Lifeline::start() {
    if (!ours() || thread_.joinable()) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the interpreter's threads
    try {
        thread_ = std::thread([state = state_.get()] { beat(*state); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Lifeline::stop() {
    if (!ours()) {
        // The thread is not here to be joined, and may have held the lock when this process was forked.
        new std::thread(std::move(thread_));
        static_cast<void>(state_.release());
        return;
    }
    if (!thread_.joinable()) return;
    {
        std::lock_guard lock(state_->mutex);
        state_->ending = true;
    }
    state_->changed.notify_all();
    thread_.join();
}

void Lifeline::beat(State& state) {
    pthread_setname_np(pthread_self(), "gradwire-beat");
    // Linux knows threads by the numbers of processes. Most users may not do it; then it is one of many.
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), NICE);
    std::unique_lock lock(state.mutex);
    auto next = Clock::now();
    while (!state.ending) {
        const auto now = Clock::now();
        if (state.pulse) state.pulse->beat.store(number_of(now), std::memory_order_release);
        for (Line& line : state.lines) line.write();
        next = std::max(next + state.period, now);
        state.changed.wait_until(lock, next, [&] { return state.ending; });
    }
}

}  // namespace gradwire
