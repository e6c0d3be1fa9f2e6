"""The door where ranks of one host exchange memory, and what a neighbour may have written in its memory."""

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


# What a stranger may hand over, by number; the first is what a neighbour does.
THINGS: tuple[Callable[[], list[int]], ...] = (
    lambda: [_memory(RESERVED + 4096)],
    list,
    lambda: [_memory(RESERVED + 4096, fcntl.F_SEAL_GROW)],  # which could be taken away
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
    """No memory stays open when all is over."""

    def run(data: bytes) -> bool:
        before = _open_memory()
        outcome = target(data)
        assert _open_memory() <= before
        return outcome

    return run


def _open_memory() -> int:
    """Descriptors of memory in this process; a map of it has one too, as long as it is there."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory's own
            found += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:")
    return found


def knock(data: bytes) -> bool:
    """Visitors, a few bytes each: what they hand over, whether they know the token, and their greeting."""
    with Sharing(0, ["host"] * 3, True) as sharing:
        name, token = sharing.offer() or ("", "")
        genuine = set()
        each = 2 + GREETING.size
        for start in range(0, len(data) - 1, each):
            thing, knows, *greeting = data[start : start + each]
            said = bytes(greeting)
            if knows & 1 and len(said) == GREETING.size:
                peer, _, started = GREETING.unpack(said)
                said = GREETING.pack(peer, bytes.fromhex(token), started)
                if thing % len(THINGS) == 0:
                    genuine.add(GREETING.unpack(said)[0])
            _visit(name, said, THINGS[thing % len(THINGS)]())
        complete = sharing.answer([True] * 3)
        shared, _ = sharing.keep([True] * 3)
        assert shared is not None
        shared.close()
        assert set(shared.peers) == genuine & set(NEIGHBOURS)
        assert complete == (len(shared.peers) == len(NEIGHBOURS))
        return complete


def _visit(name: str, said: bytes, things: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.connect(abstract_address(name))
        with contextlib.suppress(OSError):  # more than a packet holds
            socket.send_fds(visitor, [said], things)
    for thing in things:
        os.close(thing)


def share(data: bytes) -> bool:
    """What a neighbour tells at each step of the exchange, as JSON lines."""
    told = iter([values.decode(line) for line in data.split(b"\n")])

    def tell_all(own: object) -> list[object]:
        return [own, next(told, None)]

    shared, sharing = neighbours.share(0, ["host", "host"], True, tell_all, time.monotonic() + 1.0)
    assert shared is None
    assert sharing == (False, False)
    return True


def _visitor(peer: int, thing: int = 0, knows: int = 1) -> bytes:
    return bytes([thing, knows]) + GREETING.pack(peer, bytes(16), 1)


_VISITORS = st.builds(
    lambda thing, knows, peer: _visitor(peer, thing, knows),
    st.integers(0, len(THINGS) - 1),
    st.integers(0, 1),
    st.sampled_from((0, 1, 2, 3, (1 << 32) - 1)),
)
_OFFER = ["0" * 32, "1" * 32]
_TELLINGS = st.lists(altered([_OFFER]) | st.just(_OFFER) | st.booleans() | VALUES, max_size=3)
TARGETS = (
    Target(
        "visitors",
        without_leaks(knock),
        (_visitor(1) + _visitor(2), _visitor(9) + _visitor(2) + _visitor(2, knows=0) + _visitor(1)),
        inputs=st.lists(_VISITORS, max_size=5).map(b"".join),
        examples=60,
    ),
    Target(
        "sharing",
        without_leaks(share),
        (encoded(_OFFER) + b"\ntrue\ntrue",),
        inputs=_TELLINGS.map(lambda told: b"\n".join(map(encoded, told))),
        examples=60,
    ),
)
