"""`TcpTransport`: one TCP connection for each pair of ranks and channel, admitted by mutual challenge.

With credentials, a connection begins with TLS, and the admission happens inside. The certificate at each end must then
cover the member with that rank.

A forked child must close every socket, or it would make a dead rank look alive. So each socket is recorded before a
fork can copy it: see `Sockets`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from gradwire.errors import Closed, ConfigError, TransportError
from gradwire.security.admission import Acceptor, Dialer, Hello
from gradwire.security.credentials import Credentials
from gradwire.transports.base import LIFELINE_CHANNEL, Arrivals, Bell, Check, Link, no_check
from gradwire.transports.fork_safe_sockets import Sockets
from gradwire.transports.tcp.accept import Acceptance, Listener, Stream
from gradwire.transports.tcp.dial import Attempts, Call, TcpCall, connected, dial
from gradwire.transports.tcp.link import SocketLink, TcpLink
from gradwire.transports.tcp.tls_link import HeartbeatLink, TlsLink, TlsStream

__all__ = ["TcpLink", "TcpTransport"]


class PipeBell:
    """A bell for `poll`: a pipe that is readable while the bell is rung."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self.rung = False

    def ring(self) -> None:
        with self._lock:
            if not self.rung and self._write_end >= 0:
                self.rung = True
                os.write(self._write_end, b"!")

    def silence(self) -> None:
        with self._lock:
            if self.rung and self._read_end >= 0:
                self.rung = False
                os.read(self._read_end, 1)

    def fileno(self) -> int:
        return self._read_end

    def close(self) -> None:
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        if self._read_end >= 0:
            os.close(self._read_end)
            os.close(self._write_end)
        self._read_end = self._write_end = -1


class TcpTransport:
    """The transport of one rank over TCP. It listens at once, for the registration; `assemble` makes it usable."""

    name = "tcp"
    relayed = False

    def __init__(self, host: str, credentials: Credentials | None = None) -> None:
        self.rank = -1
        self.encrypted = credentials is not None
        self._credentials = credentials
        self._members: list[str] = []
        self.cores = 0.0
        self.arrivals = Arrivals()
        self._addresses: list[tuple[str, int]] = []
        self._hello: Callable[[int, int], Hello] | None = None
        self._key = b""
        self._links: set[SocketLink] = set()
        self._bells: list[PipeBell] = []
        self._lock = threading.Lock()
        self._acceptance: Acceptance | None = None
        self._closed = False
        self._sockets = Sockets()
        self._listener = listen(host, self._sockets)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which this rank listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def assemble(
        self,
        *,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        job: bytes,
        generation: int,
        key: bytes,
        cores: float,
        members: Sequence[str] = (),
    ) -> None:
        """Set the peers, and begin to admit their connections.

        `addresses` and `members` are in rank order. `members` are the member ids, which certificates must cover.
        """
        if self._credentials is not None:
            self._check_own(self._credentials, members[rank])
        self._members = list(members)
        self.rank = rank
        self.cores = cores
        self._addresses = list(addresses)
        self._key = key
        self._hello = lambda target, channel: Hello(job, generation, channel, rank, target)
        self._acceptance = self._admissions(key)
        self._acceptance.start()

    def _admissions(self, key: bytes) -> Acceptance:
        """Return the side that admits the connections of peers."""
        incoming = Listener(self._listener, self._sockets)
        return Acceptance(incoming, key, self._refusal, self._admitted, self.bell(), self._credentials)

    @staticmethod
    def _check_own(credentials: Credentials, member: str) -> None:
        if credentials.refusal(credentials.identity, member) is not None:
            raise ConfigError(
                f"this process is member {member}, but its certificate is for {credentials.member}, so the other ranks "
                "would refuse it: check GRADWIRE_TLS_CERT"
            )

    def _refusal(self, hello: Hello, stream: Stream) -> str | None:
        assert self._hello is not None
        expected = self._hello(self.rank, hello.channel)
        if hello.job != expected.job:
            return "it belongs to another job"
        if hello.generation != expected.generation:
            return f"it belongs to generation {hello.generation}, this is {expected.generation}"
        if hello.target != self.rank:
            return f"it dialled rank {hello.target}, this is rank {self.rank}"
        if not 0 <= hello.source < len(self._addresses) or hello.source == self.rank:
            return f"rank {hello.source} is not a peer of rank {self.rank} of {len(self._addresses)}"
        if reason := self._check_certificate(hello.source, stream):
            return f"it claims to be rank {hello.source}, but {reason}"
        return self.arrivals.refusal(hello.source, hello.channel)

    def _check_certificate(self, rank: int, stream: Stream) -> str | None:
        """Return the reason why the certificate of a connection does not fit this rank, or None."""
        if self._credentials is None or not isinstance(stream, TlsStream):
            return None
        try:
            return self._credentials.refusal(stream.identity(), self._members[rank])
        except ValueError as error:
            return f"its certificate is not accepted: {error}"

    def _admitted(self, stream: Stream, acceptor: Acceptor) -> None:
        hello = acceptor.hello
        assert hello is not None
        with contextlib.suppress(Closed):  # this rank is closing; the peer's new link ends
            self.arrivals.add(self._register(self._link(stream, hello.source, hello.channel, acceptor)))

    def _link(self, stream: Stream, peer: int, channel: int, admission: Dialer | Acceptor) -> SocketLink:
        if not isinstance(stream, TlsStream):
            return TcpLink(stream, peer, channel, self._forget)
        if channel == LIFELINE_CHANNEL:
            return HeartbeatLink(stream, peer, channel, self._forget, admission.session_key("beats"))
        return TlsLink(stream, peer, channel, self._forget)

    def _register(self, link: SocketLink) -> SocketLink:
        """Add a link to those that `close` closes; raise `Closed` if the transport is closed."""
        with self._lock:
            if not self._closed:
                self._links.add(link)
                return link
        link.close()  # another thread closed the transport meanwhile
        raise Closed("the transport is closed", peer=link.peer)

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
        self.arrivals.forget(link)

    def dial(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        made: list[Link] = []
        self.dial_all([peer], channel, deadline, made.append, check)
        return made[0]

    def dial_all(
        self, peers: Sequence[int], channel: int, deadline: float, made: Callable[[Link], None], check: Check = no_check
    ) -> None:
        def admitted(index: int, call: Call) -> None:
            assert call.stream is not None
            made(self._register(self._link(call.stream, peers[index], channel, call.dialer)))

        def attempts(peer: int) -> Attempts:
            host, port = self._addresses[peer]
            return Attempts(peer, f"rank {peer} at {host}:{port}", partial(self._call, peer, channel), deadline)

        dial([attempts(peer) for peer in peers], check, admitted)

    def _call(self, peer: int, channel: int) -> Call:
        assert self._hello is not None
        hello = self._hello(peer, channel)
        address = self._addresses[peer]
        return TcpCall(self._sockets, address, self._key, hello, self._credentials, self._check_certificate)

    def accept(self, peer: int, channel: int, deadline: float, check: Check = no_check) -> Link:
        return self.arrivals.take(peer, channel, deadline, check)

    def adopt(self, channel: int, taker: Callable[[Link], None]) -> None:
        self.arrivals.adopt(channel, taker)

    def bell(self) -> PipeBell:
        bell = PipeBell()
        with self._lock:
            self._bells.append(bell)
        return bell

    def wait(self, reads: Iterable[Link], writes: Iterable[Link], bell: Bell, timeout: float) -> Collection[Link]:
        interest: dict[Any, int] = {bell: select.POLLIN}
        reads = list(reads)
        for link in reads:
            if isinstance(link, TlsLink) and link.pending:
                return reads
            interest[link] = select.POLLIN
        for link in writes:
            interest[link] = interest.get(link, 0) | select.POLLOUT
        poll = select.poll()
        descriptors: dict[int, Any] = {}
        for thing, events in interest.items():
            descriptor = thing.fileno()
            if descriptor < 0:
                return reads  # another thread closed it: the caller's next use of the link raises
            descriptors[descriptor] = thing
            poll.register(descriptor, events)
        ready = {descriptors[descriptor] for descriptor, _ in poll.poll(max(0.0, timeout) * 1000)}
        return ready.intersection(reads)

    def gone(self, peer: int) -> bool:
        return False  # the kernel closes a dead process's sockets

    def listens(self, peer: int) -> bool:
        poll, deadline = select.poll(), time.monotonic() + 1.0
        with self._sockets.open(self._addresses[peer][0]) as sock:
            sock.setblocking(False)
            poll.register(sock, select.POLLOUT)
            try:
                for _ in connected(sock, sock.connect_ex(self._addresses[peer])):
                    if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                        break
            except ConnectionRefusedError:
                return False
            except OSError:
                pass
        return True  # a missing answer proves nothing

    def touch(self) -> None:
        """Do nothing: the kernel closes the sockets of a process that ends."""

    def close(self) -> None:
        with self._lock:
            self._closed, closed = True, self._closed
        if closed:
            return
        if self._acceptance is not None:
            self._acceptance.stop()
        self.arrivals.close()
        for link in list(self._links):
            link.close()
        self._links_closed()
        self._listener.close()
        for bell in self._bells:
            bell.close()

    def _links_closed(self) -> None:
        """Finish what this transport does for its links, when all of them are closed."""

    def abandon(self) -> None:
        # Acquires no lock: the thread that holds it may not exist in the child.
        self._closed = True
        self._sockets.abandon()
        for bell in self._bells:
            bell.abandon()


def listen(host: str, sockets: Sockets) -> socket.socket:
    """Return a listening socket on a free port of a numeric address."""
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
