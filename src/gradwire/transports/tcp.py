"""Ranks connected by TCP: one connection for each pair and channel, admitted by mutual challenge.

A forked child must be able to let go of every socket, or it keeps a dead rank looking alive. So each is on record from
the moment it exists, and no fork happens in between: see `Sockets`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradwire.errors import Broken, Closed, NoConnection, Refused, TransportError
from gradwire.security.admission import Dialer, Hello
from gradwire.transports.base import (
    CHECK_SECONDS,
    Arrivals,
    Bell,
    Buffer,
    Check,
    Link,
    LinkClosed,
    no_check,
)
from gradwire.transports.sockets import Sockets
from gradwire.transports.tcp_accept import Acceptance

MAX_BUFFERS = 512  # of one system call; Linux takes 1,024
RETRY_SECONDS = 0.05
# A rank listens before it registers: one whose port refuses connections for so long is dead, not late.
REFUSING_SECONDS = 5.0
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT, errno.ENOTCONN, errno.EBADF)


class TcpLink:
    """A connected, admitted, non-blocking socket."""

    __slots__ = ("_forget", "_socket", "channel", "peer")

    def __init__(self, sock: socket.socket, peer: int, channel: int, forget: Callable[[Link], None]) -> None:
        tune(sock)
        sock.setblocking(False)
        self.peer = peer
        self.channel = channel
        self._socket = sock
        self._forget = forget

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:MAX_BUFFERS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _closed_or(error, self.peer) from error

    def receive(self, buffers: Sequence[memoryview]) -> int:
        try:
            if len(buffers) == 1:
                got = self._socket.recv_into(buffers[0])
            else:
                got = self._socket.recvmsg_into(buffers[:MAX_BUFFERS])[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _closed_or(error, self.peer) from error
        if not got:
            raise LinkClosed
        return got

    def close(self) -> None:
        # Shutting down first wakes a poll of another thread; a bare close would leave it asleep.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._forget(self)

    def fileno(self) -> int:
        return self._socket.fileno()


def _closed_or(error: OSError, peer: int) -> Exception:
    if error.errno in _GONE:
        return LinkClosed()
    return TransportError(f"the link to rank {peer} failed: {error}", peer=peer)


def tune(sock: socket.socket) -> None:
    """Small messages leave at once; a vanished host is noticed within half a minute even when nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class PipeBell:
    """A bell that polls hear: a pipe with a byte in it."""

    def __init__(self) -> None:
        self._hears, self._rings = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self.rung = False

    def ring(self) -> None:
        with self._lock:
            if not self.rung and self._rings >= 0:
                self.rung = True
                os.write(self._rings, b"!")

    def silence(self) -> None:
        with self._lock:
            if self.rung and self._hears >= 0:
                self.rung = False
                os.read(self._hears, 1)

    def fileno(self) -> int:
        return self._hears

    def close(self) -> None:
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        if self._hears >= 0:
            os.close(self._hears)
            os.close(self._rings)
        self._hears = self._rings = -1


class TcpTransport:
    """One rank's way to the others by TCP. Listen first (the address goes into the registration), then `assemble`."""

    name = "tcp"

    def __init__(self, host: str) -> None:
        self.rank = -1
        self.cores = 0.0
        self.arrivals = Arrivals()
        self._addresses: list[tuple[str, int]] = []
        self._hello: Callable[[int, int], Hello] | None = None
        self._key = b""
        self._links: set[TcpLink] = set()
        self._bells: list[PipeBell] = []
        self._lock = threading.Lock()
        self._acceptance: Acceptance | None = None
        self._closed = False
        self._sockets = Sockets()
        self._listener = listen(host, self._sockets)

    @property
    def address(self) -> tuple[str, int]:
        """Where peers find this rank."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def assemble(
        self, *, rank: int, addresses: Sequence[tuple[str, int]], job: bytes, generation: int, key: bytes, cores: float
    ) -> None:
        """Learn who the peers are and begin to admit them."""
        self.rank = rank
        self.cores = cores
        self._addresses = list(addresses)
        self._key = key
        self._hello = lambda target, channel: Hello(job, generation, channel, rank, target)
        self._acceptance = Acceptance(self._listener, self._sockets, key, self._refusal, self._admitted, self.bell())
        self._acceptance.start()

    def _refusal(self, hello: Hello) -> str | None:
        assert self._hello is not None
        expected = self._hello(self.rank, hello.channel)
        if hello.job != expected.job:
            return "it belongs to another job"
        if hello.generation != expected.generation:
            return f"it belongs to generation {hello.generation}, this is {expected.generation}"
        if hello.target != self.rank:
            return f"it wants rank {hello.target}, this is rank {self.rank}"
        if not 0 <= hello.source < len(self._addresses) or hello.source == self.rank:
            return f"rank {hello.source} is not a peer of rank {self.rank} of {len(self._addresses)}"
        return self.arrivals.refusal(hello.source, hello.channel)

    def _admitted(self, sock: socket.socket, hello: Hello) -> None:
        with contextlib.suppress(Closed):  # a peer that comes while this rank leaves: it sees the end of its link
            self.arrivals.add(self._keep(TcpLink(sock, hello.source, hello.channel, self._forget)))

    def _keep(self, link: TcpLink) -> TcpLink:
        with self._lock:
            if not self._closed:
                self._links.add(link)
                return link
        link.close()  # made while another thread closed everything
        raise Closed("the transport is closed", peer=link.peer)

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
        self.arrivals.forget(link)

    def dial(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        assert self._hello is not None
        hello = self._hello(peer, channel)
        refusing_since: float | None = None
        while True:
            now = time.monotonic()
            try:
                return self._keep(TcpLink(self._call(hello, deadline, check), peer, channel, self._forget))
            except (Refused, Closed, Broken):
                raise
            except OSError as error:  # an admission that was broken off is tried again too: the door may be crowded
                refusing = isinstance(error, ConnectionRefusedError)
                refusing_since = (refusing_since or now) if refusing else None
                dead = refusing_since is not None and now - refusing_since > REFUSING_SECONDS
                if dead or now + RETRY_SECONDS >= deadline:
                    host, port = self._addresses[peer]
                    raise NoConnection(f"rank {peer} at {host}:{port} does not answer: {error}", peer=peer) from error
            check()
            time.sleep(RETRY_SECONDS)

    def _call(self, hello: Hello, deadline: float, check: Check) -> socket.socket:
        """An admitted connection."""
        sock = self._sockets.open(self._addresses[hello.target][0])
        try:
            _connect(sock, self._addresses[hello.target], deadline, check)
            self._admit(sock, hello, deadline, check)
        except BaseException:
            sock.close()
            raise
        return sock

    def _admit(self, sock: socket.socket, hello: Hello, deadline: float, check: Check) -> None:
        dialer = Dialer(self._key, hello)
        sock.sendall(dialer.start())  # less than any socket's buffer
        while not dialer.done:
            _await(sock, select.POLLIN, deadline, check)
            data = sock.recv(dialer.wanted)
            if not data:
                raise dialer.eof()
            answer = dialer.feed(data)
            if answer:
                sock.sendall(answer)

    def accept(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        return self.arrivals.take(peer, channel, deadline, check)

    def adopt(self, channel: int, taker: Callable[[Link], None]) -> None:
        self.arrivals.adopt(channel, taker)

    def bell(self) -> PipeBell:
        bell = PipeBell()
        with self._lock:
            self._bells.append(bell)
        return bell

    def wait(self, reads: Iterable[Link], writes: Iterable[Link], bell: Bell, timeout: float) -> None:
        interest: dict[Any, int] = {bell: select.POLLIN}
        for link in reads:
            interest[link] = select.POLLIN
        for link in writes:
            interest[link] = interest.get(link, 0) | select.POLLOUT
        poll = select.poll()
        for thing, events in interest.items():
            descriptor = thing.fileno()
            if descriptor < 0:
                return  # closed by another thread meanwhile: the caller's next use of it tells
            poll.register(descriptor, events)
        poll.poll(max(0.0, timeout) * 1000)

    def gone(self, peer: int) -> bool:
        return False  # the kernel closes a dead process's sockets

    def listens(self, peer: int) -> bool:
        sock = self._sockets.open(self._addresses[peer][0])
        with sock:
            try:
                _connect(sock, self._addresses[peer], time.monotonic() + 1.0, no_check)
            except ConnectionRefusedError:
                return False
            except OSError:
                pass  # no answer is no proof
        return True

    def touch(self) -> None:
        """Nothing to remember: a process is its own witness."""

    def close(self) -> None:
        with self._lock:
            self._closed, closed = True, self._closed
        if closed:
            return
        if self._acceptance is not None:
            self._acceptance.stop()
        self._listener.close()
        self.arrivals.close()
        for link in list(self._links):
            link.close()
        for bell in self._bells:
            bell.close()

    def abandon(self) -> None:
        # Locks may be held by threads that do not exist in the child; nothing here takes one.
        self._closed = True
        self._sockets.abandon()
        for bell in self._bells:
            bell.abandon()


def listen(host: str, sockets: Sockets) -> socket.socket:
    """A listening socket on a free port of a numeric address."""
    try:
        listener = sockets.open(host)
    except OSError as error:
        raise TransportError(f"cannot listen on {host}: {error}") from error
    try:
        listener.bind(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise TransportError(f"cannot listen on {host}: {error}") from error
    listener.setblocking(False)
    return listener


def _connect(sock: socket.socket, address: tuple[str, int], deadline: float, check: Check) -> None:
    """Connect a socket; it does not block afterwards either."""
    sock.setblocking(False)
    trouble = sock.connect_ex(address)
    if trouble == errno.EINPROGRESS:
        _await(sock, select.POLLOUT, deadline, check)
        trouble = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if trouble:
        raise OSError(trouble, os.strerror(trouble))  # which makes it a ConnectionRefusedError where it is one
    if sock.getsockname() == sock.getpeername():
        # On loopback a socket can meet itself where nobody listens, if the port is among the ephemeral ones.
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _await(sock: socket.socket, events: int, deadline: float, check: Check) -> None:
    poll = select.poll()
    poll.register(sock, events)
    while not poll.poll(1000 * min(CHECK_SECONDS, max(0.0, deadline - time.monotonic()))):
        check()
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
