"""Fuzzes the TLS of links: random bytes to a TLS server, and an attacker in the middle who changes records."""

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
MESSAGE = b"the first link" * 10


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        one.setblocking(False)
        two.setblocking(False)
        yield one, two


def attempt(act: Callable[[], object]) -> object:
    """Return the result of a call, None if it would block, or an error that a rank handles."""
    try:
        return act() or True
    except BlockingIOError:
        return None
    except (NotTls, OSError) as error:
        failure = error
    assert not isinstance(failure, ssl.SSLError) or explain(failure).isprintable()
    return failure


def bytes_to_server(data: bytes) -> bool:
    with pair() as (client, mine):
        server = TlsStream(mine, credentials("m0").server_context(), server=True)
        client.send(data)
        client.shutdown(socket.SHUT_WR)
        outcome = attempt(server.shake_hands)
        assert outcome is not True
        with contextlib.suppress(BlockingIOError):
            return client.recv(1) == b"\x16"  # a handshake, not an alert
        return False


def man_in_the_middle(data: bytes) -> bool:
    """Change one transmitted byte, in either direction, for each four bytes of the input: position and mask."""
    changes = {int.from_bytes(data[at : at + 3], "big") % 8192: data[at + 3] for at in range(0, len(data) - 3, 4)}
    passed, tampered = 0, False
    with pair() as (client_end, client_wire), pair() as (server_end, server_wire):
        client = TlsStream(client_end, credentials("m1").client_context(), server=False)
        server = TlsStream(server_end, credentials("m0").server_context(), server=True)
        handshakes: list[object] = [None, None]
        for _ in range(6):
            for number, side in enumerate((client, server)):
                if handshakes[number] is None:
                    handshakes[number] = attempt(side.shake_hands)
            for source, target in ((client_wire, server_wire), (server_wire, client_wire)):
                with contextlib.suppress(BlockingIOError):
                    sent = source.recv(MOST)
                    changed = bytes(byte ^ changes.get(passed + at, 0) for at, byte in enumerate(sent))
                    passed += len(sent)
                    tampered = tampered or changed != sent
                    target.send(changed)
            if handshakes == [True, True] and not tampered:
                break
        if handshakes != [True, True]:
            assert tampered
            return False
        attempt(lambda: client.send(MESSAGE))
        sent = client_wire.recv(MOST)
        at = min(len(sent) - 1, data[-1] if data else 255)
        changed = sent[:at] + bytes([sent[at] ^ (len(data) % 4 != 0)]) + sent[at + 1 :]
        server_wire.send(changed)
        received = attempt(lambda: server.recv(1000))
        assert received == MESSAGE if changed == sent else received != MESSAGE
        return changed == sent


def _client_hello() -> bytes:
    with pair() as (mine, wire):
        attempt(TlsStream(mine, credentials("m1").client_context(), server=False).shake_hands)
        return wire.recv(MOST)


TARGETS = (
    Target("TLS handshake", bytes_to_server, (_client_hello(),), examples=40),
    Target("tampering with TLS", man_in_the_middle, (b"", b"\x00\x00\x05\x00"), examples=25),
)
