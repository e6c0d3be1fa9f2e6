"""Links inside TLS: their bytes on the wire, threads in both directions, renewed certificates, hostile connections."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from gradwire.errors import Refused
from gradwire.host import native_core
from gradwire.liveness.heartbeat_messages import BLOCK_TOKENS, TOKEN_BYTES, HeartbeatSink, TokenReader, Tokens
from gradwire.security import certificates
from gradwire.security.certificate_names import Identity
from gradwire.security.credentials import Credentials
from gradwire.transports.base import LIFELINE_CHANNEL, Link, LinkClosed
from gradwire.transports.tcp import accept
from gradwire.transports.tcp.tls_link import MOST_AT_ONCE, HeartbeatLink, TlsLink, TlsStream
from gradwire.transports.tcp.transport import TcpTransport
from support import forked_child, tls_files
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture
from support.tcp_proxy import TcpProxy

LONG = 60.0
MEMBERS = ("m0", "m1")


def deadline() -> float:
    return time.monotonic() + LONG


def assembled(*shown: Credentials, hang_up: int = 0) -> tuple[list[TcpTransport], TcpProxy]:
    """Make two ranks. Rank 1 connects to rank 0 through a proxy."""
    transports = [TcpTransport("127.0.0.1", credentials) for credentials in shown]
    wire = TcpProxy(transports[0].address, hang_up)
    run, key = secrets.token_bytes(16), secrets.token_bytes(32)
    addresses = [wire.address, transports[1].address]
    for rank, transport in enumerate(transports):
        transport.assemble(rank=rank, addresses=addresses, job=run, generation=1, key=key, cores=0.0, members=MEMBERS)
    return transports, wire


@pytest.fixture
def tapped() -> Iterator[tuple[list[TcpTransport], TcpProxy]]:
    transports, wire = assembled(*map(tls_files.credentials, MEMBERS))
    yield transports, wire
    for transport in transports:
        transport.close()
    wire.close()


@pytest.fixture
def transports(tapped: tuple[list[TcpTransport], TcpProxy]) -> list[TcpTransport]:
    return tapped[0]


def linked(transports: list[TcpTransport], channel: int = 9) -> tuple[TlsLink, TlsLink]:
    mine, theirs = transports[1].dial(0, channel, deadline()), transports[0].accept(1, channel, deadline())
    assert isinstance(mine, TlsLink)
    assert isinstance(theirs, TlsLink)
    return mine, theirs


def receive(transport: TcpTransport, link: Link, count: int, at_once: int = 1 << 20) -> bytes:
    data, until, bell, got = bytearray(count), deadline(), transport.bell(), 0
    while got < count:
        part = link.receive([memoryview(data)[got : got + at_once]])
        got += part
        if not part:
            assert time.monotonic() < until, f"only {got} bytes came"
            transport.wait([link], [], bell, LONG)
    return bytes(data)


def send(transport: TcpTransport, link: Link, data: bytes, *, at_once: int = 1 << 20) -> None:
    view, bell, until = memoryview(data), transport.bell(), deadline()
    while view and time.monotonic() < until:
        sent = link.send([view[:at_once]])
        view = view[sent:]
        if not sent:
            transport.wait([], [link], bell, LONG)


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_tls_link_bytes_cannot_be_read_on_the_wire(tapped: tuple[list[TcpTransport], TcpProxy]) -> None:
    transports, wire = tapped
    one, two = linked(transports)
    message = b"the weights of the model " * 100
    one.send([message])
    assert receive(transports[0], two, len(message)) == message
    assert len(wire.said) > len(message)
    assert b"weights" not in wire.said
    assert b"gw-link1" not in wire.said


def test_tls_link_bytes_altered_on_the_wire_end_that_link_only(
    tapped: tuple[list[TcpTransport], TcpProxy], captured: CapturedLog
) -> None:
    transports, wire = tapped
    one, two = linked(transports)
    other = linked(transports, 10)
    wire.spoils = True
    one.send([bytes(1000)])
    until, bell = deadline(), transports[0].bell()
    with pytest.raises(LinkClosed):
        while time.monotonic() < until:
            assert two.receive([memoryview(bytearray(1000))]) == 0, "altered bytes were delivered"
            transports[0].wait([two], [], bell, LONG)
    captured.wait_for("the link to rank 1 is broken: TLS failed: ")
    wire.spoils = False
    other[0].send([b"fine"])
    assert receive(transports[0], other[1], 4) == b"fine"


@contextlib.contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), timeout=LONG)
        two, _ = listener.accept()
    two.settimeout(LONG)
    with one, two:
        yield one, two


def test_link_altered_bytes_behind_good_ones_wake_the_reader_again(transports: list[TcpTransport]) -> None:
    """Good and altered bytes arrive in one piece, and no poll of the socket reports the altered ones."""
    one, two = linked(transports)
    with tcp_pair() as (sends, receives):
        sends.setblocking(False)
        sender = os.dup(one.fileno())
        os.dup2(sends.fileno(), one.fileno())  # captures the bytes that rank 1 sends
        records = []
        for message in (b"good", b"bad"):
            assert one.send([message]) == len(message)
            records.append(receives.recv(1000))
        os.dup2(sender, one.fileno())
        os.close(sender)
    good, bad = records
    with socket.socket(fileno=os.dup(one.fileno())) as line:
        line.sendall(good + bad[:-1] + bytes([bad[-1] ^ 1]))
    bell, room = transports[0].bell(), memoryview(bytearray(100))
    transports[0].wait([two], [], bell, LONG)
    assert two.receive([room]) == 4
    assert list(transports[0].wait([two], [], bell, LONG)) == [two]
    with pytest.raises(LinkClosed):
        two.receive([room])


def test_recorded_tls_connection_cannot_be_replayed(
    tapped: tuple[list[TcpTransport], TcpProxy], captured: CapturedLog
) -> None:
    transports, wire = tapped
    linked(transports)
    with socket.create_connection(transports[0].address, timeout=LONG) as thief:
        with contextlib.suppress(ConnectionError):
            thief.sendall(wire.said)
            while thief.recv(4096):
                pass
        host, port = thief.getsockname()
        captured.wait_for(f"refused a link from {host}:{port}: ")


def test_wait_with_decrypted_bytes_pending_returns_at_once(transports: list[TcpTransport]) -> None:
    one, two = linked(transports)
    one.send([bytes(range(100))])
    bell = transports[0].bell()
    transports[0].wait([two], [], bell, LONG)
    for number in range(100):  # one record: no poll reports the rest of it
        assert list(transports[0].wait([two], [], bell, 0.0)) == [two]
        assert receive(transports[0], two, 1) == bytes([number])
    began = time.monotonic()
    transports[0].wait([two], [], bell, 0.05)
    assert time.monotonic() - began > 0.04, "nothing is left"


def test_tls_link_both_directions_at_once_by_two_threads(transports: list[TcpTransport]) -> None:
    links = linked(transports)[::-1]  # by rank
    sizes = (9 << 20, 7 << 20)
    payloads = [random.Random(rank).randbytes(size) for rank, size in enumerate(sizes)]
    received: dict[int, bytes] = {}

    def take(rank: int) -> None:
        received[rank] = receive(transports[rank], links[rank], sizes[1 - rank], 33_333)

    threads = [threading.Thread(target=take, args=(rank,)) for rank in range(2)]
    for rank in range(2):
        give = threading.Thread(target=send, args=(transports[rank], links[rank], payloads[rank]))
        threads.append(give)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LONG)
    assert received[0] == payloads[1]
    assert received[1] == payloads[0]


def test_tls_link_many_small_buffers_and_one_large_arrive_whole(transports: list[TcpTransport]) -> None:
    one, two = linked(transports)
    parts = [bytes([number % 251]) * (number % 7) for number in range(1000)]  # too many for one call; some are empty
    whole = b"".join(parts)
    sent = one.send(parts)
    assert 0 < sent < len(whole)
    send(transports[1], one, whole[sent:])
    assert receive(transports[0], two, len(whole)) == whole
    assert one.send([b"", b""]) == 0
    giving = threading.Thread(target=send, args=(transports[1], one, bytes(5 * MOST_AT_ONCE)))
    giving.start()
    assert receive(transports[0], two, 5 * MOST_AT_ONCE, 5 * MOST_AT_ONCE) == bytes(5 * MOST_AT_ONCE)
    giving.join(LONG)


# -- the lifeline's links ---------------------------------------------------------------------------------------------


def heartbeat_links(transports: list[TcpTransport]) -> tuple[HeartbeatLink, HeartbeatLink]:
    mine = transports[1].dial(0, LIFELINE_CHANNEL, deadline())
    theirs = transports[0].accept(1, LIFELINE_CHANNEL, deadline())
    assert isinstance(mine, HeartbeatLink)
    assert isinstance(theirs, HeartbeatLink)
    return mine, theirs


def test_heartbeat_link_leaves_tls_with_a_key_of_its_own(
    tapped: tuple[list[TcpTransport], TcpProxy],
) -> None:
    transports, wire = tapped
    one, two = heartbeat_links(transports)
    assert one.key == two.key
    assert b"gw-link1" not in wire.said, "the admission must be inside TLS"
    assert one.key not in wire.said
    for link, transport, other in ((one, transports[0], two), (two, transports[1], one)):
        link.send([b"in plain"])
        assert receive(transport, other, 8) == b"in plain"
    assert wire.said.endswith(b"in plain")
    other_transports, other_wire = assembled(*map(tls_files.credentials, MEMBERS))
    assert heartbeat_links(other_transports)[0].key != one.key
    for transport in other_transports:
        transport.close()
    other_wire.close()


def test_leave_keeps_bytes_that_follow_the_last_tls_record() -> None:
    """The first bytes without TLS may arrive in one packet with the last bytes of TLS."""
    ends = socket.socketpair()
    contexts = tls_files.credentials("m0").server_context(), tls_files.credentials("m1").client_context()
    server, client = (
        TlsStream(end, context, server=number == 0)
        for number, (end, context) in enumerate(zip(ends, contexts, strict=True))
    )
    for end in ends:
        end.setblocking(False)
    pending = [client, server]
    until = deadline()
    while pending and time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            pending[0].shake_hands()
            del pending[0]
        pending.reverse()
    server.send(b"last")
    assert server.leave() == b""
    ends[0].send(bytes(range(256)))
    assert client.recv(4) == b"last"
    assert client.leave() == bytes(range(256))
    server.send(b"more", b"than was said")
    assert client.recv(4) == b"more"
    with pytest.raises(ConnectionAbortedError, match="data of the TLS connection"):
        client.leave()
    for end in ends:
        end.close()


@pytest.mark.skipif(not native_core.available(), reason="its thread is native")
def test_recorded_heartbeats_do_not_keep_a_frozen_rank_alive(tapped: tuple[list[TcpTransport], TcpProxy]) -> None:
    """The native thread sends heartbeats and then stops. A proxy then sends the recorded heartbeats again."""
    transports, wire = tapped
    one, two = heartbeat_links(transports)
    sink = HeartbeatSink(lambda header: None)
    sink.detector.watch(1, 0.0, 1.0)
    reader = TokenReader(two, Tokens(two.key, 1), sink)
    thread, bell = native_core.native.Lifeline(0.001), transports[0].bell()
    thread.add_tokens(one.fileno(), TOKEN_BYTES, 0)
    thread.feed(one.fileno(), Tokens(one.key, 1).block())
    thread.start()
    got = 0
    while got < 20 * TOKEN_BYTES:
        got += reader.pump()
        transports[0].wait([two], [], bell, LONG)
    thread.stop()
    while got < (BLOCK_TOKENS - thread.ahead(one.fileno())) * TOKEN_BYTES:
        transports[0].wait([two], [], bell, LONG)
        got += reader.pump()
    assert sink.detector.last_heartbeat(1) == 0.0
    sink.now = 1000.0
    one.send([bytes(wire.said[-got:])])
    with pytest.raises(LinkClosed):
        while True:
            transports[0].wait([two], [], bell, LONG)
            reader.pump()
    assert sink.detector.last_heartbeat(1) == 0.0


def test_abandon_in_forked_child_closes_the_sockets_of_links(transports: list[TcpTransport]) -> None:
    one, two = linked(transports)

    def abandon() -> None:
        for transport in transports:
            transport.abandon()

    names = {forked_child.name_of(link.fileno()) for link in (one, two)}
    assert names <= forked_child.descriptors()
    assert not names & forked_child.descriptors_after(abandon)


# -- renewal ----------------------------------------------------------------------------------------------------------


def serial(link: TlsLink) -> int:
    return x509.load_der_x509_certificate(link.peer_certificate).serial_number


def test_renewed_certificates_are_used_for_new_links_and_old_links_stay_open(tmp_path: Path) -> None:
    certificates.make(tmp_path, "tests", MEMBERS)
    transports, wire = assembled(*(tls_files.files(tmp_path, member) for member in MEMBERS))
    try:
        one, two = linked(transports)
        certificates.make(tmp_path, "tests", MEMBERS)
        newer = linked(transports, 10)
        for old, new in zip((one, two), newer, strict=True):
            assert serial(old) != serial(new)
            assert (
                serial(new)
                == x509.load_pem_x509_certificate((tmp_path / f"m{new.peer}.pem").read_bytes()).serial_number
            )
        one.send([b"still here"])
        assert receive(transports[0], two, 10) == b"still here"
    finally:
        for transport in transports:
            transport.close()
        wire.close()


def test_renewal_of_the_key_alone_changes_nothing_until_the_certificate_follows(
    tmp_path: Path, captured: CapturedLog
) -> None:
    certificates.make(tmp_path, "tests", MEMBERS)
    transports, wire = assembled(*(tls_files.files(tmp_path, member) for member in MEMBERS))
    try:
        linked(transports)
        pem, key = certificates.Authority.load(tmp_path).issue(Identity("tests", "m0"))
        certificates.write(tmp_path / "m0.key", key, 0o600)
        linked(transports, 10)
        captured.wait_for(
            r"m0\.key is not the key of the certificate .*m0\.pem; the certificates that were read before stay in use"
        )
        certificates.write(tmp_path / "m0.pem", pem, 0o644)
        one, _ = linked(transports, 11)
        assert serial(one) == x509.load_pem_x509_certificate(pem).serial_number
        assert len(captured.lines) == 1, "logged once, not for every link"
    finally:
        for transport in transports:
            transport.close()
        wire.close()


# -- accepting --------------------------------------------------------------------------------------------------------


def test_slow_tls_handshakes_do_not_delay_other_links(
    transports: list[TcpTransport], captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "ADMISSION_SECONDS", 10 * LONG)
    slow = [socket.create_connection(transports[0].address, timeout=LONG) for _ in range(60)]
    try:
        hello = client_hello()
        for byte in hello[:60]:
            for sock in slow:
                sock.send(bytes([byte]))
        linked(transports)
        monkeypatch.setattr(accept, "ADMISSION_SECONDS", 0.2)
        with socket.create_connection(transports[0].address, timeout=LONG) as late:
            late.sendall(hello)  # and nothing more: the handshake stops halfway
            captured.wait_for(f":{late.getsockname()[1]}: the admission did not finish in 0.2 s")
    finally:
        for sock in slow:
            sock.close()


def client_hello() -> bytes:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        stream = TlsStream(here, tls_files.credentials("m1").client_context(), server=False)
        with contextlib.suppress(BlockingIOError):
            stream.shake_hands()
        return there.recv(65536)


def test_invalid_bytes_that_begin_like_tls_are_refused(transports: list[TcpTransport], captured: CapturedLog) -> None:
    dice = random.Random(8)
    hello = client_hello()
    for attempt in range(200):
        data = bytearray(hello if attempt % 2 else b"\x16\x03\x01" + dice.randbytes(dice.choice([3, 30, 600, 20_000])))
        for _ in range(attempt % 5):
            data[dice.randrange(5, len(data))] = dice.randrange(256)
        with socket.create_connection(transports[0].address, timeout=LONG) as sock, contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
    captured.wait_for("further refusals within this minute are not logged")
    assert not any("could not be handled" in line for line in captured.lines)
    linked(transports)


def test_tls_handshake_without_end_is_dropped(transports: list[TcpTransport], captured: CapturedLog) -> None:
    """The records have one byte each, and belong to a message that claims to be long."""
    piece = b"\x16\x03\x03\x00\x01\x00"
    with socket.create_connection(transports[0].address, timeout=LONG) as sock, contextlib.suppress(OSError):
        sock.sendall(b"\x16\x03\x03\x00\x04\x01\xff\xff\xff")
        for _ in range(100):
            sock.sendall(piece * 1000)
            if select.select([sock], [], [], 0)[0]:
                break
    captured.wait_for("refused a link from .*: (TLS failed|the connection failed): ")
    linked(transports)


def test_dial_peer_that_closes_during_the_handshake_is_retried() -> None:
    """An acceptor with too many connections may drop a valid peer, which must try again."""
    transports, wire = assembled(*map(tls_files.credentials, MEMBERS), hang_up=2)
    try:
        linked(transports)
        assert wire.calls == 3
    finally:
        for transport in transports:
            transport.close()
        wire.close()


def test_refusal_inside_tls_is_final(transports: list[TcpTransport]) -> None:
    linked(transports)
    with pytest.raises(Refused, match=r"rank 0 refused the link: rank 1 already has this link$"):
        transports[1].dial(0, 9, deadline())
