"""TCP: admission over real sockets, and acceptors that keep working whatever unknown clients send."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradwire.errors import Closed, NoConnection, Refused, TransportError
from gradwire.security.admission import Acceptor
from gradwire.transports.base import Link, LinkClosed
from gradwire.transports.fork_safe_sockets import Sockets
from gradwire.transports.tcp import accept, dial
from gradwire.transports.tcp.transport import TcpLink, TcpTransport
from support import forked_child
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture
from support.tcp_proxy import TcpProxy

LONG = 60.0
FOREVER = 10_000.0  # seconds: a wait this long is a hang
JOB, KEY = secrets.token_bytes(16), secrets.token_bytes(32)
Assemble = Callable[..., list[TcpTransport]]


@pytest.fixture
def assemble() -> Iterator[Assemble]:
    """Make transports. `via` replaces the peers' addresses for the last rank, which gets `key`."""
    made: list[TcpTransport] = []

    def make(
        via: Callable[[tuple[str, int]], tuple[str, int]] | None = None, key: bytes = KEY, size: int = 2
    ) -> list[TcpTransport]:
        transports = [TcpTransport("127.0.0.1") for _ in range(size)]
        made.extend(transports)
        addresses = [transport.address for transport in transports]
        *others, last = addresses
        seen_by_last = [*map(via, others), last] if via else addresses
        for rank, transport in enumerate(transports):
            seen, held = (seen_by_last, key) if rank == size - 1 else (addresses, KEY)
            transport.assemble(rank=rank, addresses=seen, job=JOB, generation=1, key=held, cores=0.0)
        return transports

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def proxy() -> Iterator[Callable[..., TcpProxy]]:
    made: list[TcpProxy] = []

    def make(target: tuple[str, int], **options: Any) -> TcpProxy:
        made.append(TcpProxy(target, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def deadline() -> float:
    return time.monotonic() + LONG


def test_recorded_admission_cannot_be_replayed(
    assemble: Assemble, proxy: Callable[..., TcpProxy], captured: CapturedLog
) -> None:
    between: list[TcpProxy] = []

    def through(address: tuple[str, int]) -> tuple[str, int]:
        between.append(proxy(address))
        return between[0].address

    transports = assemble(through)
    link = transports[1].dial(0, 9, deadline())
    transports[0].accept(1, 9, deadline())
    recorded = bytes(between[0].said)
    assert len(recorded) == 80 + 32
    link.close()
    with socket.create_connection(transports[0].address) as thief:
        with contextlib.suppress(ConnectionError):
            thief.sendall(recorded)
            while thief.recv(4096):
                pass
        host, port = thief.getsockname()
        captured.wait_for(f"refused a link from {host}:{port}: the process that claims to be rank 1 does not hold")
    assert transports[0].arrivals.refusal(1, 10) is None


def test_dial_interrupted_admission_is_retried(assemble: Assemble, proxy: Callable[..., TcpProxy]) -> None:
    """An acceptor with too many connections may drop a valid peer. That must not end the job."""
    between: list[TcpProxy] = []

    def through(address: tuple[str, int]) -> tuple[str, int]:
        between.append(proxy(address, hang_up=3))
        return between[0].address

    transports = assemble(through)
    transports[1].dial(0, 9, deadline())
    transports[0].accept(1, 9, deadline())
    assert between[0].calls == 4


def test_dial_all_with_one_link_refused_raises_refused(assemble: Assemble) -> None:
    transports, made = assemble(size=3), list[Link]()
    transports[2].dial(1, 9, deadline())
    with pytest.raises(Refused, match="rank 2 already has this link"):
        transports[2].dial_all([0, 1], 9, deadline(), made.append)
    assert [link.peer for link in made] in ([0], [])


def test_dial_all_interrupted_connections_are_retried(assemble: Assemble, proxy: Callable[..., TcpProxy]) -> None:
    transports = assemble(lambda address: proxy(address, hang_up=2).address, size=3)
    made: list[Link] = []
    transports[2].dial_all([0, 1], 9, deadline(), made.append)
    assert sorted(link.peer for link in made) == [0, 1]


def test_dial_all_late_peer_does_not_delay_others(assemble: Assemble, proxy: Callable[..., TcpProxy]) -> None:
    """Rank 0 can be reached only after rank 1 has admitted the connection."""
    opened, made = threading.Event(), list[Link]()
    proxies: list[TcpProxy] = []

    def through(address: tuple[str, int]) -> tuple[str, int]:
        proxies.append(proxy(address, opened=None if proxies else opened))
        return proxies[-1].address

    def note(link: Link) -> None:
        made.append(link)
        opened.set()

    transports = assemble(through, size=3)
    transports[2].dial_all([0, 1], 9, deadline(), note)
    assert [link.peer for link in made] == [1, 0]


def test_dial_refused_raises_the_reason_without_another_attempt(
    assemble: Assemble, proxy: Callable[..., TcpProxy], captured: CapturedLog
) -> None:
    between: list[TcpProxy] = []

    def through(address: tuple[str, int]) -> tuple[str, int]:
        between.append(proxy(address))
        return between[0].address

    transports = assemble(through, key=secrets.token_bytes(32))
    with pytest.raises(Refused, match=r"rank 0 refused the link: .* does not hold this job's secret") as caught:
        transports[1].dial(0, 9, deadline())
    assert between[0].calls == 1
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    captured.wait_for(r"refused a link from 127\.0\.0\.1:\d+: the process that claims to be rank 1 does not hold")


def test_dial_link_that_exists_is_refused(assemble: Assemble) -> None:
    transports = assemble()
    transports[1].dial(0, 9, deadline())
    with pytest.raises(Refused, match="rank 1 already has this link"):
        transports[1].dial(0, 9, deadline())


def test_dial_port_that_keeps_refusing_raises_no_connection(
    assemble: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "REFUSING_SECONDS", 0.2)
    transports = assemble()
    transports[0].close()
    with pytest.raises(NoConnection, match=r"rank 0 at 127.0.0.1:\d+ does not answer: .*refused") as caught:
        transports[1].dial(0, 9, time.monotonic() + FOREVER)
    assert caught.value.peer == 0


@pytest.mark.parametrize("where", ["connecting", "admission"])
def test_dial_ends_at_its_deadline_and_when_its_check_raises(assemble: Assemble, where: str) -> None:
    silent = socket.create_server(("127.0.0.1", 0), backlog=0 if where == "connecting" else 10)
    fillers = []
    with silent:
        if where == "connecting":  # the listener's queue is full, so connecting hangs
            for _ in range(3):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(silent.getsockname())
                fillers.append(filler)
        transports = assemble(lambda _: silent.getsockname())
        with pytest.raises(NoConnection, match="does not answer"):
            transports[1].dial(0, 9, time.monotonic() + 0.3)

        def stop() -> None:
            raise Closed("never mind")

        with pytest.raises(Closed):
            transports[1].dial(0, 9, time.monotonic() + FOREVER, stop)
    for filler in fillers:
        filler.close()


# -- accepting --------------------------------------------------------------------------------------------------------


def test_accept_slow_connection_is_dropped_at_the_time_limit(
    assemble: Assemble, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "ADMISSION_SECONDS", 0.2)
    transports = assemble()
    with socket.create_connection(transports[0].address, timeout=LONG) as slow:
        with contextlib.suppress(ConnectionError):
            for byte in b"gw-link1" + bytes(60):
                slow.send(bytes([byte]))
                if select.select([slow], [], [], 0.1)[0]:  # the connection was closed
                    break
            else:
                pytest.fail("each byte extends the time limit")
        captured.wait_for(r"refused a link from 127\.0\.0\.1:\d+: the admission did not finish in 0.2 s")


def test_accept_too_many_pending_connections_drops_the_oldest(
    assemble: Assemble, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "MAX_PENDING", 5)
    transports = assemble()
    clients = [socket.create_connection(transports[0].address, timeout=LONG) for _ in range(8)]
    for eldest in clients[:3]:
        assert eldest.recv(1) == b""
    captured.wait_for("too many connections wait for admission", times=3)
    transports[1].dial(0, 9, deadline())  # a valid peer is still admitted
    for client in clients:
        client.close()


class FailingAcceptor(Acceptor):
    """An acceptor with a bug that an unknown client can trigger."""

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        if bytes(data).startswith(b"bug"):
            raise ZeroDivisionError("a bug")
        return super().feed(data)


def test_accept_connection_that_triggers_a_bug_is_the_only_one_dropped(
    assemble: Assemble, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "Acceptor", FailingAcceptor)
    monkeypatch.setattr(accept, "ADMISSION_SECONDS", 10 * LONG)  # no connection is dropped because it is late
    transports = assemble()
    with socket.create_connection(transports[0].address, timeout=LONG) as client:
        client.send(b"bug")
        assert client.recv(1) == b""
    captured.wait_for(r"refused a link from 127\.0\.0\.1:\d+: could not be handled: ZeroDivisionError: a bug", times=1)
    transports[1].dial(0, 9, deadline())


def test_accept_continues_after_an_adopting_function_failed(assemble: Assemble, captured: CapturedLog) -> None:
    transports = assemble()

    def fail(link: object) -> None:
        raise ZeroDivisionError("a bug")

    transports[0].adopt(9, fail)
    transports[1].dial(0, 9, deadline())
    captured.wait_for("an incoming connection could not be handled")
    transports[1].dial(0, 10, deadline())
    transports[0].accept(1, 10, deadline())


def test_accept_without_descriptors_continues_later(
    assemble: Assemble, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = assemble()
    real, failures = Sockets.accept, iter([True, False])

    def accept(self: Sockets, listener: socket.socket) -> tuple[socket.socket, str]:
        if next(failures, False):
            raise OSError(errno.EMFILE, "too many open files")
        return real(self, listener)

    monkeypatch.setattr(Sockets, "accept", accept)
    transports[1].dial(0, 9, deadline())
    captured.wait_for("cannot accept a connection: .*too many open files")


def test_link_socket_has_nodelay_and_keepalive(assemble: Assemble) -> None:
    transports = assemble()
    for link in (transports[1].dial(0, 9, deadline()), transports[0].accept(1, 9, deadline())):
        assert isinstance(link, TcpLink)
        with socket.socket(fileno=os.dup(link.fileno())) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert not os.get_blocking(sock.fileno())


def test_dial_all_transport_closed_meanwhile_closes_the_new_link(assemble: Assemble) -> None:
    transports, made = assemble(size=3), list[Link]()

    def close_all(link: Link) -> None:
        made.append(link)
        transports[2].close()

    with pytest.raises(Closed) as raised:
        transports[2].dial_all([0, 1], 9, deadline(), close_all)
    other = 1 - made[0].peer
    assert raised.value.peer == other
    link, bell = transports[other].accept(2, 9, deadline()), transports[other].bell()
    transports[other].wait([link], [], bell, LONG)
    with pytest.raises(LinkClosed):
        link.receive([memoryview(bytearray(1))])


def test_listen_at_a_foreign_address_raises_transport_error() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        TcpTransport("192.0.2.1")


def test_abandon_in_forked_child_closes_every_descriptor(assemble: Assemble) -> None:
    before = forked_child.descriptors()
    transports = assemble()
    transports[1].dial(0, 9, deadline())
    transports[0].close()  # `abandon` after `close` must work

    def abandon() -> None:
        for transport in transports:
            transport.abandon()

    opened = forked_child.descriptors() - before
    assert opened
    assert not opened & forked_child.descriptors_after(abandon)
