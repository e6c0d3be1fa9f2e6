"""gRPC links over real connections: proxies, other gRPC programs, certificates, forks, and unknown clients."""

from __future__ import annotations

import contextlib
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

import gradwire as gw
from gradwire.errors import NoConnection, Refused
from gradwire.membership.grpc_import import grpc
from gradwire.security.admission import Dialer, Hello
from gradwire.security.credentials import Credentials
from gradwire.transports.base import Link, LinkClosed
from gradwire.transports.grpc import connection, relay
from gradwire.transports.grpc.session import MESSAGE_BYTES, PATH
from gradwire.transports.grpc.transport import GrpcTransport
from gradwire.transports.tcp import accept
from support import forked_child, tls_files
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture
from support.grpc_proxy import GrpcProxy
from support.link_bytes import fill, receive, send_all
from support.ranks import eventually
from support.tcp_proxy import TcpProxy

LONG = 60.0
MEMBERS = ("m0", "m1")
JOB, KEY = secrets.token_bytes(16), secrets.token_bytes(32)
Assemble = Callable[..., list[GrpcTransport]]
Address = tuple[str, int]


@pytest.fixture
def assemble() -> Iterator[Assemble]:
    """Make two ranks. `via` replaces rank 0's address for rank 1, which gets `key`."""
    made: list[GrpcTransport] = []

    def make(
        *shown: Credentials, via: Callable[[Address], Address] = lambda address: address, key: bytes = KEY
    ) -> list[GrpcTransport]:
        transports = [GrpcTransport("127.0.0.1", shown[rank] if rank < len(shown) else None) for rank in range(2)]
        made.extend(transports)
        addresses = [via(transports[0].address), transports[1].address]
        for rank, transport in enumerate(transports):
            held = key if rank else KEY
            transport.assemble(
                rank=rank, addresses=addresses, job=JOB, generation=1, key=held, cores=0.0, members=MEMBERS
            )
        return transports

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def proxies() -> Iterator[list[GrpcProxy]]:
    made: list[GrpcProxy] = []
    yield made
    for proxy in made:
        proxy.close()


@pytest.fixture
def proxied(assemble: Assemble, proxies: list[GrpcProxy]) -> list[GrpcTransport]:
    """Make two ranks. Rank 1 connects to rank 0 through a proxy that ends HTTP/2."""

    def through(address: Address) -> Address:
        proxies.append(GrpcProxy(address))
        return proxies[0].address

    return assemble(via=through)


def deadline() -> float:
    return time.monotonic() + LONG


def linked(transports: list[GrpcTransport], channel: int = 9) -> tuple[Link, Link]:
    return transports[1].dial(0, channel, deadline()), transports[0].accept(1, channel, deadline())


def await_end(transport: GrpcTransport, link: Link) -> None:
    until, bell = deadline(), transport.bell()
    with pytest.raises(LinkClosed):
        while time.monotonic() < until:
            transport.wait([link], [], bell, 0.1)
            link.receive([memoryview(bytearray(1))])


# -- proxies ----------------------------------------------------------------------------------------------------------


def test_links_through_a_proxy_that_ends_http2_carry_large_data_both_ways(
    proxied: list[GrpcTransport], proxies: list[GrpcProxy]
) -> None:
    one, two = linked(proxied)
    data = [np.random.default_rng(seed).bytes(3 << 20) for seed in range(2)]
    senders = [
        threading.Thread(target=send_all, args=(proxied[1], one, data[0])),
        threading.Thread(target=send_all, args=(proxied[0], two, data[1])),
    ]
    for sender in senders:
        sender.start()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(receive(proxied[1], one, len(data[1]))))
    reader.start()
    assert receive(proxied[0], two, len(data[0])) == data[0]
    for thread in (*senders, reader):
        thread.join(LONG)
    assert found == [data[1]]
    assert proxies[0].methods == [PATH]
    assert proxies[0].largest <= MESSAGE_BYTES


def test_full_link_on_a_shared_connection_does_not_stop_other_links(proxied: list[GrpcTransport]) -> None:
    """The proxy carries all streams to rank 0 over one connection."""
    fill(proxied[1], linked(proxied)[0])
    for channel in (10, 11):
        one, two = linked(proxied, channel)
        send_all(proxied[1], one, bytes(1 << 20))
        assert receive(proxied[0], two, 1 << 20) == bytes(1 << 20)


def test_end_of_a_link_passes_a_proxy(proxied: list[GrpcTransport]) -> None:
    for channel, closer in ((9, 0), (10, 1)):
        links = linked(proxied, channel)[::-1]
        links[closer].send([b"last words"])
        links[closer].close()
        assert receive(proxied[1 - closer], links[1 - closer], 10) == b"last words"
        await_end(proxied[1 - closer], links[1 - closer])


def test_link_through_a_proxy_ends_when_the_peer_is_gone(
    proxied: list[GrpcTransport], proxies: list[GrpcProxy]
) -> None:
    one, _ = linked(proxied)
    proxied[0].close()
    await_end(proxied[1], one)


def test_idle_links_send_messages_that_carry_nothing(
    proxied: list[GrpcTransport], proxies: list[GrpcProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "USE_SECONDS", 0.0)
    monkeypatch.setattr(relay, "CHECK_SECONDS", 0.01)
    one, two = linked(proxied)
    before = proxies[0].messages
    assert eventually(lambda: proxies[0].messages > before + 2)
    one.send([b"data"])
    assert receive(proxied[0], two, 4) == b"data"


def test_link_holds_at_most_two_mebibytes_that_the_peer_has_not_read(assemble: Assemble) -> None:
    transports = assemble()
    assert 256 << 10 < fill(transports[1], linked(transports)[0]) < 2 << 20


# -- other gRPC programs ----------------------------------------------------------------------------------------------


def test_program_that_uses_the_grpc_library_is_admitted_with_the_secret(assemble: Assemble) -> None:
    transports = assemble()
    dialer = Dialer(KEY, Hello(JOB, 1, 9, 1, 0))
    to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel("{}:{}".format(*transports[0].address)) as channel:
        answers = channel.stream_stream(PATH)(iter(to_send.get, None), timeout=LONG)
        to_send.put(dialer.start())
        while not dialer.done:
            received = next(answers)
            while received:
                piece, received = received[: dialer.wanted], received[dialer.wanted :]
                if answer := dialer.feed(piece):
                    to_send.put(answer)
        link = transports[0].accept(1, 9, deadline())
        to_send.put(b"from another program")
        assert receive(transports[0], link, 20) == b"from another program"
        link.send([b"hello"])
        assert next(answers) == b"hello"
        to_send.put(None)
        await_end(transports[0], link)


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        ("/grpc.health.v1.Health/Check", b"", grpc.StatusCode.UNIMPLEMENTED),
        (PATH, bytes(100), None),
        (PATH, bytes(MESSAGE_BYTES + 1), grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["other method", "no admission", "message too large"],
)
def test_grpc_call_without_admission_is_refused_and_links_continue(
    assemble: Assemble, captured: CapturedLog, method: str, message: bytes, code: Any
) -> None:
    transports = assemble()
    one, two = linked(transports)
    with grpc.insecure_channel("{}:{}".format(*transports[0].address)) as channel:
        ended, answer, answered = None, b"", threading.Event()

        def messages() -> Iterator[bytes]:
            yield message
            answered.wait(LONG)  # the end of the request would end the link

        try:
            for part in channel.stream_stream(method)(messages(), timeout=LONG):
                answer += part
        except grpc.RpcError as error:
            ended = error.code()
        answered.set()
    assert ended in (code, grpc.StatusCode.CANCELLED) if code is grpc.StatusCode.UNAVAILABLE else ended == code
    if code is None:
        assert b"not a gradwire admission" in answer
        captured.wait_for("refused a link from 127.0.0.1:.*not a gradwire admission")
    one.send([b"still here"])
    assert receive(transports[0], two, 10) == b"still here"


# -- admission and certificates ---------------------------------------------------------------------------------------


def test_rank_without_the_secret_is_refused(assemble: Assemble, captured: CapturedLog) -> None:
    transports = assemble(key=secrets.token_bytes(32))
    with pytest.raises(Refused, match=r"rank 0 refused the link: .*does not hold this job's secret"):
        transports[1].dial(0, 9, deadline())
    captured.wait_for("refused a link from 127.0.0.1:.*claims to be rank 1 does not hold this job's secret")


def test_acceptor_with_the_certificate_of_another_member_is_refused(assemble: Assemble) -> None:
    impostor = GrpcTransport("127.0.0.1", tls_files.credentials("m2"))
    try:
        impostor.assemble(
            rank=0, addresses=[impostor.address] * 2, job=JOB, generation=1, key=KEY, cores=0.0, members=("m2", "m1")
        )
        transports = assemble(*map(tls_files.credentials, MEMBERS), via=lambda address: impostor.address)
        with pytest.raises(Refused, match=r"no link to rank 0: its certificate is for m2, which does not cover"):
            transports[1].dial(0, 9, deadline())
    finally:
        impostor.close()


def test_dialer_with_the_certificate_of_another_member_is_refused(assemble: Assemble) -> None:
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"))
    impostor = GrpcTransport("127.0.0.1", tls_files.credentials("m2"))
    try:
        impostor.assemble(
            rank=1,
            addresses=[transports[0].address] * 2,
            job=JOB,
            generation=1,
            key=KEY,
            cores=0.0,
            members=("m0", "m2"),
        )
        with pytest.raises(
            Refused, match=r"rank 0 refused the link: it claims to be rank 1, but its certificate is for"
        ):
            impostor.dial(0, 9, deadline())
    finally:
        impostor.close()


@pytest.mark.parametrize("secure", [0, 1])
def test_ranks_with_and_without_certificates_refuse_each_other(
    assemble: Assemble, captured: CapturedLog, secure: int
) -> None:
    shown: list[Any] = [None, None]
    shown[secure] = tls_files.credentials(MEMBERS[secure])
    transports = assemble(*shown)
    expected = "it refused the connection: this rank uses TLS: give that" if secure == 0 else "it does not use TLS"
    with pytest.raises(Refused, match=expected):
        transports[1].dial(0, 9, deadline())
    captured.wait_for("refused a link from .*(it does not use TLS; this rank uses TLS|not HTTP/2 but TLS)")


def test_link_bytes_inside_tls_cannot_be_read_on_the_wire(assemble: Assemble) -> None:
    wires: list[TcpProxy] = []

    def through(address: Address) -> Address:
        wires.append(TcpProxy(address))
        return wires[0].address

    transports = assemble(*map(tls_files.credentials, MEMBERS), via=through)
    one, two = linked(transports)
    message = b"the weights of the model " * 100
    one.send([message])
    assert receive(transports[0], two, len(message)) == message
    assert len(wires[0].said) > len(message)
    assert b"weights" not in wires[0].said
    assert PATH.encode() not in wires[0].said
    wires[0].close()


def test_dial_to_a_closed_port_ends_as_no_connection(assemble: Assemble) -> None:
    transports = assemble()
    transports[0].close()
    with pytest.raises(NoConnection, match=r"rank 0 at .* does not answer: .*Connection refused"):
        transports[1].dial(0, 9, time.monotonic() + 0.3)


def test_dial_to_a_peer_that_never_answers_ends_and_closes_its_connection(assemble: Assemble) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transports = assemble(*map(tls_files.credentials, MEMBERS), via=lambda address: silent.getsockname())
        before = forked_child.descriptors()
        with pytest.raises(NoConnection, match=r"rank 0 at .* does not answer"):
            transports[1].dial(0, 9, time.monotonic() + 0.2)
        assert eventually(lambda: forked_child.descriptors() <= before)


# -- forks and the end ------------------------------------------------------------------------------------------------


def test_abandon_in_forked_child_closes_the_sockets_of_links(assemble: Assemble) -> None:
    transports = assemble()
    before = forked_child.descriptors()
    one, two = linked(transports)
    made = forked_child.descriptors() - before
    assert len(made) == 6, "two local sockets and one connection on each side"

    def abandon() -> None:
        for transport in transports:
            transport.abandon()

    assert not made & forked_child.descriptors_after(abandon)
    one.send([b"the parent's links stay open"])
    assert receive(transports[0], two, 28) == b"the parent's links stay open"


def test_close_sends_what_closed_links_have_left(assemble: Assemble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DRAIN_SECONDS", LONG)
    transports = assemble()
    one, two = linked(transports)
    sent = fill(transports[1], one)
    closing = threading.Thread(target=transports[1].close)
    closing.start()
    assert receive(transports[0], two, sent) == bytes(sent)
    await_end(transports[0], two)
    closing.join(LONG)
    assert not closing.is_alive()


def test_close_leaves_no_socket_and_no_thread(assemble: Assemble) -> None:
    before = forked_child.descriptors()
    transports = assemble()
    linked(transports)
    for transport in transports:
        transport.close()
    assert forked_child.descriptors() <= before
    assert not [thread for thread in threading.enumerate() if thread.name in ("gradwire-grpc", "gradwire-accept")]


# -- unknown clients --------------------------------------------------------------------------------------------------


def test_connection_without_a_stream_is_closed(
    assemble: Assemble, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(relay, "CHECK_SECONDS", 0.01)
    transports = assemble()
    with socket.create_connection(transports[0].address, timeout=LONG) as silent:
        while silent.recv(1000):
            pass
    captured.wait_for("refused a link from .*it opened no link within")


def test_connections_that_are_too_many_replace_the_oldest_one(
    assemble: Assemble, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MAX_UNPROVEN", 3)
    transports = assemble()
    one, two = linked(transports)
    strangers = [socket.create_connection(transports[0].address, timeout=LONG) for _ in range(10)]
    captured.wait_for("too many connections wait for admission", times=7)
    linked(transports, 10)
    one.send([b"still here"])
    assert receive(transports[0], two, 10) == b"still here"
    for stranger in strangers:
        stranger.close()


def test_streams_of_one_connection_that_are_never_admitted_end(
    assemble: Assemble, captured: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "ADMISSION_SECONDS", 0.2)
    transports = assemble()
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    headers = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "x")]
    for number in range(1, 101, 2):
        client.send_headers(number, [*headers, ("content-type", "application/grpc")])
    before = len(forked_child.descriptors())
    with socket.create_connection(transports[0].address, timeout=LONG) as sock:
        sock.sendall(client.data_to_send())
        captured.wait_for("the admission did not finish in 0.2 s", times=50)
        assert eventually(lambda: len(forked_child.descriptors()) <= before + 2)
    linked(transports)


def test_peer_that_does_not_read_its_answers_is_not_read_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sends pings, which must be answered, and reads nothing."""
    monkeypatch.setattr(connection, "MOST_UNSENT", 64 << 10)
    h2 = H2Connection(H2Configuration(client_side=True))
    h2.initiate_connection()
    h2.ping(b"12345678")
    start = h2.data_to_send()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        server = connection.Connection(listener.accept()[0], "a client", None, 0.0)
    client.setblocking(False)
    rest, sent = start, 0
    while sent < 4 << 20:
        with contextlib.suppress(BlockingIOError):
            count = client.send(rest)
            sent, rest = sent + count, rest[count:] or start[-17:] * 4000
        assert list(server.advance()) == []
        if not (server.interest or 0) & select.POLLIN:
            break
    assert server.interest == select.POLLOUT, "all of the pings are read although nothing reads the answers"
    server.end(ConnectionResetError())
    client.close()


def test_groups_over_grpc_report_their_transport() -> None:
    from support.crews import grpc_ranks
    from support.ranks import closing, run_ranks

    with closing(grpc_ranks(gw.Topology.single(2))) as groups:
        assert [group.capabilities.transport for group in groups] == ["grpc", "grpc"]
        assert run_ranks(groups, lambda group: group.all_reduce(group.rank + 1)) == [3, 3]
