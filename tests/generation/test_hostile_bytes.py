"""Unknown clients at the data port of a running job: it continues, its memory does not grow, and they are logged."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.errors import Refused
from gradwire.group.internals import parts_of
from gradwire.security.admission import Dialer, Hello
from gradwire.security.secret import derive
from gradwire.security.tokens import whole_secret
from gradwire.transports.tcp.transport import TcpTransport
from support.processes import Here, Rank, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture
from support.ranks import eventually

MIB = 1 << 20
ALLOWED = 10 * MIB


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keeps_reducing(here: Here) -> None:
    """Reduce until the test ends it, open new links when the test asks for it, and report the results."""
    group = gw.init()
    generation = parts_of(group).generation
    assert isinstance(generation.transport, TcpTransport)
    x = np.ones(1 << 12, np.float32)
    y = np.zeros(1 << 12, np.float32)
    other = (group.rank + 1) % 2
    for _ in range(50):
        group.all_reduce(x, op="mean")
        group.sendrecv(x, y, dst=other, src=other)
    secret, run = whole_secret(os.environ, loopback=True), generation.identity.run
    key, address = derive(secret, "links", run), generation.transport.address
    here.send(address=address, key=key.hex(), job=run.hex(), resident=resident(), rank=group.rank)
    orders: list[Any] = []
    listener = threading.Thread(target=lambda: orders.extend(here.receive() for _ in range(3)), daemon=True)
    listener.start()
    done, wanted, sub = 0, 0, group
    while True:
        heard = int(group.all_reduce(len(orders), op="min"))  # both ranks follow an order in the same iteration
        sub.all_reduce(x, op="mean")
        group.sendrecv(x, y, dst=other, src=other)
        done += 1
        if heard > wanted:
            wanted = heard
            if orders[heard - 1] == "stop":
                break
            if orders[heard - 1] == "new links":
                sub = group.subgroup([0, 1])
                sub.barrier()
            here.send(done=done)
    here.send(done=done, resident=resident(), right=bool((x == 1).all()))


class Target:
    """The job under attack."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.reports = [rank.receive() for rank in ranks]
        self.address: tuple[str, int] = (self.reports[0]["address"][0], self.reports[0]["address"][1])
        self.key = bytes.fromhex(self.reports[0]["key"])
        self.job = bytes.fromhex(self.reports[0]["job"])

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def order(self, what: str) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.send(what)
        return [rank.receive() for rank in self.ranks]

    def log(self) -> str:
        return self.ranks[0].output()

    def wait_for_log(self, pattern: str) -> None:
        assert eventually(lambda: re.search(pattern, self.log()) is not None), f"no {pattern!r} in:\n{self.log()}"


@pytest.fixture
def target(job: StartJob) -> Iterator[Target]:
    """Run a job of two ranks, and assert at the end of the test that it still works."""
    with job(keeps_reducing, 2) as ranks:
        target = Target(ranks)
        yield target
        before = target.order("count")
        time.sleep(0.05)
        for rank, report, first in zip(ranks, target.order("stop"), target.reports, strict=True):
            assert report["right"]
            assert report["done"] > before[rank.number]["done"] > 0
            assert report["resident"] - first["resident"] < ALLOWED
        assert [rank.ended() for rank in ranks] == [0, 0]


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine does not allow enough descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def source(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"


def drain(sock: socket.socket) -> bytes:
    """Return what the other side sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            data += part
    return data


STRANGERS = {
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "the received bytes are not a gradwire admission"),
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "the received bytes are not a gradwire admission"),
    "wrong magic": (b"gw-link2" + bytes(200), "the received bytes are not a gradwire admission"),
    "cut hello": (b"gw-link1" + bytes(20), r"the connection closed \d+ bytes before the end of a hello"),
    "no proof": (
        b"gw-link1" + bytes(72),
        "the connection closed 32 bytes before the end of the proof of a process that claims to be rank 0",
    ),
    "cut proof": (
        b"gw-link1" + bytes(103),
        "the connection closed 1 bytes before the end of the proof of a process that claims to be rank 0",
    ),
    "empty proof": (b"gw-link1" + bytes(104), "the process that claims to be rank 0 does not hold this job's secret"),
    "too much": (b"gw-link1" + b"\xff" * 5000, "the process that claims to be rank 4294967295 does not hold this"),
    "nothing": (b"", "the connection closed 80 bytes before the end of a hello"),
}


def test_link_with_an_invalid_opening_is_refused_and_logged_with_its_address(target: Target) -> None:
    for opening, said in STRANGERS.values():
        with target.connect() as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(opening)
                sock.shutdown(socket.SHUT_WR)
            drain(sock)
            target.wait_for_log(f"refused a link from {source(sock)}: {said}")


def test_links_of_random_bytes_are_refused_and_their_log_lines_limited(target: Target) -> None:
    dice = random.Random(20)
    for _ in range(300):
        with target.connect() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(dice.randbytes(dice.choice([1, 7, 8, 64, 80, 112, 4096, 65536])))
    target.wait_for_log("further refusals within this minute are not logged")
    assert target.log().count("refused a link from") <= 60


def test_link_with_the_secret_but_a_wrong_identity_is_refused_with_the_reason(target: Target) -> None:
    hello: dict[str, Any] = {"job": target.job, "generation": 1, "channel": 77, "source": 1, "target": 0}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"job": bytes(16)}, "it belongs to another job"),
        ({"generation": 2}, "it belongs to generation 2, this is 1"),
        ({"target": 1}, "it dialled rank 1, this is rank 0"),
        ({"source": 0}, "rank 0 is not a peer of rank 0 of 2"),
        ({"source": 2}, "rank 2 is not a peer of rank 0 of 2"),
        ({"channel": 1}, "rank 1 already has this link"),
    ]
    for change, said in wrong:
        with target.connect() as sock:
            with pytest.raises(Refused, match=f"rank . refused the link: {said}$"):
                admit(sock, Dialer(target.key, Hello(**{**hello, **change})))
            target.wait_for_log(f"refused a link from {source(sock)}: {said}")


def admit(sock: socket.socket, dialer: Dialer) -> bytes:
    """Do the admission, and return the bytes that were sent."""
    sent = dialer.start()
    sock.sendall(sent)
    while not dialer.done:
        data = sock.recv(dialer.wanted)
        assert data, "the connection was closed"
        answer = dialer.feed(data)
        sent += answer
        if answer:
            sock.sendall(answer)
    return sent


def test_link_that_replays_a_recorded_admission_is_refused(target: Target) -> None:
    hello = Hello(target.job, 1, 77, 1, 0)
    with target.connect() as sock:
        recorded = admit(sock, Dialer(target.key, hello))
    with target.connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(recorded)
        drain(sock)
        target.wait_for_log(f"refused a link from {source(sock)}: the process that claims to be rank 1 does not hold")


def test_links_that_send_one_byte_at_a_time_delay_no_new_link(target: Target) -> None:
    """Each slow connection uses one of the pending places, but delays no other connection."""
    slow = [target.connect() for _ in range(60)]
    opening = b"gw-link1" + bytes(72)
    for byte in opening[:40]:
        for sock in slow:
            sock.send(bytes([byte]))
        time.sleep(0.005)
    target.order("new links")
    for sock in slow:
        sock.close()


@pytest.mark.usefixtures("many_descriptors")
def test_links_of_a_thousand_idle_clients_do_not_block_new_links(target: Target) -> None:
    idle = [target.connect() for _ in range(1000)]
    target.order("new links")
    target.wait_for_log("too many connections wait for admission")
    for sock in idle:
        sock.close()


def test_links_opened_and_reset_in_a_flood_do_not_block_new_links(target: Target) -> None:
    over = threading.Event()
    count = 0

    def flood() -> None:
        nonlocal count
        while count < 300 or not over.is_set():
            with contextlib.suppress(OSError), target.connect() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # close with a reset
                sock.send(b"gw-link1"[: count % 9])
            count += 1

    floods = [threading.Thread(target=flood) for _ in range(3)]
    for thread in floods:
        thread.start()
    target.order("new links")
    over.set()
    for thread in floods:
        thread.join()
