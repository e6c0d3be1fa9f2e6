"""TCP: admission over real sockets, and doors that stay open whatever stands in front of them."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradwire.errors import Closed, NoConnection, Refused, TransportError
from gradwire.security.admission import Acceptor
from gradwire.transports.base import Link
from gradwire.transports.fork_safe_sockets import Sockets
from gradwire.transports.tcp import accept, dial
from gradwire.transports.tcp.transport import TcpLink, TcpTransport
from support.in_process import Journal
from support.in_process import journal_fixture as journal_fixture

LONG = 10.0
JOB, KEY = secrets.token_bytes(16), secrets.token_bytes(32)
Assemble = Callable[..., list[TcpTransport]]


@pytest.fixture
def assemble() -> Iterator[Assemble]:
    """Transports; `via` replaces the addresses of the others as the last rank knows them, which holds the key."""
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


class Proxy:
    """Passes connections on to an address, and remembers what the caller said; the first few it hangs up on."""

    def __init__(self, target: tuple[str, int], hang_up: int = 0) -> None:
        self._target = target
        self.said = bytearray()
        self.calls = 0
        self._hang_up = hang_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                self.calls += 1
                if self.calls <= self._hang_up:
                    caller.close()
                    continue
                target = socket.create_connection(self._target)
                self._open += [caller, target]
                for source, sink, record in ((caller, target, self.said), (target, caller, None)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink, record), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, record: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if record is not None:
                    record += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(LONG)


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def make(target: tuple[str, int], **options: Any) -> Proxy:
        made.append(Proxy(target, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def deadline() -> float:
    return time.monotonic() + LONG


def test_a_real_admission_recorded_on_the_way_cannot_be_replayed(
    assemble: Assemble, proxy: Callable[..., Proxy], journal: Journal
) -> None:
    between: list[Proxy] = []

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
        journal.wait_for(f"refused a link from {host}:{port}: the process that says it is rank 1 does not hold")
    assert transports[0].arrivals.refusal(1, 10) is None


def test_an_admission_that_is_broken_off_is_tried_again(assemble: Assemble, proxy: Callable[..., Proxy]) -> None:
    """A door crowded by strangers may turn out an honest caller; that must not end a job."""
    between: list[Proxy] = []

    def through(address: tuple[str, int]) -> tuple[str, int]:
        between.append(proxy(address, hang_up=3))
        return between[0].address

    transports = assemble(through)
    transports[1].dial(0, 9, deadline())
    transports[0].accept(1, 9, deadline())
    assert between[0].calls == 4


def test_if_one_of_several_links_is_refused_that_is_told(assemble: Assemble) -> None:
    transports, made = assemble(size=3), list[Link]()
    transports[2].dial(1, 9, deadline())
    with pytest.raises(Refused, match="rank 2 already holds this link"):
        transports[2].dial_all([0, 1], 9, deadline(), made.append)
    assert [link.peer for link in made] in ([0], [])


def test_several_links_are_made_with_patience(assemble: Assemble, proxy: Callable[..., Proxy]) -> None:
    transports = assemble(lambda address: proxy(address, hang_up=2).address, size=3)
    made: list[Link] = []
    transports[2].dial_all([0, 1], 9, deadline(), made.append)
    assert sorted(link.peer for link in made) == [0, 1]


def test_nobody_waits_at_the_door_while_another_is_late(assemble: Assemble, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first peer answers only when the second one has let the caller in."""
    monkeypatch.setattr(accept, "ADMISSION_SECONDS", 0.5)
    transports = assemble(size=3)
    late = transports[0]._acceptance
    assert late is not None
    accept_one, made = late._accept, list[Link]()
    monkeypatch.setattr(late, "_accept", lambda: accept_one() if made else None)
    transports[2].dial_all([0, 1], 9, deadline(), made.append)
    assert [link.peer for link in made] == [1, 0]


def test_a_refusal_is_final_and_says_why(assemble: Assemble, journal: Journal) -> None:
    transports = assemble(key=secrets.token_bytes(32))
    began = time.monotonic()
    with pytest.raises(Refused, match=r"rank 0 refused the link: .* does not hold this job's secret") as told:
        transports[1].dial(0, 9, deadline())
    assert time.monotonic() - began < 2.0
    assert (told.value.rank, told.value.peer) == (1, 0)
    journal.wait_for(r"refused a link from 127\.0\.0\.1:\d+: the process that says it is rank 1 does not hold")


def test_a_link_cannot_be_made_twice(assemble: Assemble) -> None:
    transports = assemble()
    transports[1].dial(0, 9, deadline())
    with pytest.raises(Refused, match="rank 1 already holds this link"):
        transports[1].dial(0, 9, deadline())


def test_a_port_that_keeps_refusing_belongs_to_a_dead_rank(assemble: Assemble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "REFUSING_SECONDS", 0.2)
    transports = assemble()
    transports[0].close()
    began = time.monotonic()
    with pytest.raises(NoConnection, match=r"rank 0 at 127.0.0.1:\d+ does not answer: .*refused") as told:
        transports[1].dial(0, 9, deadline())
    assert time.monotonic() - began < 2.0
    assert told.value.peer == 0


@pytest.mark.parametrize("where", ["connecting", "admission"])
def test_a_dial_ends_at_its_deadline_and_when_it_makes_no_sense_any_more(assemble: Assemble, where: str) -> None:
    silent = socket.create_server(("127.0.0.1", 0), backlog=0 if where == "connecting" else 10)
    fillers = []
    with silent:
        if where == "connecting":  # a full queue: connecting hangs
            for _ in range(3):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(silent.getsockname())
                fillers.append(filler)
        transports = assemble(lambda _: silent.getsockname())
        began = time.monotonic()
        with pytest.raises(NoConnection, match="does not answer"):
            transports[1].dial(0, 9, time.monotonic() + 0.3)

        def stop() -> None:
            raise Closed("never mind")

        with pytest.raises(Closed):
            transports[1].dial(0, 9, deadline(), stop)
        assert time.monotonic() - began < 3.0
    for filler in fillers:
        filler.close()


# -- the door ---------------------------------------------------------------------------------------------------------


def test_who_says_too_little_is_shown_out(
    assemble: Assemble, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "ADMISSION_SECONDS", 0.2)
    transports = assemble()
    with socket.create_connection(transports[0].address, timeout=LONG) as slow:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in b"gw-link1" + bytes(60):
                slow.send(bytes([byte]))
                time.sleep(0.01)
            slow.recv(1)
        assert time.monotonic() - began < 2.0, "a byte now and then buys no time"
        journal.wait_for(r"refused a link from 127\.0\.0\.1:\d+: said too little in 0.2 s")


def test_of_too_many_strangers_the_eldest_goes(
    assemble: Assemble, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "MAX_STRANGERS", 5)
    transports = assemble()
    strangers = [socket.create_connection(transports[0].address, timeout=LONG) for _ in range(8)]
    for eldest in strangers[:3]:
        assert eldest.recv(1) == b""
    journal.wait_for("too many connections that say nothing", times=3)
    transports[1].dial(0, 9, deadline())  # and an honest caller gets in
    for stranger in strangers:
        stranger.close()


class FailingAcceptor(Acceptor):
    """One with a bug that a stranger can reach."""

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        if bytes(data).startswith(b"bug"):
            raise ZeroDivisionError("a bug")
        return super().feed(data)


def test_a_stranger_that_reaches_a_bug_loses_its_own_connection_only(
    assemble: Assemble, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "Acceptor", FailingAcceptor)
    monkeypatch.setattr(accept, "ADMISSION_SECONDS", 10 * LONG)  # nobody is shown out for being late
    transports = assemble()
    with socket.create_connection(transports[0].address, timeout=LONG) as stranger:
        stranger.send(b"bug")
        assert stranger.recv(1) == b""
    journal.wait_for(r"refused a link from 127\.0\.0\.1:\d+: could not be handled: ZeroDivisionError: a bug", times=1)
    transports[1].dial(0, 9, deadline())


def test_a_taker_that_fails_does_not_close_the_door(assemble: Assemble, journal: Journal) -> None:
    transports = assemble()

    def fail(link: object) -> None:
        raise ZeroDivisionError("a bug")

    transports[0].adopt(9, fail)
    transports[1].dial(0, 9, deadline())
    journal.wait_for("a connection could not be handled")
    transports[1].dial(0, 10, deadline())
    transports[0].accept(1, 10, deadline())


def test_a_door_without_descriptors_opens_again(
    assemble: Assemble, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = assemble()
    real, failures = Sockets.accept, iter([True, False])

    def accept(self: Sockets, listener: socket.socket) -> tuple[socket.socket, str]:
        if next(failures, False):
            raise OSError(errno.EMFILE, "too many open files")
        return real(self, listener)

    monkeypatch.setattr(Sockets, "accept", accept)
    transports[1].dial(0, 9, deadline())
    journal.wait_for("cannot accept a connection: .*too many open files")


def test_links_are_tuned_for_small_messages_and_for_silent_deaths(assemble: Assemble) -> None:
    transports = assemble()
    for link in (transports[1].dial(0, 9, deadline()), transports[0].accept(1, 9, deadline())):
        assert isinstance(link, TcpLink)
        assert link._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert link._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not link._socket.getblocking()


def test_a_link_that_is_made_while_everything_is_closed_is_closed_too(
    assemble: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = assemble()
    call, made = transports[1]._call, []

    def slow_call(*arguments: Any) -> Any:
        made.append(call(*arguments))
        transports[1].close()
        return made[0]

    monkeypatch.setattr(transports[1], "_call", slow_call)
    with pytest.raises(Closed):
        transports[1].dial(0, 9, deadline())
    assert made[0].socket.fileno() == -1


def test_listening_where_one_cannot() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        TcpTransport("192.0.2.1")


def test_abandoning_closes_every_descriptor_and_may_follow_a_close(assemble: Assemble) -> None:
    transports = assemble()
    transports[1].dial(0, 9, deadline())
    transports[0].close()
    transports[0].abandon()
    listener, sockets = transports[1]._listener, list(transports[1]._sockets._open)
    assert listener in sockets
    # Not in a forked child here, so let the thread end before its sockets go.
    acceptance = transports[1]._acceptance
    assert acceptance is not None
    acceptance.stop()
    transports[1].abandon()
    assert {sock.fileno() for sock in sockets} == {-1}
    assert {bell.fileno() for bell in transports[1]._bells} == {-1}
