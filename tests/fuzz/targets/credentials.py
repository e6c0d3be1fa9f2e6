"""Fuzzes the parsers of join tokens, certificates, addresses, and the line of a closed coordinator."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import warnings

from fuzz.target import Target
from gradwire.errors import ConfigError
from gradwire.job.address import Address
from gradwire.membership.closed_listener import closing_reason_at
from gradwire.membership.endpoints import Endpoint
from gradwire.security import certificate_names, certificates, credentials, tokens
from support.tls_files import folder

SECRET = bytes(32)


def read_closing_reason(data: bytes) -> bool:
    """A program at the coordinator's address sends `data`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as sock:
                sock.sendall(data)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            reason = closing_reason_at(Endpoint("127.0.0.1", listener.getsockname()[1]), 10.0)
        finally:
            sender.join()
    assert reason is None or (reason.isprintable() and len(reason) <= 300)
    return reason is not None


def read_token(data: bytes) -> bool:
    try:
        token = tokens.read(data.decode("utf-8", "surrogateescape"))
    except ConfigError:
        return False
    assert len(token.ticket) <= tokens.LONGEST_TICKET
    assert len(token.key) == 32
    assert token.job
    return True


def check_ticket(data: bytes) -> bool:
    """The ticket's key was proven, so a holder of the secret made the ticket. It may still be invalid."""
    gate = tokens.TokenGate("job")
    reason = gate.refusal(data, "member", 1000.0, lambda name: False)
    assert not gate.may_act_for(data, "member") or not data
    if reason is None:
        gate.admit(data, "member")
    assert reason is None or (reason and len(reason) <= 1000)
    json_safe = gate.snapshot()
    gate.restore(json_safe)
    return reason is None


def read_identity(data: bytes) -> bool:
    uris = data.decode("utf-8", "replace").split("\n")
    try:
        found = certificate_names.single_identity(uris)
    except ValueError:
        return False
    assert str(found) in uris
    assert certificate_names.covers(str(found), found.member)
    assert not certificate_names.covers(str(found), found.member + "x")
    return True


def read_certificate(data: bytes) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations that become errors in a later version of cryptography
            found = credentials.identity_of(data)
            certificates.may_coordinate(data, "tests")
    except ValueError:
        return False
    certificate_names.parse(found)
    return True


def read_address(data: bytes) -> bool:
    """A member's own description of where it listens."""
    text = data.decode("utf-8", "replace")
    try:
        found = Address.parse(text, "the address of rank 1")
    except ConfigError:
        return False
    assert Address.parse(str(found)) == found
    return True


def _certificate(member: str) -> bytes:
    pem = (folder() / f"{member}.pem").read_text()
    return ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERT") :])


_OVER = b"gradwire: the rendezvous is over: all 4 ranks of the job there have come\n"
_TOKEN = tokens.make(SECRET, job="job", expires_in=100.0, now=1000.0)
TARGETS = (
    Target("closed_listener", read_closing_reason, (_OVER,), examples=50),
    Target("join token", read_token, (_TOKEN.encode(),)),
    Target("ticket", check_ticket, (tokens.read(_TOKEN).ticket,)),
    Target("certificate", read_certificate, (_certificate("m0"), _certificate("m1"))),
    Target("address", read_address, (b"127.0.0.1:80", b"[::1]:5000", b"host-a.example:1")),
    Target("identity", read_identity, (b"gradwire://job/host-a/0", b"dns:x\ngradwire://job/a")),
)
