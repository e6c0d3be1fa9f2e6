// Messages through memory: how they are told and heard, and programs that consist of one such round.
#include <algorithm>

#include "engine.hpp"

namespace gradwire {

namespace {
constexpr std::size_t SMALLEST_EXPOSED = 4096;  // below, a copy is cheaper than to wait until a peer has read it
}  // namespace

// --- programs of one round, with everything in memory: all ranks tell all others their array, and fold alike

bool Engine::in_one_shot(bool& progress) {
    const Program& program = *program_;
    const std::size_t nbytes = program.out_bytes;
    if (!posted_) {
        for (std::uint32_t peer : others_)
            if (!outbox_->has_room(peer)) return true;
        const Letter what = letter(0, 0, nbytes);
        if (nbytes <= INLINE_BYTES) {
            for (std::uint32_t peer : others_) outbox_->post(peer, what, Place::here, 0, memories_[IN]);
        } else {
            std::byte* to = outbox_->reserve(nbytes);
            if (!to) return true;
            std::memcpy(to, memories_[IN], nbytes);
            outbox_->post_reserved(others_, what);
        }
        posted_ = progress = true;
        terms_.resize(peers_.size());
    }
    for (; collected_ < peers_.size(); ++collected_) {
        if (collected_ == sheet_.rank) {
            terms_[collected_] = {memories_[IN], false};
            continue;
        }
        Inbox& inbox = *peers_[collected_].inbox;
        const Entry* entry = inbox.peek();
        if (!entry) return true;
        if (!expects(collected_, *entry, 0, 0, nbytes)) return false;
        terms_[collected_] = {inbox.bytes(*entry), false};
        inbox.take();
        progress = true;
    }
    program.kernels.reduce(memories_[OUT], terms_.data(), terms_.size(), nbytes / program.element(), program.divisor);
    for (std::uint32_t peer : others_) peers_[peer].inbox->release();
    return true;
}

// --- messages of waves

void Engine::post_messages(bool& progress) {
    for (; next_post_ < posting_.size(); ++next_post_) {
        if (!post(wave_->sends[posting_[next_post_]])) return;
        progress = true;
    }
}

// False while there is no room.
bool Engine::post(const Outgoing& message) {
    const Letter what = letter(message.tile, message.round, message.nbytes);
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
    auto stays = [&](std::uint32_t peer) {  // not pushed
        return !(program_->mirrored && whole && first.memory == OUT && results_[peer] &&
                 message.nbytes >= SMALLEST_EXPOSED);
    };
    const bool small = message.nbytes <= INLINE_BYTES && whole;
    if (!exposes && !small && std::any_of(targets_.begin(), targets_.end(), stays)) {
        staging = outbox_->reserve(message.nbytes);
        if (!staging) return false;
    }
    auto kept = std::partition(targets_.begin(), targets_.end(), stays);
    for (auto peer = kept; peer != targets_.end(); ++peer) {
        // The receiver has told where its result goes, and Inbox::at checks that it is in its arena.
        std::byte* to = peers_[*peer].inbox->at(results_[*peer] + first.offset, message.nbytes);
        if (to) std::memcpy(to, at(first), message.nbytes);
        outbox_->post(*peer, what, Place::there, 0);
    }
    targets_.erase(kept, targets_.end());
    if (staging) {
        for (const Piece& piece : message.pieces) {
            std::memcpy(staging, at(piece), piece.nbytes);
            staging += piece.nbytes;
        }
        outbox_->post_reserved(targets_, what);
        return true;
    }
    for (std::uint32_t peer : targets_) {
        if (small) {
            outbox_->post(peer, what, Place::here, 0, at(first));
        } else {
            exposed_[peer] = outbox_->post(peer, what, Place::away, offset);
            exposing_ = true;
        }
    }
    return true;
}

bool Engine::expects(std::uint32_t peer, const Entry& entry, std::uint32_t tile, std::uint32_t round, std::size_t nbytes) {
    const bool sound = peers_[peer].inbox->bytes(entry) && (entry.place != Place::there || outbox_->result);
    if (entry.sequence == sheet_.sequence && entry.fingerprint == sheet_.fingerprint && entry.tile == tile &&
        entry.round == round && entry.nbytes == nbytes && sound) {
        results_[peer] = entry.result;
        return true;
    }
    Header header = sheet_.header(peer, entry.tile, entry.round, entry.nbytes);
    header.sequence = entry.sequence;
    header.fingerprint = entry.fingerprint;
    return fail(Status::mismatch, peer, header);
}

void Engine::copy_in(const Incoming& message, const std::byte* data) {
    for (const Piece& piece : message.pieces) {
        std::memcpy(at(piece), data, piece.nbytes);
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
            receiving.holds = true;
        } else if (entry->place != Place::there) {
            copy_in(message, inbox.bytes(*entry));
        }
        inbox.take();
        if (!receiving.holds) inbox.release();
        arrived_[index] = 1;
        ++receiving.at;
        progress = true;
    }
    --pending_receives_;
    return true;
}

}  // namespace gradwire
