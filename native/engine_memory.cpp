// Sends and receives messages through shared memory, and runs one-shot programs, which have one round of such messages.
#include <algorithm>

#include "copy.hpp"
#include "engine.hpp"

namespace gradwire {

namespace {
constexpr std::size_t SMALLEST_EXPOSED = 4096;  // below, a copy is cheaper than waiting until a peer has read the array
constexpr std::size_t SMALLEST_SPLIT = 16384;   // below, folding the whole array is cheaper than waiting for peers' parts
}  // namespace

// --- one-shot programs, entirely through shared memory. Every rank posts its array to all others and folds all arrays.
// If the arrays of all ranks are in their arenas, the ranks split the work instead: each folds one part, in the same
// order of ranks, and writes it into the results of the others. Nothing is staged then, and the bits are the same. If a
// rank exposes its array while other ranks stage theirs, it keeps its result in scratch memory until all peers have
// read its array.

bool Engine::in_one_shot(bool& progress) {
    switch (shot_) {
        case Shot::post:
            if (!post_all()) return true;
            progress = true;
            shot_ = Shot::receive;
            [[fallthrough]];
        case Shot::receive:
            if (!receive_all(0, progress)) return status_ == Status::waiting;
            if (!exposing_) {
                reduce(memories_[OUT], {0, program_->out_bytes});
                release_all();
                shot_ = Shot::done;
                return true;
            }
            // All ranks have received the same entries from all ranks, so they make the same choice.
            if (std::any_of(others_.begin(), others_.end(), [&](std::uint32_t peer) { return results_[peer] == 0; })) {
                count(others_.size() * program_->out_bytes);
                scratch_.resize(std::max(scratch_.size(), program_->out_bytes));
                reduce(scratch_.data(), {0, program_->out_bytes});
                release_all();
                shot_ = Shot::hold;
                return in_one_shot(progress);
            }
            count(program_->out_bytes - share(call_.rank).nbytes);  // bytes that peers read in this rank's array
            reduce(memories_[OUT], share(call_.rank));
            release_all();
            shot_ = Shot::push;
            if (stalls()) return true;
            [[fallthrough]];
        case Shot::push:
            if (!push_share()) return true;
            progress = true;
            collected_ = 0;
            shot_ = Shot::collect;
            [[fallthrough]];
        case Shot::collect:
            if (!receive_all(1, progress)) return status_ == Status::waiting;
            release_all();
            exposing_ = false;
            shot_ = Shot::done;
            return true;
        case Shot::hold:
            if (!was_read()) return true;
            copy_bytes(memories_[OUT], scratch_.data(), program_->out_bytes);
            progress = true;
            shot_ = Shot::done;
            return true;
        case Shot::done: return true;
    }
    return true;
}

bool Engine::has_room_for_all() {
    return std::all_of(others_.begin(), others_.end(), [&](std::uint32_t peer) { return outbox_->has_room(peer); });
}

// False while lanes or staging are full.
bool Engine::post_all() {
    const std::size_t nbytes = program_->out_bytes;
    if (!has_room_for_all()) return false;
    const MessageInfo message = info(0, 0, nbytes);
    terms_.resize(peers_.size());
    collected_ = 0;
    const std::uint64_t offset = nbytes >= SMALLEST_SPLIT ? in_arena(memories_[IN], nbytes) : 0;
    const std::uint64_t result = offset ? in_arena(memories_[OUT], nbytes) : 0;
    if (result) {
        outbox_->result = result;
        for (std::uint32_t peer : others_) exposed_[peer] = outbox_->post(peer, message, Place::exposed, offset);
        exposing_ = true;
        return true;
    }
    if (nbytes <= INLINE_BYTES) {
        for (std::uint32_t peer : others_) outbox_->post(peer, message, Place::inlined, 0, memories_[IN]);
        count(others_.size() * nbytes);
        return true;
    }
    std::byte* to = outbox_->reserve(nbytes);
    if (!to) return false;
    copy_bytes(to, memories_[IN], nbytes);
    outbox_->post_reserved(others_, message);
    count(others_.size() * nbytes);
    return true;
}

// False while an entry is missing, or when a peer has sent something unexpected.
bool Engine::receive_all(std::uint32_t round, bool& progress) {
    for (; collected_ < peers_.size(); ++collected_) {
        if (collected_ == call_.rank) {
            terms_[collected_] = {memories_[IN], false};
            continue;
        }
        Inbox& inbox = *peers_[collected_].inbox;
        const Entry* entry = inbox.peek();
        if (!entry) return false;
        if (!expects(collected_, *entry, 0, round, round ? share(collected_).nbytes : program_->out_bytes)) return false;
        terms_[collected_] = {inbox.bytes(*entry), false};
        inbox.take();
        progress = true;
    }
    return true;
}

// The part of the result that a rank folds if ranks split the work: whole cache lines.
Engine::ByteRange Engine::share(std::size_t rank) const {
    const std::size_t nbytes = program_->out_bytes, part = padded((nbytes + peers_.size() - 1) / peers_.size());
    const std::size_t offset = std::min(nbytes, rank * part);
    return {offset, std::min(nbytes - offset, part)};
}

void Engine::reduce(std::byte* to, ByteRange range) {
    for (Term& term : terms_) term.data = static_cast<const std::byte*>(term.data) + range.offset;
    program_->kernels.reduce(to + range.offset, terms_.data(), terms_.size(), range.nbytes / program_->element(),
                             program_->divisor);
}

// Writes this rank's part of the result into every peer's result; no other rank accesses that part. False while lanes
// are full.
bool Engine::push_share() {
    const ByteRange own = share(call_.rank);
    if (!has_room_for_all()) return false;
    for (std::uint32_t peer : others_) {
        std::byte* to = peers_[peer].inbox->at(results_[peer] + own.offset, own.nbytes);
        if (to) copy_bytes(to, memories_[OUT] + own.offset, own.nbytes);
        outbox_->post(peer, info(0, 1, own.nbytes), Place::pushed, 0);
    }
    count(others_.size() * own.nbytes);
    return true;
}

void Engine::release_all() {
    for (std::uint32_t peer : others_) peers_[peer].inbox->release();
}

// --- messages of waves

void Engine::post_messages(bool& progress) {
    for (; next_post_ < posting_.size(); ++next_post_) {
        if (!post(wave_->sends[posting_[next_post_]])) return;
        progress = true;
    }
}

// False while lanes or staging are full.
bool Engine::post(const Outgoing& message) {
    const MessageInfo header = info(message.tile, message.round, message.nbytes);
    const Piece& first = message.pieces.front();
    const bool whole = message.pieces.size() == 1;
    targets_.clear();
    for (std::uint32_t peer : *message.peers) {
        if (!peers_[peer].inbox) continue;
        if (!outbox_->has_room(peer)) return false;
        targets_.push_back(peer);
    }
    const std::uint64_t offset = whole ? in_arena(at(first), message.nbytes) : 0;
    const bool exposes = offset && message.nbytes >= SMALLEST_EXPOSED && !program_->folds_last;
    std::byte* staging = nullptr;
    auto is_not_pushed = [&](std::uint32_t peer) {
        return !(program_->mirrored && whole && first.memory == OUT && results_[peer] &&
                 message.nbytes >= SMALLEST_EXPOSED);
    };
    const bool small = message.nbytes <= INLINE_BYTES && whole;
    if (!exposes && !small && std::any_of(targets_.begin(), targets_.end(), is_not_pushed)) {
        staging = outbox_->reserve(message.nbytes);
        if (!staging) return false;
    }
    count(targets_.size() * message.nbytes);
    auto first_pushed = std::partition(targets_.begin(), targets_.end(), is_not_pushed);
    for (auto peer = first_pushed; peer != targets_.end(); ++peer) {
        // The receiver has sent the offset of its result, and Inbox::at checks that the result is in its arena.
        std::byte* to = peers_[*peer].inbox->at(results_[*peer] + first.offset, message.nbytes);
        if (to) copy_bytes(to, at(first), message.nbytes);
        outbox_->post(*peer, header, Place::pushed, 0);
    }
    targets_.erase(first_pushed, targets_.end());
    if (staging) {
        const bool streamed = store_policy_.streams(message.nbytes);
        const Stopwatch watch(message.nbytes >= StorePolicy::SMALLEST);
        for (const Piece& piece : message.pieces) {
            if (streamed) stream_bytes(staging, at(piece), piece.nbytes);
            else copy_bytes(staging, at(piece), piece.nbytes);
            staging += piece.nbytes;
        }
        if (watch.runs()) store_policy_.record_write(streamed, message.nbytes, watch.nanoseconds());
        outbox_->post_reserved(targets_, header, streamed ? Place::streamed : Place::staged);
        return true;
    }
    for (std::uint32_t peer : targets_) {
        if (small) {
            outbox_->post(peer, header, Place::inlined, 0, at(first));
        } else {
            exposed_[peer] = outbox_->post(peer, header, Place::exposed, offset);
            exposing_ = true;
        }
    }
    return true;
}

bool Engine::expects(std::uint32_t peer, const Entry& entry, std::uint32_t tile, std::uint32_t round, std::size_t nbytes) {
    const bool valid = peers_[peer].inbox->bytes(entry) && (entry.place != Place::pushed || outbox_->result);
    if (entry.sequence == call_.sequence && entry.fingerprint == call_.fingerprint && entry.tile == tile &&
        entry.round == round && entry.nbytes == nbytes && valid) {
        results_[peer] = entry.result;
        reads_arrays_ = reads_arrays_ || entry.place == Place::exposed;
        return true;
    }
    Header header = call_.header(peer, entry.tile, entry.round, entry.nbytes);
    header.sequence = entry.sequence;
    header.fingerprint = entry.fingerprint;
    return fail(Status::mismatch, peer, header);
}

void Engine::copy_in(const Incoming& message, const std::byte* data) {
    for (const Piece& piece : message.pieces) {
        copy_result(at(piece), data, piece.nbytes);
        data += piece.nbytes;
    }
}

bool Engine::pull_memory(Receiving& receiving, bool& progress) {
    Inbox& inbox = *peers_[receiving.peer].inbox;
    while (receiving.at < receiving.messages.size()) {
        const Entry* entry = inbox.peek();
        if (!entry) return true;
        const std::uint32_t index = receiving.messages[receiving.at];
        const Incoming& message = wave_->receives[index];
        if (!expects(receiving.peer, *entry, message.tile, message.round, message.nbytes)) return false;
        if (message.pieces.empty()) {
            staged_[index] = inbox.bytes(*entry);
            places_[index] = entry->place;
            receiving.unreleased = true;
        } else if (entry->place != Place::pushed) {
            const bool streamed = entry->place == Place::streamed;
            const Stopwatch watch(message.nbytes >= StorePolicy::SMALLEST && (streamed || entry->place == Place::staged));
            copy_in(message, inbox.bytes(*entry));
            if (watch.runs()) store_policy_.record_read(streamed, message.nbytes, watch.nanoseconds());
        }
        inbox.take();
        if (!receiving.unreleased) inbox.release();
        arrived_[index] = 1;
        ++receiving.at;
        progress = true;
    }
    --pending_receives_;
    return true;
}

}  // namespace gradwire
