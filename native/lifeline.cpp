// The native heartbeat thread of a rank.
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
#include <stdexcept>

namespace gradwire {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int NICE = -5;  // scheduled before threads that compute
constexpr int SLOW_BEATS = 5;

struct Link {
    int socket;
    std::size_t each;              // bytes of a record or token
    bool repeats;                  // whether it has one record instead of a stock of tokens
    std::size_t mark = 0;          // low-water mark, in tokens
    std::deque<std::string> stock{};  // whole tokens, at least one in each string; or the record
    std::size_t sent = 0;          // bytes of the first string
    std::size_t unsent = 0;        // bytes of all strings
    int beats = 0;                 // since the last token

    void write() {
        if (stock.empty()) return;
        if (!repeats && tokens() < mark && ++beats < SLOW_BEATS) return;
        const std::string& first = stock.front();
        const std::size_t rest = each - sent % each;  // the rest of a partly written token is sent first
        const ssize_t sent_now = ::send(socket, first.data() + sent, rest, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent_now < 0) return;  // a full buffer, or a closed link, which its reader reports
        beats = 0;
        sent += static_cast<std::size_t>(sent_now);
        if (!repeats) unsent -= static_cast<std::size_t>(sent_now);
        if (sent < first.size()) return;
        sent = 0;
        if (!repeats) stock.pop_front();
    }
    std::size_t tokens() const { return (unsent + each - 1) / each; }
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
    std::vector<Link> links;

    Link* find(int socket) {
        auto found = std::find_if(links.begin(), links.end(), [&](const Link& link) { return link.socket == socket; });
        return found == links.end() ? nullptr : &*found;
    }
};

Lifeline::Lifeline(double seconds) : state_(std::make_unique<State>()), owner_(::getpid()) {
    state_->period = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Lifeline::~Lifeline() { stop(); }

bool Lifeline::in_owner_process() const { return owner_ == ::getpid(); }

void Lifeline::write_to(std::byte* arena) {
    if (!in_owner_process()) return;
    std::lock_guard lock(state_->mutex);
    state_->pulse = &Pulse::of(arena);
}

void Lifeline::add(int socket, std::string record) {
    if (!in_owner_process()) return;
    std::lock_guard lock(state_->mutex);
    if (record.empty()) return;
    Link link{.socket = socket, .each = record.size(), .repeats = true};
    link.stock.push_back(std::move(record));
    state_->links.push_back(std::move(link));
}

void Lifeline::add_tokens(int socket, std::size_t token_bytes, std::size_t mark) {
    if (!in_owner_process()) return;
    if (token_bytes == 0) throw std::invalid_argument("a token has at least one byte");
    std::lock_guard lock(state_->mutex);
    state_->links.push_back(Link{.socket = socket, .each = token_bytes, .repeats = false, .mark = mark});
}

void Lifeline::feed(int socket, std::string tokens) {
    if (!in_owner_process()) return;
    std::lock_guard lock(state_->mutex);
    Link* link = state_->find(socket);
    if (!link || link->repeats || tokens.empty()) return;
    if (tokens.size() % link->each != 0) throw std::invalid_argument("the last token is not complete");
    link->unsent += tokens.size();
    link->stock.push_back(std::move(tokens));
}

std::size_t Lifeline::ahead(int socket) const {
    if (!in_owner_process()) return 0;
    std::lock_guard lock(state_->mutex);
    const Link* link = state_->find(socket);
    return link ? link->tokens() : 0;
}

void Lifeline::drop(int socket) {
    if (!in_owner_process()) return;
    std::lock_guard lock(state_->mutex);
    std::erase_if(state_->links, [&](const Link& link) { return link.socket == socket; });
}

void Lifeline::start() {
    if (!in_owner_process() || thread_.joinable()) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // only the interpreter's threads handle signals
    try {
        thread_ = std::thread([state = state_.get()] { beat(*state); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Lifeline::stop() {
    if (!in_owner_process()) {
        // The thread does not exist in a forked child, and may have held the mutex during the fork: leak both.
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
    // Linux accepts a thread id here. Without the privilege the call fails and the priority stays normal.
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), NICE);
    std::unique_lock lock(state.mutex);
    auto next = Clock::now();
    while (!state.ending) {
        const auto now = Clock::now();
        if (state.pulse) state.pulse->beat.store(number_of(now), std::memory_order_release);
        for (Link& link : state.links) link.write();
        next = std::max(next + state.period, now);
        state.changed.wait_until(lock, next, [&] { return state.ending; });
    }
}

}  // namespace gradwire
