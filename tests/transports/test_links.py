"""The contract of `Transport` and `Link`, which every transport must fulfil."""

from __future__ import annotations

import functools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import Closed, NoConnection
from gradwire.transports.base import Link, LinkClosed, Transport
from gradwire.transports.grpc.transport import GrpcTransport
from gradwire.transports.local import Hub
from gradwire.transports.tcp.transport import TcpTransport
from support.link_bytes import fill, receive, send_all
from support.ranks import eventually
from support.tls_files import MEMBERS, credentials

LONG = 60.0
FOREVER = 10_000.0  # seconds: a wait this long is a hang


def local(size: int) -> list[Transport]:
    return list(Hub(size).transports)


def tcp(
    size: int, host: str = "127.0.0.1", tls: bool = False, kind: type[TcpTransport] = TcpTransport
) -> list[Transport]:
    members = MEMBERS[:size]
    transports = [kind(host, credentials(member) if tls else None) for member in members]
    job, key = secrets.token_bytes(16), secrets.token_bytes(32)
    addresses = [transport.address for transport in transports]
    for rank, transport in enumerate(transports):
        transport.assemble(rank=rank, addresses=addresses, job=job, generation=1, key=key, cores=0.0, members=members)
    return list(transports)


def tls(size: int) -> list[Transport]:
    return tcp(size, tls=True)


def grpc(size: int) -> list[Transport]:
    return tcp(size, kind=GrpcTransport)


def grpc_tls(size: int) -> list[Transport]:
    return tcp(size, tls=True, kind=GrpcTransport)


def tcp6(size: int) -> list[Transport]:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    return tcp(size, "::1")


Make = Callable[[int], list[Transport]]


@pytest.fixture(params=[local, tcp, tcp6, tls, grpc, grpc_tls], ids=lambda make: make.__name__)
def transports(request: pytest.FixtureRequest) -> Iterator[list[Transport]]:
    made = request.param(3)
    yield made
    for transport in made:
        transport.close()


def deadline() -> float:
    return time.monotonic() + LONG


def linked(transports: list[Transport], a: int = 1, b: int = 0, channel: int = 9) -> tuple[Link, Link]:
    mine = transports[a].dial(b, channel, deadline())
    return mine, transports[b].accept(a, channel, deadline())


def test_dial_all_makes_links_to_several_peers(transports: list[Transport]) -> None:
    mine: list[Link] = []
    transports[2].dial_all([0, 1], 9, deadline(), mine.append)
    assert sorted((link.peer, link.channel) for link in mine) == [(0, 9), (1, 9)]
    for link in mine:
        theirs = transports[link.peer].accept(2, 9, deadline())
        link.send([b"rank %d" % link.peer])
        assert receive(transports[link.peer], theirs, 6) == b"rank %d" % link.peer
    transports[0].dial_all([], 9, deadline(), mine.append)
    assert len(mine) == 2


def test_link_bytes_go_both_ways_in_order(transports: list[Transport]) -> None:
    one, two = linked(transports)
    assert (one.peer, one.channel, two.peer, two.channel) == (0, 9, 1, 9)
    assert one.send([b"he", memoryview(b"l"), bytearray(b"lo")]) == 5
    assert two.send([b"you"]) == 3
    assert receive(transports[0], two, 5) == b"hello"
    assert receive(transports[1], one, 3) == b"you"
    assert one.receive([memoryview(bytearray(5))]) == 0, "an empty link must not look closed"


def test_receive_fills_several_buffers_in_turn(transports: list[Transport]) -> None:
    one, two = linked(transports)
    one.send([b"abcdef"])
    parts = [memoryview(bytearray(size)) for size in (1, 2, 3)]
    got, until, bell = 0, deadline(), transports[0].bell()
    while got < 6 and time.monotonic() < until:
        transports[0].wait([two], [], bell, 0.1)
        got += two.receive(parts)
    assert [bytes(part) for part in parts] == [b"a", b"bc", b"def"]


def test_wait_for_several_links_returns_the_readable_ones(transports: list[Transport]) -> None:
    silent, loud, closed = (linked(transports, channel=channel) for channel in (7, 8, 9))
    mine, bell = [pair[1] for pair in (silent, loud, closed)], transports[0].bell()
    assert list(transports[0].wait(mine, [], bell, 0.0)) == []
    loud[0].send([b"!"])
    closed[0].close()
    ready: set[Link] = set()
    until = deadline()
    while len(ready) < 2 and time.monotonic() < until:
        ready.update(transports[0].wait([link for link in mine if link not in ready], [], bell, 0.1))
    assert ready == {loud[1], closed[1]}
    assert set(transports[0].wait(mine, [], bell, 0.0)) == ready, "a readable link must be reported until it is read"
    assert receive(transports[0], loud[1], 1) == b"!"
    assert set(transports[0].wait(mine, [], bell, 0.0)) == {closed[1]}


def test_send_on_a_link_without_a_reader_takes_a_bounded_amount(transports: list[Transport]) -> None:
    one, two = linked(transports)
    bell, sent = transports[1].bell(), fill(transports[1], one)
    # After a partial send the caller sends the rest, beginning with the next byte.
    sending_the_rest = threading.Thread(target=lambda: send_all(transports[1], one, bytes(1)))
    sending_the_rest.start()
    assert receive(transports[0], two, sent + 1) == bytes(sent + 1)
    sending_the_rest.join(LONG)
    transports[1].wait([], [one], bell, LONG)
    assert one.send([b"x"]) == 1


def test_link_end_is_seen_after_earlier_bytes(transports: list[Transport]) -> None:
    one, two = linked(transports)
    one.send([b"last words"])
    one.close()
    assert receive(transports[0], two, 10) == b"last words"
    until = deadline()
    with pytest.raises(LinkClosed):
        while time.monotonic() < until:
            two.receive([memoryview(bytearray(1))])
    with pytest.raises(LinkClosed):
        while time.monotonic() < until:
            two.send([b"too late"])
    with pytest.raises(LinkClosed):
        one.send([b"closed here"])


def test_links_of_other_channels_and_peers_are_separate(transports: list[Transport]) -> None:
    links = {(a, c): linked(transports, a, 0, c) for a in (1, 2) for c in (5, 6)}
    for (a, c), (one, _) in links.items():
        one.send([bytes([a, c])])
    for (a, c), (_, two) in links.items():
        assert receive(transports[0], two, 2) == bytes([a, c])


def test_accept_without_a_dialer_times_out_and_finds_a_later_one(transports: list[Transport]) -> None:
    with pytest.raises(NoConnection, match="rank 1 did not connect in time") as caught:
        transports[0].accept(1, 9, time.monotonic() + 0.05)
    assert caught.value.peer == 1
    found: list[Link] = []
    waiting = threading.Thread(target=lambda: found.append(transports[0].accept(1, 9, deadline())))
    waiting.start()
    transports[1].dial(0, 9, deadline())
    waiting.join(LONG)
    assert [link.peer for link in found] == [1]


def test_accept_whose_check_raises_ends(transports: list[Transport]) -> None:
    def stop() -> None:
        raise Closed("never mind")

    with pytest.raises(Closed, match="never mind"):
        transports[0].accept(1, 9, time.monotonic() + FOREVER, stop)


def test_adopt_hands_over_earlier_and_later_links(transports: list[Transport]) -> None:
    transports[1].dial(0, 9, deadline())  # before `adopt` is called
    taken: list[int] = []
    changed = threading.Condition()

    def take(link: Link) -> None:
        with changed:
            taken.append(link.peer)
            changed.notify_all()

    arrivals: Any = transports[0]
    assert eventually(lambda: arrivals.arrivals.refusal(1, 9) is not None)
    transports[0].adopt(9, take)
    transports[2].dial(0, 9, deadline())
    with changed:
        assert changed.wait_for(lambda: sorted(taken) == [1, 2], LONG)


def test_bell_wakes_every_wait_until_it_is_silenced(transports: list[Transport]) -> None:
    one, _ = linked(transports)
    bell = transports[1].bell()
    wait = functools.partial(transports[1].wait, [one], [], bell, FOREVER)
    threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    bell.ring()
    bell.ring()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)
    transports[1].wait([one], [], bell, FOREVER)  # the bell is still rung
    bell.silence()
    began = time.monotonic()
    transports[1].wait([one], [], bell, 0.05)
    assert time.monotonic() - began > 0.04


def test_close_ends_all_links_and_refuses_new_ones(transports: list[Transport]) -> None:
    _, two = linked(transports)
    transports[1].close()
    transports[1].close()
    until = deadline()
    with pytest.raises(LinkClosed):
        while time.monotonic() < until:
            two.receive([memoryview(bytearray(1))])
    with pytest.raises((NoConnection, LinkClosed)):
        transports[2].dial(1, 9, time.monotonic() + 0.2).send([b"anybody?"])
    with pytest.raises(Closed):
        transports[1].accept(2, 9, deadline())


def test_link_closed_on_both_sides_can_be_dialled_again(transports: list[Transport]) -> None:
    one, two = linked(transports)
    one.close()
    until = deadline()
    with pytest.raises(LinkClosed):
        while time.monotonic() < until:
            two.receive([memoryview(bytearray(1))])
    two.close()
    one, two = linked(transports)
    one.send([b"again"])
    assert receive(transports[0], two, 5) == b"again"


def test_close_of_a_link_wakes_waits_on_both_sides(transports: list[Transport]) -> None:
    one, two = linked(transports)
    threads = [
        threading.Thread(target=transport.wait, args=([link], [], transport.bell(), FOREVER), daemon=True)
        for transport, link in ((transports[1], one), (transports[0], two))
    ]
    for thread in threads:
        thread.start()
        thread.join(0.02)
    one.close()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)
