"""Tests of a coordinator with certificates: which callers it accepts, and the errors of the others."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from gradwire.errors import ConfigError, Refused
from gradwire.membership import Assembly, Member
from gradwire.membership.client.requests import heartbeat, register, serving, start_checkpoint, unregister
from gradwire.membership.closed_listener import ClosedListener
from gradwire.membership.coordinator.service import Coordinator
from gradwire.membership.endpoints import resolve
from gradwire.membership.sealing import WorkerSeal
from gradwire.membership.v1 import gradwire_pb2_grpc as rpc
from gradwire.security import certificates
from gradwire.security.credentials import Credentials
from support import tls_files
from support.captured_log import CapturedLog
from support.membership_claims import SECRET

Serve = Callable[..., Coordinator]


@pytest.fixture
def coordinator(serve: Serve) -> Coordinator:
    """A coordinator with certificates, for an elastic job of one member."""
    return serve(1, minimum=1, maximum=1, credentials=tls_files.credentials("m0"))


def member(name: str) -> Member:
    return Member(name, None, "machine", "host", os.getpid(), "127.0.0.1:1")


def join(coordinator: Coordinator, name: str, credentials: Credentials | None) -> Assembly:
    return register(
        coordinator.address,
        member(name),
        size=None,
        secret=SECRET,
        job=None,
        timeout=60,
        credentials=credentials,
    )


def test_register_with_certificates_succeeds(coordinator: Coordinator) -> None:
    mine = tls_files.credentials("m1")
    assembly = join(coordinator, "m1/0", mine)
    assert assembly.job == coordinator.job == "tests"
    assert heartbeat(coordinator.address, ["m1/0"], secret=SECRET, credentials=mine).generation == 1
    assert unregister(coordinator.address, assembly.members[0], secret=SECRET, credentials=mine)


def test_certificate_covers_its_own_member_only(coordinator: Coordinator, captured: CapturedLog) -> None:
    address, mine, others = coordinator.address, tls_files.credentials("m1"), tls_files.credentials("m2")
    with pytest.raises(Refused, match="its certificate is for m2, which does not cover member m1"):
        join(coordinator, "m1", others)
    assembly = join(coordinator, "m1", mine)
    for call in (
        lambda: heartbeat(address, ["m1"], secret=SECRET, credentials=others),
        lambda: heartbeat(address, ["m2"], gone=["m1"], secret=SECRET, credentials=others),
        lambda: unregister(address, assembly.members[0], secret=SECRET, credentials=others),
        lambda: start_checkpoint(address, "m1", 1, secret=SECRET, credentials=others),
    ):
        with pytest.raises(Refused, match="its certificate is for m2, which does not cover member m1"):
            call()
    captured.wait_for(r"refused a call from 127\.0\.0\.1:[0-9]+: its certificate is for m2", times=4)
    assert heartbeat(address, ["m1"], secret=SECRET, credentials=mine).evicted == ()


def made(where: Path, job: str, name: str) -> Credentials:
    certificates.make(where, job, [name], [name])
    return tls_files.files(where, name)


def test_register_with_another_authority_is_refused(coordinator: Coordinator, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="certificate"):
        join(coordinator, "m1", made(tmp_path, "tests", "m1"))


def test_register_with_a_certificate_unknown_to_the_coordinator_is_refused(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    made(tmp_path, "tests", "m1")
    trusted = tmp_path / "both.pem"  # this side trusts both authorities, the coordinator only its own
    trusted.write_bytes((tmp_path / "ca.pem").read_bytes() + (tls_files.folder() / "ca.pem").read_bytes())
    with pytest.raises(Refused, match="it does not accept this process's certificate"):
        join(coordinator, "m1", Credentials(trusted, tmp_path / "m1.pem", tmp_path / "m1.key"))


def test_closed_listener_answers_clients_with_certificates_too() -> None:
    listener = ClosedListener(resolve("127.0.0.1", 0)[0], "all have come")
    try:
        with pytest.raises(Refused, match="is over: all have come"):
            register(
                listener.address,
                member("m1"),
                size=None,
                secret=SECRET,
                job=None,
                timeout=60,
                credentials=tls_files.credentials("m1"),
            )
    finally:
        listener.close()


def test_register_at_a_member_that_poses_as_the_coordinator_is_refused(serve: Serve) -> None:
    impostor = serve(1, credentials=tls_files.credentials("m3"))
    with pytest.raises(Refused, match="its certificate is for m3, which may not be the coordinator"):
        join(impostor, "m1", tls_files.credentials("m1"))


def test_register_with_a_certificate_of_another_job_names_both_jobs(coordinator: Coordinator, tmp_path: Path) -> None:
    made(tmp_path, "other", "m1")
    trusted = tmp_path / "both.pem"
    trusted.write_bytes((tmp_path / "ca.pem").read_bytes() + (tls_files.folder() / "ca.pem").read_bytes())
    with pytest.raises(Refused, match="its certificate is for job tests, and this is job other"):
        join(coordinator, "m1", Credentials(trusted, tmp_path / "m1.pem", tmp_path / "m1.key"))


def test_register_in_plaintext_at_a_coordinator_with_certificates_is_refused(coordinator: Coordinator) -> None:
    with pytest.raises(Refused, match="it uses TLS: give this process certificates too"):
        join(coordinator, "m1", None)


def test_register_with_certificates_at_a_coordinator_without_is_refused(serve: Serve) -> None:
    with pytest.raises(Refused, match="it does not use TLS, and this process does"):
        join(serve(1), "m1", tls_files.credentials("m1"))


def test_coordinator_beyond_this_machine_accepts_certificates(serve: Serve) -> None:
    coordinator = serve(1, host="0.0.0.0", credentials=tls_files.credentials("m0"))
    assert join(coordinator, "m1", tls_files.credentials("m1")).rank == 0


def test_coordinator_job_must_match_its_certificate(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="the certificate is for job tests, and this is job other"):
        serve(1, job="other", credentials=tls_files.credentials("m0"))


def test_coordinator_refuses_old_versions_of_tls(coordinator: Coordinator) -> None:
    host, _, port = coordinator.address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection((host, int(port)), 10) as plain, pytest.raises(OSError):
        context.wrap_socket(plain).close()


def test_coordinator_uses_renewed_files_without_a_restart(serve: Serve, tmp_path: Path) -> None:
    server = made(tmp_path, "tests", "m0")
    coordinator = serve(1, minimum=1, maximum=1, credentials=server)
    before = ssl.get_server_certificate(_place(coordinator))
    made(tmp_path, "tests", "m0")
    assert join(coordinator, "m0", tls_files.files(tmp_path, "m0")).rank == 0
    assert ssl.get_server_certificate(_place(coordinator)) != before


def _place(coordinator: Coordinator) -> tuple[str, int]:
    host, _, port = coordinator.address.rpartition(":")
    return host, int(port)


def test_health_check_works_over_tls(coordinator: Coordinator) -> None:
    assert serving(coordinator.address, secret=SECRET, credentials=tls_files.credentials("m1"))


def test_grpc_client_with_certificates_is_accepted(coordinator: Coordinator) -> None:
    mine = tls_files.credentials("m1")
    with grpc.secure_channel(coordinator.address, mine.grpc_channel(), options=mine.grpc_options()) as channel:
        stub = rpc.MembershipStub(channel)  # type: ignore[no-untyped-call]
        seal = WorkerSeal(SECRET)
        seal.accept_hello(stub.Hello(seal.hello()))
        request = seal.seal("Heartbeat", b"")
        assert seal.open("Heartbeat", request, stub.Heartbeat(request)) != b"", "no news in the reply"
