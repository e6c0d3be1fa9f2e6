#include "run.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace gradwire {

namespace {
constexpr std::size_t MAX_PARTS = 256;
constexpr double YIELDING = 500e-6;    // seconds of giving way to other ranks before sleeping
constexpr double LONGEST_NAP = 1e-3;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool gone(int error) { return error != EAGAIN && error != EWOULDBLOCK && error != EINTR; }
}  // namespace

Run::Run(const Program& program, Links& links, const Sheet& sheet, void* in, void* out)
    : program_(program), links_(links), sheet_(sheet) {
    if (links_.scratch.size() < program.scratch_bytes()) links_.scratch.resize(program.scratch_bytes());
    memories_[IN] = static_cast<std::byte*>(in);
    memories_[OUT] = static_cast<std::byte*>(out);
    memories_[SCRATCH] = links_.scratch.data();
}

Status Run::advance(double seconds) {
    double until = 0, spin_until = 0;
    while (true) {
        if (!in_wave_) {
            if (first_ >= program_.tiles) return Status::done;
            if (!program_.wave(first_, step_, wave_)) {
                first_ += program_.in_flight;
                step_ = 0;
                continue;
            }
            ++step_;
            if (wave_.empty()) continue;
            begin_wave();
        }
        bool progress = false;
        if (!exchange_once(progress)) return status_;
        if (pending_sends_ == 0 && pending_receives_ == 0) {
            fold_ready();
            for (std::uint32_t peer : read_logs_) links_.peers[peer].log->release();
            in_wave_ = false;
            continue;
        }
        if (progress) {
            until = spin_until = 0;
            continue;
        }
        if (hung_up_ >= 0) {
            culprit = static_cast<std::uint32_t>(hung_up_);
            return Status::lost;
        }
        const double time = now();
        if (until == 0) {
            until = time + seconds;
            spin_until = time + links_.spin;
        }
        if (time >= until) return Status::waiting;
        if (time < spin_until) continue;
        if (sleep(time - spin_until, until - time)) return Status::alarmed;
    }
}

void Run::begin_wave() {
    in_wave_ = true;
    for (const Moving& moving : wave_.moves) move(moving);
    sending_.clear();
    receiving_.clear();
    log_queue_.clear();
    read_logs_.clear();
    log_at_ = pending_sends_ = pending_receives_ = 0;
    folded_.assign(wave_.folds.size(), 0);
    arrived_.assign(wave_.receives.size(), 0);
    staged_.assign(wave_.receives.size(), nullptr);

    auto sending_to = [&](std::uint32_t peer) -> Sending& {
        for (Sending& one : sending_)
            if (one.peer == peer) return one;
        sending_.push_back({peer, {}, {}, 0});
        sending_.back().heads.reserve(wave_.sends.size());
        return sending_.back();
    };
    for (std::size_t i = 0; i < wave_.sends.size(); ++i) {
        const Outgoing& message = wave_.sends[i];
        bool logged = false;
        for (std::uint32_t peer : *message.peers) {
            if (links_.peers[peer].log) {
                logged = true;
                continue;
            }
            Sending& sending = sending_to(peer);
            sending.heads.push_back(sheet_.header(sheet_.rank, message.tile, message.round, message.nbytes));
            sending.parts.push_back({reinterpret_cast<const std::byte*>(&sending.heads.back()), sizeof(Header)});
            for (const Piece& piece : message.pieces) sending.parts.push_back({at(piece), piece.nbytes});
        }
        if (logged) log_queue_.push_back(i);
    }
    pending_sends_ = sending_.size() + log_queue_.size();

    std::size_t staging = 0;
    for (const Incoming& message : wave_.receives)
        if (message.pieces.empty() && !links_.peers[message.peer].log) staging += padded(message.nbytes);
    if (links_.staging.size() < staging) links_.staging.resize(staging);
    std::size_t at = 0;
    for (std::size_t i = 0; i < wave_.receives.size(); ++i) {
        const Incoming& message = wave_.receives[i];
        if (message.pieces.empty() && !links_.peers[message.peer].log) {
            staged_[i] = links_.staging.data() + at;
            at += padded(message.nbytes);
        }
        auto found = std::find_if(receiving_.begin(), receiving_.end(),
                                  [&](const Receiving& one) { return one.peer == message.peer; });
        if (found == receiving_.end()) {
            receiving_.push_back({message.peer, {}, 0, {}, 0});
            found = receiving_.end() - 1;
        }
        found->messages.push_back(static_cast<std::uint32_t>(i));
    }
    pending_receives_ = receiving_.size();
}

bool Run::exchange_once(bool& progress) {
    if (log_at_ < log_queue_.size() && !push_log(progress)) return false;
    for (Sending& sending : sending_)
        if (sending.at < sending.parts.size() && !push_socket(sending, progress)) return false;
    bool arrived = false;
    for (Receiving& receiving : receiving_) {
        if (receiving.at == receiving.messages.size()) continue;
        const bool fine = links_.peers[receiving.peer].log ? pull_log(receiving, arrived) : pull_socket(receiving, arrived);
        if (!fine) return false;
    }
    if (arrived) {
        progress = true;
        if (!(program_.folds_last && pending_sends_)) fold_ready();
    }
    return true;
}

bool Run::push_log(bool& progress) {
    while (log_at_ < log_queue_.size()) {
        const Outgoing& message = wave_.sends[log_queue_[log_at_]];
        Record* record = links_.log->reserve(message.nbytes, links_.log_readers);
        if (!record) return true;
        record->readers = 0;
        for (std::uint32_t peer : *message.peers)
            if (links_.peers[peer].log) record->readers |= std::uint64_t{1} << peer;
        record->sequence = sheet_.sequence;
        record->fingerprint = sheet_.fingerprint;
        record->tile = message.tile;
        record->round = message.round;
        std::byte* to = LogWriter::payload(record);
        for (const Piece& piece : message.pieces) {
            std::memcpy(to, at(piece), piece.nbytes);
            to += piece.nbytes;
        }
        links_.log->publish();
        ++log_at_;
        --pending_sends_;
        progress = true;
    }
    return true;
}

bool Run::push_socket(Sending& sending, bool& progress) {
    while (sending.at < sending.parts.size()) {
        iovec vectors[MAX_PARTS];
        const std::size_t number = std::min(sending.parts.size() - sending.at, MAX_PARTS);
        for (std::size_t i = 0; i < number; ++i)
            vectors[i] = {const_cast<std::byte*>(sending.parts[sending.at + i].data), sending.parts[sending.at + i].nbytes};
        msghdr message{};
        message.msg_iov = vectors;
        message.msg_iovlen = number;
        ssize_t sent = ::sendmsg(links_.peers[sending.peer].socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (!gone(errno)) return true;
            culprit = sending.peer;
            status_ = Status::lost;
            return false;
        }
        progress = progress || sent > 0;
        while (sent > 0) {
            IoPart& part = sending.parts[sending.at];
            const std::size_t taken = std::min<std::size_t>(part.nbytes, static_cast<std::size_t>(sent));
            part.data += taken;
            part.nbytes -= taken;
            sent -= static_cast<ssize_t>(taken);
            if (part.nbytes == 0) ++sending.at;
        }
    }
    --pending_sends_;
    return true;
}

bool Run::matches(const Incoming& message, std::uint64_t sequence, std::uint64_t fingerprint, std::uint32_t tile,
                  std::uint32_t round, std::uint64_t nbytes, std::uint32_t peer) {
    if (sequence == sheet_.sequence && fingerprint == sheet_.fingerprint && tile == message.tile && round == message.round &&
        nbytes == message.nbytes)
        return true;
    culprit = peer;
    heard = sheet_.header(peer, tile, round, nbytes);
    heard.sequence = sequence;
    heard.fingerprint = fingerprint;
    status_ = Status::mismatch;
    return false;
}

void Run::copy_in(const Incoming& message, std::size_t offset, const std::byte* data, std::size_t nbytes) {
    for (const Piece& piece : message.pieces) {
        if (offset >= piece.nbytes) {
            offset -= piece.nbytes;
            continue;
        }
        const std::size_t part = std::min(piece.nbytes - offset, nbytes);
        std::memcpy(at(piece) + offset, data, part);
        data += part;
        nbytes -= part;
        offset = 0;
        if (nbytes == 0) return;
    }
}

bool Run::pull_log(Receiving& receiving, bool& progress) {
    LogReader& log = *links_.peers[receiving.peer].log;
    while (receiving.at < receiving.messages.size()) {
        const Record* record = log.peek();
        if (!record) {
            if (!log.broken) return true;
            culprit = receiving.peer;
            status_ = Status::lost;
            return false;
        }
        const std::uint32_t index = receiving.messages[receiving.at];
        const Incoming& message = wave_.receives[index];
        if (!matches(message, record->sequence, record->fingerprint, record->tile, record->round, record->nbytes, receiving.peer))
            return false;
        if (message.pieces.empty())
            staged_[index] = LogReader::payload(record);
        else
            copy_in(message, 0, LogReader::payload(record), message.nbytes);
        log.advance(record);
        arrived_[index] = 1;
        ++receiving.at;
        progress = true;
    }
    if (std::find(read_logs_.begin(), read_logs_.end(), receiving.peer) == read_logs_.end()) read_logs_.push_back(receiving.peer);
    --pending_receives_;
    return true;
}

bool Run::pull_socket(Receiving& receiving, bool& progress) {
    while (receiving.at < receiving.messages.size()) {
        const std::uint32_t index = receiving.messages[receiving.at];
        const Incoming& message = wave_.receives[index];
        iovec vectors[MAX_PARTS];
        std::size_t number = 0;
        std::size_t skip = receiving.got;
        auto add = [&](std::byte* data, std::size_t nbytes) {
            if (skip >= nbytes) {
                skip -= nbytes;
            } else if (number < MAX_PARTS) {
                vectors[number++] = {data + skip, nbytes - skip};
                skip = 0;
            }
        };
        add(reinterpret_cast<std::byte*>(&receiving.head), sizeof(Header));
        if (message.pieces.empty()) add(const_cast<std::byte*>(staged_[index]), message.nbytes);
        for (const Piece& piece : message.pieces) add(at(piece), piece.nbytes);
        msghdr header{};
        header.msg_iov = vectors;
        header.msg_iovlen = number;
        const ssize_t got = ::recvmsg(links_.peers[receiving.peer].socket, &header, MSG_DONTWAIT);
        if (got < 0 && !gone(errno)) return true;
        if (got <= 0) {
            culprit = receiving.peer;
            status_ = Status::lost;
            return false;
        }
        progress = true;
        const std::size_t before = receiving.got;
        receiving.got += static_cast<std::size_t>(got);
        if (before < sizeof(Header) && receiving.got >= sizeof(Header)) {
            const Header expected = sheet_.header(receiving.peer, message.tile, message.round, message.nbytes);
            if (std::memcmp(&expected, &receiving.head, sizeof(Header)) != 0) {
                culprit = receiving.peer;
                heard = receiving.head;
                status_ = Status::mismatch;
                return false;
            }
        }
        if (receiving.got < sizeof(Header) + message.nbytes) continue;
        receiving.got = 0;
        arrived_[index] = 1;
        ++receiving.at;
    }
    --pending_receives_;
    return true;
}

void Run::fold_ready() {
    for (std::size_t i = 0; i < wave_.folds.size(); ++i) {
        if (folded_[i]) continue;
        const auto& terms = wave_.folds[i].terms;
        const bool ready = std::all_of(terms.begin(), terms.end(),
                                       [&](const WaveTerm& term) { return term.message < 0 || arrived_[term.message]; });
        if (!ready) continue;
        folded_[i] = 1;
        fold(wave_.folds[i]);
    }
}

void Run::fold(const Folding& folding) {
    // Terms may be cut at other places than the result: walk all of them in the longest common stretches.
    const std::size_t wide = program_.accumulator(), narrow = program_.element();
    const std::size_t number = folding.terms.size();
    std::vector<Term> terms(number);
    struct Cursor {
        std::size_t piece = 0, element = 0;
    };
    std::vector<Cursor> cursors(number + 1);
    std::size_t done = 0;
    while (cursors[number].piece < folding.dst.size()) {
        Cursor& result = cursors[number];
        const Piece& dst = folding.dst[result.piece];
        std::size_t stretch = dst.nbytes / wide - result.element;
        for (std::size_t t = 0; t < number; ++t) {
            const WaveTerm& term = folding.terms[t];
            const std::size_t size = term.partial ? wide : narrow;
            if (term.message >= 0) {
                terms[t] = {staged_[term.message] + done * size, term.partial};
            } else {
                const Piece& piece = term.pieces[cursors[t].piece];
                stretch = std::min(stretch, piece.nbytes / size - cursors[t].element);
                terms[t] = {at(piece) + cursors[t].element * size, term.partial};
            }
        }
        program_.kernels.fold(at(dst) + result.element * wide, terms.data(), number, stretch);
        done += stretch;
        for (std::size_t t = 0; t <= number; ++t) {
            if (t < number && folding.terms[t].message >= 0) continue;
            const std::vector<Piece>& pieces = t < number ? folding.terms[t].pieces : folding.dst;
            const std::size_t size = t < number && !folding.terms[t].partial ? narrow : wide;
            cursors[t].element += stretch;
            if (cursors[t].element * size == pieces[cursors[t].piece].nbytes) {
                ++cursors[t].piece;
                cursors[t].element = 0;
            }
        }
    }
}

void Run::move(const Moving& moving) {
    const std::size_t to_size = program_.element();
    const std::size_t from_size = moving.finishes ? program_.accumulator() : to_size;
    std::size_t d = 0, s = 0, d_done = 0, s_done = 0;
    while (d < moving.dst.size()) {
        const std::size_t stretch =
            std::min(moving.dst[d].nbytes / to_size - d_done, moving.src[s].nbytes / from_size - s_done);
        std::byte* to = at(moving.dst[d]) + d_done * to_size;
        const std::byte* from = at(moving.src[s]) + s_done * from_size;
        if (moving.finishes)
            program_.kernels.finish(to, from, stretch, program_.divisor);
        else if (to != from)
            std::memmove(to, from, stretch * to_size);
        d_done += stretch;
        s_done += stretch;
        if (d_done * to_size == moving.dst[d].nbytes) ++d, d_done = 0;
        if (s_done * from_size == moving.src[s].nbytes) ++s, s_done = 0;
    }
}

// True if the alarm rang. Sockets wake a sleeper; a log does not, so sleeps on logs are short, and longer the longer it takes.
bool Run::sleep(double waited, double left) {
    std::vector<pollfd> polled{{links_.alarm, POLLIN, 0}};
    std::vector<std::uint32_t> writers;  // of the logs that are waited for
    bool logs = log_at_ < log_queue_.size();
    for (const Sending& sending : sending_)
        if (sending.at < sending.parts.size()) polled.push_back({links_.peers[sending.peer].socket, POLLOUT, 0});
    for (const Receiving& receiving : receiving_) {
        if (receiving.at == receiving.messages.size()) continue;
        if (!links_.peers[receiving.peer].log) {
            polled.push_back({links_.peers[receiving.peer].socket, POLLIN, 0});
            continue;
        }
        logs = true;
        writers.push_back(receiving.peer);
    }
    const std::size_t own = polled.size();
    for (std::uint32_t peer : writers) polled.push_back({links_.peers[peer].socket, POLLRDHUP, 0});
    double pause = left;
    if (logs) pause = waited < YIELDING ? 0 : std::min(left, std::min(LONGEST_NAP, waited / 8));
    const auto nanoseconds = static_cast<long>(pause * 1e9);
    const timespec timeout{nanoseconds / 1000000000, nanoseconds % 1000000000};
    ::ppoll(polled.data(), polled.size(), &timeout, nullptr);
    if (pause == 0) ::sched_yield();
    for (std::size_t i = own; i < polled.size(); ++i)
        if (polled[i].revents) hung_up_ = static_cast<int>(writers[i - own]);
    return polled[0].revents != 0;
}

}  // namespace gradwire
