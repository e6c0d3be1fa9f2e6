"""Sends and receives given numbers of bytes on links, waiting as long as necessary."""

from __future__ import annotations

import time

from gradwire.transports.base import Link, Transport

LONG = 60.0


def receive(transport: Transport, link: Link, count: int) -> bytes:
    """Receive exactly `count` bytes."""
    data, until, bell = bytearray(count), time.monotonic() + LONG, transport.bell()
    got = 0
    while got < count:
        part = link.receive([memoryview(data)[got:]])
        got += part
        if not part:
            assert time.monotonic() < until, f"only {got} bytes came"
            transport.wait([link], [], bell, 0.1)
    return bytes(data)


def send_all(transport: Transport, link: Link, data: bytes) -> None:
    """Send all bytes."""
    view, until, bell = memoryview(data), time.monotonic() + LONG, transport.bell()
    while view and time.monotonic() < until:
        view = view[link.send([view]) :]
        if view:
            transport.wait([], [link], bell, 0.1)


def fill(transport: Transport, link: Link, seconds: float = 0.2) -> int:
    """Send until a link has had no room for some seconds, and return the number of bytes."""
    sent, bell, stalled = 0, transport.bell(), 0.0
    while stalled < seconds:
        sent += link.send([bytes(1 << 20)])
        assert sent < 64 << 20, "the link accepts an unlimited amount"
        began = time.monotonic()
        transport.wait([], [link], bell, seconds * 1.25)
        stalled = time.monotonic() - began
    return sent
