"""TLS as links use it: noise at a door that wants TLS, and somebody in between who changes records."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

from fuzz.target import Target
from gradwire.security.credentials import explain
from gradwire.transports.tcp.tls_link import NotTls, TlsStream
from support.tls_files import credentials

MOST = 64 << 10
SAID = b"the first link" * 10


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        one.setblocking(False)
        two.setblocking(False)
        yield one, two


def attempt(act: Callable[[], object]) -> object:
    """What came of it: a result, None for nothing yet, or the error that a rank's door is prepared for."""
    try:
        return act() or True
    except BlockingIOError:
        return None
    except (NotTls, OSError) as error:
        trouble = error
    assert not isinstance(trouble, ssl.SSLError) or explain(trouble).isprintable()
    return trouble


def knock(data: bytes) -> bool:
    with pair() as (stranger, mine):
        server = TlsStream(mine, credentials("m0").server_context(), server=True)
        stranger.send(data)
        stranger.shutdown(socket.SHUT_WR)
        outcome = attempt(server.shake_hands)
        assert outcome is not True
        with contextlib.suppress(BlockingIOError):
            return stranger.recv(1) == b"\x16"  # a handshake, not an alert
        return False


def in_between(data: bytes) -> bool:
    """Each four bytes change one byte of all that passes, in either direction: where, and how."""
    changes = {int.from_bytes(data[at : at + 3], "big") % 8192: data[at + 3] for at in range(0, len(data) - 3, 4)}
    passed, harmed = 0, False
    with pair() as (client_end, client_wire), pair() as (server_end, server_wire):
        client = TlsStream(client_end, credentials("m1").client_context(), server=False)
        server = TlsStream(server_end, credentials("m0").server_context(), server=True)
        heard: list[object] = [None, None]
        for _ in range(6):
            for number, side in enumerate((client, server)):
                if heard[number] is None:
                    heard[number] = attempt(side.shake_hands)
            for source, target in ((client_wire, server_wire), (server_wire, client_wire)):
                with contextlib.suppress(BlockingIOError):
                    words = source.recv(MOST)
                    changed = bytes(byte ^ changes.get(passed + at, 0) for at, byte in enumerate(words))
                    passed += len(words)
                    harmed = harmed or changed != words
                    target.send(changed)
            if heard == [True, True] and not harmed:
                break
        if heard != [True, True]:
            assert harmed
            return False
        attempt(lambda: client.send(SAID))
        words = client_wire.recv(MOST)
        at = min(len(words) - 1, data[-1] if data else 255)
        changed = words[:at] + bytes([words[at] ^ (len(data) % 4 != 0)]) + words[at + 1 :]
        server_wire.send(changed)
        received = attempt(lambda: server.recv(1000))
        assert received == SAID if changed == words else received != SAID
        return changed == words


def _client_hello() -> bytes:
    with pair() as (mine, wire):
        attempt(TlsStream(mine, credentials("m1").client_context(), server=False).shake_hands)
        return wire.recv(MOST)


TARGETS = (
    Target("knocking at TLS", knock, (_client_hello(),), examples=40),
    Target("in between TLS", in_between, (b"", b"\x00\x00\x05\x00"), examples=25),
)
