// Sends and receives messages over sockets, in the wire format that the Python executor also uses.
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "engine.hpp"

namespace gradwire {

namespace {
constexpr std::size_t MAX_PARTS = 256;

bool is_fatal(int error) { return error != EAGAIN && error != EWOULDBLOCK && error != EINTR; }
}  // namespace

bool Engine::push_socket(Sending& sending, bool& progress) {
    while (sending.at < sending.parts.size()) {
        iovec vectors[MAX_PARTS];
        const std::size_t number = std::min(sending.parts.size() - sending.at, MAX_PARTS);
        for (std::size_t i = 0; i < number; ++i)
            vectors[i] = {const_cast<std::byte*>(sending.parts[sending.at + i].data), sending.parts[sending.at + i].nbytes};
        msghdr message{};
        message.msg_iov = vectors;
        message.msg_iovlen = number;
        ssize_t sent = ::sendmsg(peers_[sending.peer].socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) return is_fatal(errno) ? fail(Status::lost, sending.peer) : true;
        progress = progress || sent > 0;
        count(static_cast<std::size_t>(sent));
        while (sent > 0) {
            IoPart& part = sending.parts[sending.at];
            const std::size_t taken = std::min<std::size_t>(part.nbytes, static_cast<std::size_t>(sent));
            part.data += taken;
            part.nbytes -= taken;
            sent -= static_cast<ssize_t>(taken);
            if (part.nbytes == 0) ++sending.at;
        }
    }
    --pending_sockets_;
    return true;
}

bool Engine::pull_socket(Receiving& receiving, bool& progress) {
    while (receiving.at < receiving.messages.size()) {
        const std::uint32_t index = receiving.messages[receiving.at];
        const Incoming& message = wave_->receives[index];
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
        const ssize_t got = ::recvmsg(peers_[receiving.peer].socket, &header, MSG_DONTWAIT);
        if (got < 0 && !is_fatal(errno)) return true;
        if (got <= 0) return fail(Status::lost, receiving.peer);
        progress = true;
        const std::size_t before = receiving.got;
        receiving.got += static_cast<std::size_t>(got);
        if (before < sizeof(Header) && receiving.got >= sizeof(Header)) {
            const Header expected = call_.header(receiving.peer, message.tile, message.round, message.nbytes);
            if (std::memcmp(&expected, &receiving.head, sizeof(Header)) != 0)
                return fail(Status::mismatch, receiving.peer, receiving.head);
        }
        if (receiving.got < sizeof(Header) + message.nbytes) continue;
        receiving.got = 0;
        arrived_[index] = 1;
        ++receiving.at;
    }
    --pending_receives_;
    return true;
}

}  // namespace gradwire
