"""Links inside TLS, over real sockets: which peers are refused, the reason on both sides, and that other links work."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import ConfigError, Refused
from gradwire.security import certificates, credentials
from gradwire.security.admission import Dialer, Hello
from gradwire.security.certificate_names import Identity
from gradwire.security.credentials import Credentials
from gradwire.transports.base import Link
from gradwire.transports.tcp import accept
from gradwire.transports.tcp.tls_link import TlsLink
from gradwire.transports.tcp.transport import TcpTransport
from support import tls_files
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture

LONG = 60.0
FOREVER = 10_000.0  # seconds: a wait this long is a hang
RUN, KEY = secrets.token_bytes(16), secrets.token_bytes(32)
MEMBERS = ("m0", "m1", "m2")
Assemble = Callable[..., list[TcpTransport]]


def deadline() -> float:
    return time.monotonic() + LONG


@pytest.fixture
def assemble() -> Iterator[Assemble]:
    """Make ranks with these credentials. `members` are the ids that their certificates are checked against.

    `claims` replaces a rank's id in its own list, so that it accepts a certificate that the others do not.
    """
    made: list[TcpTransport] = []

    def make(
        *shown: Credentials | None, members: tuple[str, ...] = MEMBERS, claims: dict[int, str] | None = None
    ) -> list[TcpTransport]:
        transports = [TcpTransport("127.0.0.1", credentials) for credentials in shown]
        made.extend(transports)
        places = [transport.address for transport in transports]
        ids = members[: len(shown)]
        for rank, transport in enumerate(transports):
            known = list(ids)
            known[rank] = (claims or {}).get(rank, ids[rank])
            transport.assemble(rank=rank, addresses=places, job=RUN, generation=1, key=KEY, cores=0.0, members=known)
        return transports

    yield make
    for transport in made:
        transport.close()


def issued(where: Path, authority: certificates.Authority, identity: Identity, **options: Any) -> Credentials:
    """Issue credentials by an authority, in a folder of their own."""
    where.mkdir()
    pem, key = authority.issue(identity, **options)
    authority.store(where)
    certificates.write(where / "it.pem", pem, 0o644)
    certificates.write(where / "it.key", key, 0o600)
    return tls_files.files(where, "it")


def expired(where: Path, identity: Identity) -> Credentials:
    """Return credentials whose certificate has expired since they were loaded."""
    past = datetime.now(UTC) - timedelta(days=2)
    shown = issued(where, own_authority(), identity)
    pem, key = own_authority().issue(identity, begin=past, end=past + timedelta(days=1))
    certificates.write(where / "old.pem", pem, 0o644)
    certificates.write(where / "old.key", key, 0o600)
    for context in (shown.server_context(), shown.client_context()):
        context.load_cert_chain(where / "old.pem", where / "old.key")
    return shown


def own_authority() -> certificates.Authority:
    return certificates.Authority.load(tls_files.folder())


def linked(transports: list[TcpTransport], channel: int = 9) -> tuple[Link, Link]:
    mine = transports[1].dial(0, channel, deadline())
    return mine, transports[0].accept(1, channel, deadline())


def receive(link: Link, count: int) -> bytes:
    data, until, got = bytearray(count), deadline(), 0
    while got < count:
        part = link.receive([memoryview(data)[got:]])
        got += part
        assert part or time.monotonic() < until, f"only {got} bytes came"
    return bytes(data)


def works(one: Link, two: Link) -> None:
    word = secrets.token_bytes(8)
    one.send([word])
    assert receive(two, 8) == word
    two.send([word[::-1]])
    assert receive(one, 8) == word[::-1]


def is_refused(transport: TcpTransport, words: str, peer: int = 0) -> None:
    with pytest.raises(Refused, match=words) as caught:  # at the first attempt; later ones end without a reason
        transport.dial(peer, 77, deadline())
    assert (caught.value.peer, caught.value.rank) == (peer, transport.rank)


@contextlib.contextmanager
def line_to(transport: TcpTransport, credentials: Credentials) -> Iterator[ssl.SSLSocket]:
    """Open a TLS connection with Python's `ssl` module instead of gradwire."""
    context = credentials.client_context()
    with socket.create_connection(transport.address, timeout=LONG) as sock, context.wrap_socket(sock) as line:
        assert line.recv(1) == accept.WELCOME
        yield line


def admit(line: ssl.SSLSocket, dialer: Dialer) -> bytes:
    """Do the admission, and return the bytes that were sent."""
    sent = dialer.start()
    line.sendall(sent)
    while not dialer.done:
        answer = dialer.feed(line.recv(dialer.wanted))
        sent += answer
        line.sendall(answer)
    return sent


# -- who is refused ---------------------------------------------------------------------------------------------------


def test_tls_link_uses_tls_1_3_and_shows_the_peers_certificate(assemble: Assemble) -> None:
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"))
    for link, peer in zip(linked(transports), ("m0", "m1"), strict=True):
        assert isinstance(link, TlsLink)
        assert credentials.identity_of(link.peer_certificate) == f"gradwire://tests/{peer}"
        with socket.socket(fileno=os.dup(link.fileno())) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    with line_to(transports[0], tls_files.credentials("m1")) as line:
        assert line.version() == "TLSv1.3"


def test_certificate_of_a_host_covers_its_workers(assemble: Assemble) -> None:
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m0"), members=("m0/0", "m0/1"))
    works(*linked(transports))


def test_dialer_of_another_authority_refuses_the_acceptor(
    assemble: Assemble, tmp_path: Path, captured: CapturedLog
) -> None:
    stranger = issued(tmp_path / "other", certificates.Authority.new(), Identity("tests", "m2"))
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"), stranger)
    one, two = linked(transports)
    is_refused(transports[2], "no link to rank 0: its certificate is not accepted: another authority signed it")
    captured.wait_for(r"refused a link from 127.*: it does not accept this side: another authority signed this")
    works(one, two)


def test_certificate_of_another_authority_is_refused_by_the_acceptor(
    assemble: Assemble, tmp_path: Path, captured: CapturedLog
) -> None:
    """The dialer accepts the certificate of the rank, but the rank refuses that of the dialer."""
    issued(tmp_path / "other", certificates.Authority.new(), Identity("tests", "m2"))
    with open(tmp_path / "other" / "ca.pem", "ab") as file:
        file.write((tls_files.folder() / "ca.pem").read_bytes())
    stranger = tls_files.files(tmp_path / "other", "it")
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"), stranger)
    one, two = linked(transports)
    is_refused(transports[2], "no link to rank 0: it does not accept this side: another authority signed this")
    captured.wait_for(r"refused a link from 127.*: its certificate is not accepted: another authority signed it")
    works(one, two)


@pytest.mark.parametrize("side", ["dialer", "acceptor"])
def test_expired_certificate_is_refused(assemble: Assemble, tmp_path: Path, captured: CapturedLog, side: str) -> None:
    shown = expired(tmp_path / "old", Identity("tests", "m2" if side == "dialer" else "m0"))
    if side == "dialer":
        transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"), shown)
        one, two = linked(transports)
        is_refused(transports[2], "no link to rank 0: it does not accept this side: certificate expired")
        captured.wait_for("refused a link from .*: its certificate is not accepted: certificate has expired")
        works(one, two)
    else:
        transports = assemble(shown, tls_files.credentials("m1"))
        is_refused(transports[1], "no link to rank 0: its certificate is not accepted: certificate has expired")
        captured.wait_for("refused a link from .*: it does not accept this side: certificate expired")


def test_dial_with_another_members_certificate_is_refused(assemble: Assemble, captured: CapturedLog) -> None:
    shown = [tls_files.credentials(member) for member in ("m0", "m1", "m3")]
    transports = assemble(*shown, claims={2: "m3"})
    one, two = linked(transports)
    said = "it claims to be rank 2, but its certificate is for m3, which does not cover member m2"
    is_refused(transports[2], f"rank 0 refused the link: {said}$")  # the reason is authenticated
    captured.wait_for(f"refused a link from .*: {said}")
    works(one, two)


def test_accept_with_another_members_certificate_is_refused(assemble: Assemble, captured: CapturedLog) -> None:
    transports = assemble(tls_files.credentials("m3"), tls_files.credentials("m1"), claims={0: "m3"})
    is_refused(transports[1], "no link to rank 0: its certificate is for m3, which does not cover member m0")
    captured.wait_for(
        "refused a link from .*: the connection closed 80 bytes before the end of a hello; is this rank's"
    )


def test_certificate_of_another_job_is_refused_by_both_sides(
    assemble: Assemble, tmp_path: Path, captured: CapturedLog
) -> None:
    other = issued(tmp_path / "other", own_authority(), Identity("elsewhere", "m2"))
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"), other)
    one, two = linked(transports)
    is_refused(transports[2], "no link to rank 0: its certificate is for job tests, and this is job elsewhere")
    said = "it claims to be rank 2, but its certificate is for job elsewhere, and this is job tests"
    with line_to(transports[0], other) as line, pytest.raises(Refused, match=f"rank 0 refused the link: {said}$"):
        admit(line, Dialer(KEY, Hello(RUN, 1, 77, 2, 0)))  # does not check the acceptor's certificate
    captured.wait_for(f"refused a link from .*: {said}")
    works(one, two)


class Website(Identity):
    def __str__(self) -> str:
        return "https://example.org/"


def test_certificate_without_a_gradwire_name_is_refused(
    assemble: Assemble, captured: CapturedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"))
    one, two = linked(transports)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "identity_in", lambda _: Identity("tests", "m1"))
        website = issued(tmp_path / "web", own_authority(), Website("tests", "m1"))
    said = "its certificate is not accepted: a certificate has one name of the form"
    with line_to(transports[0], website) as line, pytest.raises(Refused, match=said):
        admit(line, Dialer(KEY, Hello(RUN, 1, 77, 1, 0)))
    captured.wait_for("refused a link from .*: it claims to be rank 1, but its certificate is not accepted")
    works(one, two)


def test_certificate_of_the_authority_itself_is_refused(assemble: Assemble, captured: CapturedLog) -> None:
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"))
    where = tls_files.folder()
    context = ssl.create_default_context(cafile=where / "ca.pem")
    context.check_hostname = False
    context.load_cert_chain(where / "ca.pem", where / "ca.key")
    with socket.create_connection(transports[0].address, timeout=LONG) as sock:
        line = context.wrap_socket(sock)
        with line, pytest.raises(ssl.SSLError, match="unsupported certificate"):
            line.recv(1)
    captured.wait_for("refused a link from .*: its certificate is not accepted: unsuitable certificate purpose")


def test_assemble_with_another_members_certificate_raises_config_error(assemble: Assemble) -> None:
    with pytest.raises(ConfigError, match="this process is member m0, but its certificate is for m1, so"):
        assemble(tls_files.credentials("m1"), tls_files.credentials("m1"))


def test_plaintext_dialer_at_a_tls_port_is_refused_with_a_reason(assemble: Assemble, captured: CapturedLog) -> None:
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"), None)
    one, two = linked(transports)
    is_refused(transports[2], "rank 0 refused the link: this rank uses TLS: give that process certificates too")
    captured.wait_for("refused a link from .*: it does not use TLS; this rank uses TLS")
    with socket.create_connection(transports[0].address, timeout=LONG) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while browser.recv(4096):
                pass
    captured.wait_for("refused a link from .*: it does not use TLS", times=2)
    works(one, two)


def test_tls_dialer_at_a_plaintext_port_is_refused_with_a_reason(assemble: Assemble, captured: CapturedLog) -> None:
    transports = assemble(None, None, tls_files.credentials("m2"))
    one, two = linked(transports)
    is_refused(transports[2], "no link to rank 0: it does not use TLS, and this rank does: give certificates to all")
    captured.wait_for(
        "refused a link from .*: the received bytes are not a gradwire admission but TLS: this rank was given no"
    )
    works(one, two)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize(
    ("version", "accepted"), [("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)], ids=["1.1", "1.2", "1.3"]
)
def test_tls_older_than_1_2_is_refused(assemble: Assemble, captured: CapturedLog, version: str, accepted: bool) -> None:
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"))
    host, port = transports[0].address
    where = tls_files.folder()
    command = ["openssl", "s_client", "-connect", f"{host}:{port}", version, "-cipher", "DEFAULT:@SECLEVEL=0"]
    files = ["-CAfile", f"{where}/ca.pem", "-cert", f"{where}/m1.pem", "-key", f"{where}/m1.key"]
    done = subprocess.run([*command, *files], input=b"", capture_output=True, timeout=LONG)
    said = (done.stdout + done.stderr).decode(errors="replace")
    if accepted:
        assert f"New, TLSv{version[-3:].replace('_', '.')}, Cipher is" in said, said
        assert "Verify return code: 0 (ok)" in said
        captured.wait_for("refused a link from .*: the connection closed 80 bytes before the end of a hello")
    else:
        assert "Cipher is (NONE)" in said, said
        captured.wait_for("refused a link from .*: TLS failed: it offers nothing newer than TLS 1.1")


def test_admission_replayed_inside_tls_by_a_member_is_refused(assemble: Assemble, captured: CapturedLog) -> None:
    """The replaying process could read inside TLS, and has a valid certificate."""
    transports = assemble(tls_files.credentials("m0"), tls_files.credentials("m1"))
    one, two = linked(transports)
    recorded = b""
    for attempt in ("admitted", "replayed"):
        with line_to(transports[0], tls_files.credentials("m1")) as line:
            if attempt == "admitted":
                recorded = admit(line, Dialer(KEY, Hello(RUN, 1, 77, 1, 0)))
            else:
                line.sendall(recorded)
                with contextlib.suppress(OSError):
                    while line.recv(4096):
                        pass
        if attempt == "admitted":
            transports[0].accept(1, 77, deadline()).close()
    captured.wait_for("refused a link from .*: the process that claims to be rank 1 does not hold this job's secret")
    works(one, two)
