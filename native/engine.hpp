// Runs the programs of one group without the interpreter. Ranks that share memory exchange messages through it, other
// ranks over sockets.
//
// Within a wave all messages progress concurrently. `advance` returns when the program is done, when it has waited for
// the given time (the caller then checks signals, deadlines and the reason of an alarm), when a peer is lost, or when a
// peer has sent something unexpected. It can be called again after a wait.
//
// A message between ranks that share memory takes the cheapest route that both ends allow (enum Place):
//
//     inlined   a few bytes, in the entry itself
//     staged    copied into the sender's staging and read there
//     exposed   the bytes are in the sender's arena: the receiver reads them there, and the sender waits for that
//     pushed    the result is in the receiver's arena: the sender writes it there (direct all-reduce: the rank that
//               writes a segment is the only rank that reads the receiver's input for it)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backoff.hpp"
#include "inbox.hpp"
#include "outbox.hpp"
#include "program.hpp"
#include "stopwatch.hpp"
#include "store_policy.hpp"
#include "wire.hpp"

namespace gradwire {

enum class Status { done, waiting, lost, mismatch, alarmed };

class Engine {
  public:
    Engine(const CallHeader& call, std::uint32_t size, int alarm)
        : call_(call), peers_(size), results_(size), exposed_(size), backoff_(alarm) {}

    // --- links
    void connect(std::uint32_t peer, int socket) { peers_.at(peer).socket = socket; }
    // Send through this rank's own arena, which begins with its directory; false if the directory is full.
    bool open(std::byte* arena, std::size_t nbytes, std::uint64_t region, std::size_t staging);
    // Remove this rank's region from the directory; false if a peer has not read all its messages yet.
    bool withdraw();
    // Receive from a peer through its arena.
    void map(std::uint32_t peer, std::byte* arena, std::size_t nbytes);

    // --- one program at a time
    // spin_seconds: how long this rank may keep a core busy while it waits; 0 if it has no core of its own.
    void begin(const Program& program, void* in, void* out, std::uint64_t sequence, std::uint64_t fingerprint,
               double spin_seconds);
    Status advance(double seconds);
    std::uint32_t culprit = 0;  // the peer that was lost or sent something unexpected
    Header received_header{};   // the header it sent instead
    // Bytes sent so far, counted once per receiver; any thread may call this.
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
        bool unreleased = false;              // some received bytes must still be folded
        Header head{};
        std::size_t got = 0;  // bytes of the current message, header included
    };

    // --- one-shot programs, entirely through shared memory
    enum class Shot { post, receive, push, collect, hold, done };
    struct ByteRange {
        std::size_t offset, nbytes;
    };
    bool in_one_shot(bool& progress);
    bool has_room_for_all();
    bool post_all();
    bool receive_all(std::uint32_t round, bool& progress);
    ByteRange share(std::size_t rank) const;
    void reduce(std::byte* to, ByteRange range);
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
    void count(std::size_t nbytes) { sent_.store(sent() + nbytes, std::memory_order_relaxed); }  // only one thread writes
    MessageInfo info(std::uint32_t tile, std::uint32_t round, std::size_t nbytes) const {
        return {call_.sequence, call_.fingerprint, tile, round, static_cast<std::uint32_t>(nbytes)};
    }

    CallHeader call_;
    std::atomic<std::uint64_t> sent_ = 0;
    std::vector<Peer> peers_;
    bool all_in_memory_ = false;
    std::byte* arena_ = nullptr;
    std::size_t arena_bytes_ = 0;
    std::unique_ptr<Outbox> outbox_;
    std::vector<std::uint32_t> others_;     // all peers that share memory with this rank
    std::vector<std::uint64_t> results_;    // offset of a peer's result in its arena, from its entries of this call
    std::vector<std::uint64_t> exposed_;    // entries that a peer must consume before this rank may reuse its array
    bool exposing_ = false;
    std::vector<std::byte> scratch_, staging_;

    const Program* program_ = nullptr;
    std::byte* memories_[3] = {};
    bool one_shot_ = false;
    bool reads_arrays_ = false;  // this program has read arrays in peers' arenas
    bool stalled_ = false;  // for the rest of the call: a peer has reclaimed its arrays, and the alarm will be raised
    Shot shot_ = Shot::post;
    std::uint32_t collected_ = 0;  // terms of a one-shot that have been received

    const Wave* wave_ = nullptr;
    Wave made_;
    std::size_t first_ = 0, step_ = 0;
    std::vector<Sending> sending_;
    std::vector<Receiving> receiving_;
    std::size_t sendings_ = 0, receivings_ = 0;              // number in use
    std::size_t pending_sockets_ = 0, pending_receives_ = 0;
    std::vector<std::uint32_t> posting_;                     // messages that go through shared memory
    std::size_t next_post_ = 0;
    std::vector<std::uint32_t> targets_;
    bool moved_ = false;
    bool all_folded_ = false;
    std::vector<const std::byte*> staged_;                   // address of each term that a fold needs
    std::vector<Place> places_;                              // and how it was stored
    std::vector<char> arrived_, folded_;
    StorePolicy store_policy_;
    std::vector<Term> terms_;
    struct Cursor {
        std::size_t piece, element;
    };
    std::vector<Cursor> cursors_;
    Status status_ = Status::waiting;
    Backoff backoff_;
};

}  // namespace gradwire
