"""Fuzzes the exchange of shared memory between ranks of one host: the socket, and the negotiation before it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable

from hypothesis import strategies as st

from fuzz.target import VALUES, Target, altered, encoded
from gradwire.operations import values
from gradwire.transports.shm.arena import RESERVED, SEALS
from gradwire.transports.shm.shared_memory import GREETING, Sharing, abstract_address
from support import neighbours

NEIGHBOURS = (1, 2)


def _memory(nbytes: int, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


# Descriptors that a client may send, by number. The first is what a genuine neighbour sends.
DESCRIPTORS: tuple[Callable[[], list[int]], ...] = (
    lambda: [_memory(RESERVED + 4096)],
    list,
    lambda: [_memory(RESERVED + 4096, fcntl.F_SEAL_GROW)],  # could be shrunk by its owner
    lambda: [_memory(RESERVED + 4096, SEALS | fcntl.F_SEAL_WRITE)],
    lambda: [_memory(0)],
    lambda: [_memory(RESERVED)],
    lambda: [_memory((64 << 30) + 4096)],
    lambda: [_memory(RESERVED + 4096), _memory(RESERVED + 4096)],
    lambda: [os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)],
    lambda: [os.open("/", os.O_RDONLY | os.O_CLOEXEC)],
    lambda: [os.open("/", os.O_PATH | os.O_CLOEXEC)],
    lambda: list(os.pipe()),
    lambda: [socket.socket(socket.AF_UNIX).detach()],
)


def without_leaks(target: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
    """Check that a target leaves no shared memory open."""

    def run(data: bytes) -> bool:
        before = _open_memory()
        outcome = target(data)
        assert _open_memory() <= before
        return outcome

    return run


def _open_memory() -> int:
    """Return the number of memfd descriptors in this process. A mapped arena has one too."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this directory
            found += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:")
    return found


def connect_clients(data: bytes) -> bool:
    """Connect clients, a few bytes each: the descriptors that they send, whether they know the token, the greeting."""
    with Sharing(0, ["host"] * 3, True) as sharing:
        name, token = sharing.offer() or ("", "")
        genuine = set()
        each = 2 + GREETING.size
        for start in range(0, len(data) - 1, each):
            kind, knows_token, *rest = data[start : start + each]
            greeting = bytes(rest)
            if knows_token & 1 and len(greeting) == GREETING.size:
                peer, _, started = GREETING.unpack(greeting)
                greeting = GREETING.pack(peer, bytes.fromhex(token), started)
                if kind % len(DESCRIPTORS) == 0:
                    genuine.add(GREETING.unpack(greeting)[0])
            _connect(name, greeting, DESCRIPTORS[kind % len(DESCRIPTORS)]())
        complete = sharing.answer([True] * 3)
        shared, _ = sharing.keep([True] * 3)
        assert shared is not None
        shared.close()
        assert set(shared.peers) == genuine & set(NEIGHBOURS)
        assert complete == (len(shared.peers) == len(NEIGHBOURS))
        return complete


def _connect(name: str, greeting: bytes, descriptors: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(abstract_address(name))
        with contextlib.suppress(OSError):  # too many descriptors for one packet
            socket.send_fds(client, [greeting], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def share(data: bytes) -> bool:
    """A neighbour's values at each step of the negotiation, as JSON lines."""
    received = iter([values.decode(line) for line in data.split(b"\n")])

    def exchange(own: object) -> list[object]:
        return [own, next(received, None)]

    shared, sharing = neighbours.share(0, ["host", "host"], True, exchange, time.monotonic() + 1.0)
    assert shared is None
    assert sharing == (False, False)
    return True


def _client(peer: int, kind: int = 0, knows_token: int = 1) -> bytes:
    return bytes([kind, knows_token]) + GREETING.pack(peer, bytes(16), 1)


_CLIENTS = st.builds(
    lambda kind, knows_token, peer: _client(peer, kind, knows_token),
    st.integers(0, len(DESCRIPTORS) - 1),
    st.integers(0, 1),
    st.sampled_from((0, 1, 2, 3, (1 << 32) - 1)),
)
_OFFER = ["0" * 32, "1" * 32]
_NEGOTIATIONS = st.lists(altered([_OFFER]) | st.just(_OFFER) | st.booleans() | VALUES, max_size=3)
TARGETS = (
    Target(
        "shared-memory clients",
        without_leaks(connect_clients),
        (_client(1) + _client(2), _client(9) + _client(2) + _client(2, knows_token=0) + _client(1)),
        inputs=st.lists(_CLIENTS, max_size=5).map(b"".join),
        examples=60,
    ),
    Target(
        "shared-memory negotiation",
        without_leaks(share),
        (encoded(_OFFER) + b"\ntrue\ntrue",),
        inputs=_NEGOTIATIONS.map(lambda lines: b"\n".join(map(encoded, lines))),
        examples=60,
    ),
)
