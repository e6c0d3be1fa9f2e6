// Carries programs out for one group, without the interpreter: through memory where it is shared, over sockets elsewhere.
//
// Within a wave all messages progress together. `advance` returns when the program is done, when it has waited for as long
// as it was told to (the caller then looks at signals, deadlines and the alarm's reason), or when a peer is gone or says
// something else than expected. It can be called again after a wait.
//
// A message between ranks that share memory takes the shortest way that its ends allow:
//
//     here      a few bytes: in the entry itself
//     staged    copied into staging, read there
//     exposed   it lies in the sender's arena: read where it is; the sender waits until that has happened
//     pushed    it belongs into the receiver's arena: written there by the sender (in an all-reduce of the direct kind,
//               where the rank that writes a segment is the only one that reads the receiver's share of it)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "inbox.hpp"
#include "manner.hpp"
#include "outbox.hpp"
#include "patience.hpp"
#include "program.hpp"
#include "stopwatch.hpp"
#include "wire.hpp"

namespace gradwire {

enum class Status : int { done = 0, waiting = 1, lost = 2, mismatch = 3, alarmed = 4 };

class Engine {
  public:
    Engine(const Sheet& sheet, std::uint32_t size, int alarm)
        : sheet_(sheet), peers_(size), results_(size), exposed_(size), patience_(alarm) {}

    // --- links
    void connect(std::uint32_t peer, int socket) { peers_.at(peer).socket = socket; }
    // Speak through this rank's own arena, which begins with its directory; false if that is full.
    bool open(std::byte* arena, std::size_t nbytes, std::uint64_t region, std::size_t staging);
    // Take this rank's region away from the others, unless somebody has yet to read what is there for it: then false.
    bool withdraw();
    // Hear a peer through its arena.
    void map(std::uint32_t peer, std::byte* arena, std::size_t nbytes);

    // --- one program at a time
    // awake_for: seconds in which this rank may keep a core busy by waiting; 0: it has none for itself.
    void begin(const Program& program, void* in, void* out, std::uint64_t sequence, std::uint64_t fingerprint, double awake_for);
    Status advance(double seconds);
    std::uint32_t culprit = 0;
    Header heard{};
    // Bytes that went to peers so far, each peer's counted; any thread may ask.
    std::uint64_t sent() const { return sent_.load(std::memory_order_relaxed); }

  private:
    struct Peer {
        int socket = -1;
        std::optional<Inbox> inbox;
    };
    struct IoPart {
        const std::byte* data;
        std::size_t nbytes;
    };
    struct Sending {  // to one socket
        std::uint32_t peer = 0;
        std::vector<Header> heads;
        std::vector<IoPart> parts;
        std::size_t at = 0;
    };
    struct Receiving {  // from one peer
        std::uint32_t peer = 0;
        std::vector<std::uint32_t> messages;  // indices into the wave's receives
        std::size_t at = 0;                   // the current one
        bool holds = false;                   // some of what has come is still to be folded
        Header head{};
        std::size_t got = 0;  // bytes of it, header included
    };

    // --- programs of one round, with everything in memory
    enum class Shot { tell, hear, push, collect, keep, done };
    struct Stretch {  // of bytes
        std::size_t offset, nbytes;
    };
    bool in_one_shot(bool& progress);
    bool has_room_for_all();
    bool tell_all();
    bool hear_all(std::uint32_t round, bool& progress);
    Stretch share(std::size_t rank) const;
    void reduce(std::byte* to, Stretch stretch);
    bool push_share();
    void release_all();
    // --- waves
    bool next_wave();
    void begin_wave();
    bool exchange_once(bool& progress);
    bool wave_is_over();
    void fold_ready();
    void fold(const Folding& folding);
    void move(const Moving& moving);
    // --- messages
    void post_messages(bool& progress);
    bool post(const Outgoing& message);
    bool push_socket(Sending& sending, bool& progress);
    bool pull_socket(Receiving& receiving, bool& progress);
    bool pull_memory(Receiving& receiving, bool& progress);
    bool expects(std::uint32_t peer, const Entry& entry, std::uint32_t tile, std::uint32_t round, std::size_t nbytes);
    void copy_result(std::byte* to, const std::byte* from, std::size_t nbytes) const;
    bool fail(Status status, std::uint32_t peer, const Header& header = {});
    void copy_in(const Incoming& message, const std::byte* data);
    bool was_read();
    bool stalls();
    bool sleep();

    std::byte* at(const Piece& piece) const { return memories_[piece.memory] + piece.offset; }
    std::uint64_t in_arena(const void* data, std::size_t nbytes) const;
    void count(std::size_t nbytes) { sent_.store(sent() + nbytes, std::memory_order_relaxed); }  // there is one writer
    Letter letter(std::uint32_t tile, std::uint32_t round, std::size_t nbytes) const {
        return {sheet_.sequence, sheet_.fingerprint, tile, round, static_cast<std::uint32_t>(nbytes)};
    }

    Sheet sheet_;
    std::atomic<std::uint64_t> sent_ = 0;
    std::vector<Peer> peers_;
    bool all_in_memory_ = false;
    std::byte* arena_ = nullptr;
    std::size_t arena_bytes_ = 0;
    std::unique_ptr<Outbox> outbox_;
    std::vector<std::uint32_t> others_;     // all peers that are reached through memory
    std::vector<std::uint64_t> results_;    // where in its arena a peer's result goes, if this call has told
    std::vector<std::uint64_t> exposed_;    // entries of a peer's lane that have to be read before this rank's memory is free
    bool exposing_ = false;
    std::vector<std::byte> scratch_, staging_;

    const Program* program_ = nullptr;
    std::byte* memories_[3] = {};
    bool one_shot_ = false;
    bool reads_arrays_ = false;  // of peers, where these lie
    bool stalled_ = false;  // for good, because a peer has left: the alarm tells why
    Shot shot_ = Shot::tell;
    std::uint32_t collected_ = 0;  // terms of a one-shot that are here

    const Wave* wave_ = nullptr;
    Wave made_;
    std::size_t first_ = 0, step_ = 0;
    std::vector<Sending> sending_;
    std::vector<Receiving> receiving_;
    std::size_t sendings_ = 0, receivings_ = 0;              // of those that are in use
    std::size_t pending_sockets_ = 0, pending_receives_ = 0;
    std::vector<std::uint32_t> posting_;                     // messages that go through memory
    std::size_t next_post_ = 0;
    std::vector<std::uint32_t> targets_;
    bool moved_ = false;
    bool all_folded_ = false;
    std::vector<const std::byte*> staged_;                   // where each message that a fold waits for lies
    std::vector<Place> places_;                              // and how it came there
    std::vector<char> arrived_, folded_;
    Manner manner_;
    std::vector<Term> terms_;
    struct Cursor {
        std::size_t piece, element;
    };
    std::vector<Cursor> cursors_;
    Status status_ = Status::waiting;
    Patience patience_;
};

}  // namespace gradwire
