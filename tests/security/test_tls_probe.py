"""Tests of the coordinator's TLS with real gRPC on loopback: accepted callers, and the errors of the others."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gradwire.membership.grpc_import import grpc
from gradwire.security import certificates
from gradwire.security.certificate_names import Identity
from gradwire.security.credentials import Credentials
from gradwire.security.tls_probe import tls_problem
from support import tls_files

LONG = 60.0


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A folder with files of members m0 to m7, which tests may change."""
    shutil.copytree(tls_files.folder(), tmp_path / "certs")
    return tmp_path / "certs"


def load(where: Path, member: str = "m1") -> Credentials:
    return tls_files.files(where, member)


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call with the reason why the caller's certificate does not cover m1, or with nothing."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials

    def service(self, details: Any) -> Any:
        def answer(request: bytes, context: Any) -> bytes:
            assert self._credentials is not None
            return (self._credentials.caller_refusal(context.auth_context(), request.decode()) or "").encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def served(credentials: Credentials | None) -> Iterator[int]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((Echo(credentials),))
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials.grpc_server())
        server.start()
        try:
            yield port
        finally:
            server.stop(0).wait()


def call(port: int, credentials: Credentials | None, member: str) -> str:
    """Return the server's answer, or the error."""
    if credentials is None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    else:
        channel = grpc.secure_channel(
            f"127.0.0.1:{port}", credentials.grpc_channel(), options=credentials.grpc_options()
        )
    with channel:
        try:
            return str(channel.unary_unary("/any/method")(member.encode(), timeout=LONG).decode())
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"


def test_grpc_server_with_certificates_checks_the_callers_member(where: Path) -> None:
    with served(load(where, "m0")) as port:
        assert call(port, load(where), "m1") == ""
        assert call(port, load(where), "m1/4") == ""
        assert call(port, load(where), "m2") == "its certificate is for m1, which does not cover member m2"


def test_grpc_server_refuses_other_authorities_other_jobs_and_plaintext(where: Path, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other", "tests", ["m1"])
    (tmp_path / "job").mkdir()
    for name in ("ca.pem", "ca.key"):
        shutil.copy(where / name, tmp_path / "job" / name)
    certificates.make(tmp_path / "job", "elsewhere", ["m1"])
    with served(load(where, "m0")) as port:
        assert call(port, load(tmp_path / "other"), "m1").startswith("UNAVAILABLE")
        assert call(port, None, "m1").startswith("UNAVAILABLE")
        # The server is not the coordinator of that job.
        assert "Hostname Verification Check failed" in call(port, load(tmp_path / "job"), "m1")
        assert call(port, load(where), "m1") == ""


def test_grpc_channel_refuses_a_member_that_poses_as_the_coordinator(where: Path) -> None:
    with served(load(where, "m2")) as port:
        assert "Hostname Verification Check failed" in call(port, load(where), "m1")


def test_grpc_server_presents_renewed_certificates(where: Path) -> None:
    server, client = load(where, "m0"), load(where)
    with served(server) as port:
        assert call(port, client, "m1") == ""
        certificates.make(where, "tests", ["m0", "m1"])
        assert call(port, client, "m1") == ""
        assert shown_at(port, where) == ssl.PEM_cert_to_DER_cert((where / "m0.pem").read_text())


def shown_at(port: int, where: Path) -> bytes | None:
    """Return the certificate that a server presents."""
    context = load(where).client_context()
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as sock, context.wrap_socket(sock) as line:
        return line.getpeercert(binary_form=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize(("version", "accepted"), [("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)])
def test_grpc_server_refuses_tls_older_than_1_2(where: Path, version: str, accepted: bool) -> None:
    with served(load(where, "m0")) as port:
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", version, "-cipher", "DEFAULT:@SECLEVEL=0"]
        files = ["-alpn", "h2", "-CAfile", f"{where}/ca.pem", "-cert", f"{where}/m1.pem", "-key", f"{where}/m1.key"]
        done = subprocess.run([*command, *files], input=b"", capture_output=True, timeout=LONG)
        assert (b"Cipher is (NONE)" not in done.stdout) is accepted, done.stdout
        assert (b"Verify return code: 0 (ok)" in done.stdout and b"New, TLSv1." in done.stdout) is accepted


# -- the reasons of refused callers -----------------------------------------------------------------------------------


def tried(port: int, credentials: Credentials | None) -> str | None:
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as sock:
        return tls_problem(sock, credentials)


def test_tls_problem_without_a_problem_is_none(where: Path) -> None:
    with served(load(where, "m0")) as port:
        assert tried(port, load(where)) is None
        assert call(port, load(where), "m1") == "", "the server must continue to serve"
    with served(None) as port:
        assert tried(port, None) is None


def test_tls_problem_with_tls_on_one_side_only_names_that_side(where: Path) -> None:
    with served(load(where, "m0")) as port:
        assert str(tried(port, None)).startswith("it uses TLS: give this process certificates too")
    with served(None) as port:
        assert str(tried(port, load(where))).startswith("it does not use TLS, and this process does")


class Reckless(Credentials):
    """Presents other files than those that it has checked."""

    shown: tuple[Path, Path]

    def probe_context(self) -> ssl.SSLContext:
        context = super().probe_context()
        context.load_cert_chain(*self.shown)
        return context


def test_tls_problem_with_a_refused_certificate_gives_the_reason(where: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    certificates.make(other, "tests", ["m1"])
    with served(load(where, "m0")) as port:
        assert tried(port, load(other)) == "its certificate is not accepted: another authority signed it"
        with open(other / "ca.pem", "ab") as file:  # now the worker trusts the coordinator, but not the reverse
            file.write((where / "ca.pem").read_bytes())
        assert str(tried(port, load(other))).startswith("it does not accept this process's certificate")
        credentials = load(where)
        past = datetime.now(UTC) - timedelta(days=2)
        pem, key = certificates.Authority.load(where).issue(
            Identity("tests", "m1"), begin=past, end=past + timedelta(days=1)
        )
        certificates.write(where / "m1.key", key, 0o600)
        certificates.write(where / "m1.pem", pem, 0o644)
        assert "m1.pem expired on" in str(tried(port, credentials))
        reckless = Reckless(where / "ca.pem", where / "m2.pem", where / "m2.key")
        reckless.shown = where / "m1.pem", where / "m1.key"
        assert str(tried(port, reckless)).startswith("it does not accept this process's certificate")


def test_tls_problem_with_a_server_that_is_no_coordinator_gives_the_reason(where: Path, tmp_path: Path) -> None:
    with served(load(where, "m2")) as port:
        assert tried(port, load(where)) == "its certificate is for m2, which may not be the coordinator"
    (tmp_path / "job").mkdir()
    for name in ("ca.pem", "ca.key"):
        shutil.copy(where / name, tmp_path / "job" / name)
    certificates.make(tmp_path / "job", "elsewhere", ["m0"])
    with served(load(tmp_path / "job", "m0")) as port:
        assert tried(port, load(where)) == "its certificate is for job elsewhere, and this is job tests"
