// Executes programs for one group: waves of messages, waiting, and the result of a run.
#include "engine.hpp"

#include <algorithm>

#include "copy.hpp"

namespace gradwire {

namespace {
constexpr std::size_t SMALLEST_STREAMED = 16 << 20;  // non-temporal stores are slower at 4 MiB and break even at 8 MiB
}

// --- links

bool Engine::open(std::byte* arena, std::size_t nbytes, std::uint64_t region, std::size_t staging) {
    arena_ = arena;
    arena_bytes_ = nbytes;
    outbox_ = std::make_unique<Outbox>(arena, region, peers_.size(), staging);
    return reinterpret_cast<Directory*>(arena)->publish(call_.group, region);
}

bool Engine::withdraw() {
    for (std::uint32_t peer : others_)
        if (!outbox_->read_by(peer)) return false;
    if (arena_) reinterpret_cast<Directory*>(arena_)->withdraw(call_.group);
    return true;
}

void Engine::map(std::uint32_t peer, std::byte* arena, std::size_t nbytes) {
    peers_.at(peer).inbox.emplace(arena, nbytes, call_.group, call_.rank);
    others_.push_back(peer);
    all_in_memory_ = others_.size() + 1 == peers_.size();
}

std::uint64_t Engine::in_arena(const void* data, std::size_t nbytes) const {
    const auto at = reinterpret_cast<std::uintptr_t>(data), arena = reinterpret_cast<std::uintptr_t>(arena_);
    return arena_ && at > arena && at + nbytes <= arena + arena_bytes_ ? at - arena : 0;
}

// --- one program

void Engine::begin(const Program& program, void* in, void* out, std::uint64_t sequence, std::uint64_t fingerprint,
                   double spin_seconds) {
    program_ = &program;
    call_.sequence = sequence;
    call_.fingerprint = fingerprint;
    backoff_.spin_seconds = spin_seconds;
    backoff_.reset();
    status_ = Status::waiting;
    store_policy_.begin_call();
    memories_[IN] = static_cast<std::byte*>(in);
    memories_[OUT] = static_cast<std::byte*>(out);
    shot_ = Shot::post;
    exposing_ = reads_arrays_ = stalled_ = false;
    if (outbox_) outbox_->result = program.mirrored ? in_arena(out, program.out_bytes) : 0;
    one_shot_ = program.one_shot && all_in_memory_;
    if (one_shot_) return;
    if (scratch_.size() < program.scratch_bytes()) scratch_.resize(program.scratch_bytes());
    memories_[SCRATCH] = scratch_.data();
    first_ = step_ = 0;
    wave_ = nullptr;
    std::fill(results_.begin(), results_.end(), 0);
}

Status Engine::advance(double seconds) {
    backoff_.limit(seconds);
    while (true) {
        bool progress = false;
        if (stalled_) {
            // Wait until the caller's time is over or the alarm is raised.
        } else if (one_shot_) {
            if (!in_one_shot(progress)) return status_;
            if (shot_ == Shot::done && !stalls()) return Status::done;
        } else if (!wave_ && stalls()) {
            // Bytes that the last wave read may be invalid: do not send them on.
        } else if (!wave_ && !next_wave()) {
            if (was_read()) return Status::done;
        } else {
            if (!exchange_once(progress)) return status_;
            if (wave_is_over()) {
                wave_ = nullptr;
                progress = true;
            }
        }
        if (progress) {
            backoff_.reset();
            continue;
        }
        if (backoff_.closed_socket >= 0) {  // all messages that the peer sent before closing it have been received
            for (std::uint32_t peer : others_)
                if (peers_[peer].socket == backoff_.closed_socket) fail(Status::lost, peer);
            return status_;
        }
        const Backoff::Step step = backoff_.step();
        if (step == Backoff::Step::expired) return Status::waiting;
        if (step == Backoff::Step::sleep && sleep()) return Status::alarmed;
    }
}

bool Engine::fail(Status status, std::uint32_t peer, const Header& header) {
    status_ = status;
    culprit = peer;
    received_header = header;
    return false;
}

// Returns whether a peer has reclaimed its arrays, so that bytes read from them may be invalid. A peer does this when
// the generation is broken, and marks its arena first: a rank that read bytes after the array was reclaimed sees the
// mark. Called before bytes that were read are sent to another rank, and before the program is reported as done.
bool Engine::stalls() {
    if (!reads_arrays_) return false;
    std::atomic_thread_fence(std::memory_order_acquire);  // load the arrays before the mark
    stalled_ =
        std::any_of(others_.begin(), others_.end(), [&](std::uint32_t peer) { return peers_[peer].inbox->reclaimed(); });
    return stalled_;
}

bool Engine::sleep() {
    if (stalled_) return backoff_.sleep();
    auto until_read = [&](std::uint32_t peer) {
        if (!outbox_->read_by(peer)) backoff_.wake_by_close(peers_[peer].socket);
    };
    if (one_shot_) {
        const bool receives = shot_ == Shot::receive || shot_ == Shot::collect;
        if (receives) backoff_.wake_by_close(peers_[collected_].socket);
        else {
            backoff_.poll_memory();
            std::for_each(others_.begin(), others_.end(), until_read);
        }
        return backoff_.sleep();
    }
    if (outbox_ && (exposing_ || (wave_ && next_post_ < posting_.size()))) {
        backoff_.poll_memory();
        std::for_each(others_.begin(), others_.end(), until_read);
    }
    for (std::size_t i = 0; wave_ && i < sendings_; ++i)
        if (sending_[i].at < sending_[i].parts.size()) backoff_.wake_by(peers_[sending_[i].peer].socket, POLLOUT);
    for (std::size_t i = 0; wave_ && i < receivings_; ++i) {
        if (receiving_[i].at == receiving_[i].messages.size()) continue;
        const Peer& peer = peers_[receiving_[i].peer];
        if (peer.inbox) backoff_.wake_by_close(peer.socket);
        else backoff_.wake_by(peer.socket, POLLIN);
    }
    return backoff_.sleep();
}

// --- waves

bool Engine::next_wave() {
    while (first_ < program_->tiling.tiles) {
        wave_ = program_->wave(first_, step_, made_);
        if (!wave_) {
            first_ += program_->tiling.in_flight;
            step_ = 0;
            continue;
        }
        ++step_;
        if (wave_->empty()) continue;
        begin_wave();
        return true;
    }
    wave_ = nullptr;
    return false;
}

void Engine::begin_wave() {
    moved_ = false;
    sendings_ = receivings_ = next_post_ = 0;
    posting_.clear();
    all_folded_ = false;
    folded_.assign(wave_->folds.size(), 0);
    arrived_.assign(wave_->receives.size(), 0);
    staged_.assign(wave_->receives.size(), nullptr);
    places_.assign(wave_->receives.size(), Place::exposed);

    auto sending_to = [&](std::uint32_t peer) -> Sending& {
        for (std::size_t i = 0; i < sendings_; ++i)
            if (sending_[i].peer == peer) return sending_[i];
        if (sendings_ == sending_.size()) sending_.emplace_back();
        Sending& sending = sending_[sendings_++];
        sending.peer = peer;
        sending.heads.clear();
        sending.heads.reserve(wave_->sends.size());  // parts point into it
        sending.parts.clear();
        sending.at = 0;
        return sending;
    };
    for (std::uint32_t i = 0; i < wave_->sends.size(); ++i) {
        const Outgoing& message = wave_->sends[i];
        bool through_memory = false;
        for (std::uint32_t peer : *message.peers) {
            if (peers_[peer].inbox) {
                through_memory = true;
                continue;
            }
            Sending& sending = sending_to(peer);
            sending.heads.push_back(call_.header(call_.rank, message.tile, message.round, message.nbytes));
            sending.parts.push_back({reinterpret_cast<const std::byte*>(&sending.heads.back()), sizeof(Header)});
            for (const Piece& piece : message.pieces) sending.parts.push_back({at(piece), piece.nbytes});
        }
        if (through_memory) posting_.push_back(i);
    }
    pending_sockets_ = sendings_;

    auto receiving_from = [&](std::uint32_t peer) -> Receiving& {
        for (std::size_t i = 0; i < receivings_; ++i)
            if (receiving_[i].peer == peer) return receiving_[i];
        if (receivings_ == receiving_.size()) receiving_.emplace_back();
        Receiving& receiving = receiving_[receivings_++];
        receiving.peer = peer;
        receiving.messages.clear();
        receiving.at = receiving.got = 0;
        receiving.unreleased = false;
        return receiving;
    };
    std::size_t staging = 0;
    for (std::uint32_t i = 0; i < wave_->receives.size(); ++i) {
        const Incoming& message = wave_->receives[i];
        receiving_from(message.peer).messages.push_back(i);
        if (message.pieces.empty() && !peers_[message.peer].inbox) staging += padded(message.nbytes);
    }
    if (staging_.size() < staging) staging_.resize(staging);
    std::size_t offset = 0;
    for (std::uint32_t i = 0; staging && i < wave_->receives.size(); ++i) {
        const Incoming& message = wave_->receives[i];
        if (!message.pieces.empty() || peers_[message.peer].inbox) continue;
        staged_[i] = staging_.data() + offset;
        offset += padded(message.nbytes);
    }
    pending_receives_ = receivings_;
}

bool Engine::exchange_once(bool& progress) {
    if (next_post_ < posting_.size()) post_messages(progress);
    if (!moved_) {  // after posting the messages, because peers wait for them
        for (const Moving& moving : wave_->moves) move(moving);
        moved_ = true;
    }
    for (std::size_t i = 0; pending_sockets_ && i < sendings_; ++i)
        if (sending_[i].at < sending_[i].parts.size() && !push_socket(sending_[i], progress)) return false;
    bool arrived = false;
    for (std::size_t i = 0; pending_receives_ && i < receivings_; ++i) {
        Receiving& receiving = receiving_[i];
        if (receiving.at == receiving.messages.size()) continue;
        const bool ok = peers_[receiving.peer].inbox ? pull_memory(receiving, arrived) : pull_socket(receiving, arrived);
        if (!ok) return false;
    }
    progress = progress || arrived;
    const bool sent = next_post_ == posting_.size() && pending_sockets_ == 0;
    if (!all_folded_ && (sent || !program_->folds_last) && (arrived || pending_receives_ == 0)) {
        fold_ready();
        if (pending_receives_ == 0) {
            all_folded_ = true;
            for (std::size_t i = 0; i < receivings_; ++i)
                if (receiving_[i].unreleased) peers_[receiving_[i].peer].inbox->release();
        }
    }
    return true;
}

bool Engine::wave_is_over() {
    if (!all_folded_ || next_post_ < posting_.size() || pending_sockets_) return false;
    // In a mirrored program, an array that a peer may still read is overwritten only by that peer, after it has read
    // it.
    return program_->mirrored || was_read();
}

// Whether peers have read all arrays that were exposed to them.
bool Engine::was_read() {
    if (!exposing_) return true;
    for (std::uint32_t peer : others_)
        if (exposed_[peer] && !outbox_->read_by(peer, exposed_[peer])) return false;
    exposing_ = false;
    return true;
}

void Engine::fold_ready() {
    for (std::size_t i = 0; i < wave_->folds.size(); ++i) {
        if (folded_[i]) continue;
        const auto& terms = wave_->folds[i].terms;
        const bool ready = std::all_of(terms.begin(), terms.end(),
                                       [&](const WaveTerm& term) { return term.message < 0 || arrived_[term.message]; });
        if (!ready) continue;
        folded_[i] = 1;
        // The time of a fold is a sample for a kind of store only if all its terms were stored that way.
        auto all = [&](Place place) {
            return std::all_of(terms.begin(), terms.end(),
                               [&](const WaveTerm& term) { return term.message < 0 || places_[term.message] == place; });
        };
        const std::size_t nbytes = wave_->folds[i].bytes();
        const bool streamed = all(Place::streamed);
        const Stopwatch watch(nbytes >= StorePolicy::SMALLEST && (streamed || all(Place::staged)));
        fold(wave_->folds[i]);
        if (watch.runs()) store_policy_.record_read(streamed, nbytes, watch.nanoseconds());
    }
}

void Engine::fold(const Folding& folding) {
    // Terms and result may be split into pieces at different offsets: process the longest ranges within one piece of
    // each.
    const std::size_t wide = program_->accumulator(), narrow = program_->element();
    const std::size_t number = folding.terms.size();
    terms_.resize(number);
    cursors_.assign(number + 1, {0, 0});
    std::size_t done = 0;
    while (cursors_[number].piece < folding.dst.size()) {
        Cursor& result = cursors_[number];
        const Piece& dst = folding.dst[result.piece];
        std::size_t stretch = dst.nbytes / wide - result.element;
        for (std::size_t t = 0; t < number; ++t) {
            const WaveTerm& term = folding.terms[t];
            const std::size_t size = term.partial ? wide : narrow;
            if (term.message >= 0) {
                terms_[t] = {staged_[term.message] + done * size, term.partial};
            } else {
                const Piece& piece = term.pieces[cursors_[t].piece];
                stretch = std::min(stretch, piece.nbytes / size - cursors_[t].element);
                terms_[t] = {at(piece) + cursors_[t].element * size, term.partial};
            }
        }
        program_->kernels.fold(at(dst) + result.element * wide, terms_.data(), number, stretch);
        done += stretch;
        for (std::size_t t = 0; t <= number; ++t) {
            if (t < number && folding.terms[t].message >= 0) continue;
            const std::vector<Piece>& pieces = t < number ? folding.terms[t].pieces : folding.dst;
            const std::size_t size = t < number && !folding.terms[t].partial ? narrow : wide;
            cursors_[t].element += stretch;
            if (cursors_[t].element * size == pieces[cursors_[t].piece].nbytes) {
                ++cursors_[t].piece;
                cursors_[t].element = 0;
            }
        }
    }
}

// A result that exceeds the caches is written with non-temporal stores. A reduction uses ordinary stores, because its
// result is already in the cache.
void Engine::copy_result(std::byte* to, const std::byte* from, std::size_t nbytes) const {
    if (!program_->reduces && program_->out_bytes >= SMALLEST_STREAMED) stream_bytes(to, from, nbytes);
    else copy_bytes(to, from, nbytes);
}

void Engine::move(const Moving& moving) {
    const std::size_t to_size = program_->element();
    const std::size_t from_size = moving.finishes ? program_->accumulator() : to_size;
    std::size_t d = 0, s = 0, d_done = 0, s_done = 0;
    while (d < moving.dst.size()) {
        const std::size_t stretch =
            std::min(moving.dst[d].nbytes / to_size - d_done, moving.src[s].nbytes / from_size - s_done);
        std::byte* to = at(moving.dst[d]) + d_done * to_size;
        const std::byte* from = at(moving.src[s]) + s_done * from_size;
        if (moving.finishes) program_->kernels.finish(to, from, stretch, program_->divisor);
        else if (to != from) copy_result(to, from, stretch * to_size);
        d_done += stretch;
        s_done += stretch;
        if (d_done * to_size == moving.dst[d].nbytes) ++d, d_done = 0;
        if (s_done * from_size == moving.src[s].nbytes) ++s, s_done = 0;
    }
}

}  // namespace gradwire
