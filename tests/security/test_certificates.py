"""Tests of creating certificates: the written files, and the errors."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from gradwire.errors import ConfigError
from gradwire.security import certificates
from gradwire.security.certificates import Authority, coordinator_name, make
from support import tls_files

LONG = 30.0


def names(file: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    return [
        str(name.value) for name in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    ]


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_make_writes_an_authority_and_a_certificate_for_each_member(tmp_path: Path) -> None:
    where = tmp_path / "a" / "b"
    assert make(where, "digits", ["host-a", "host-b"]) == [where / n for n in ("ca.pem", "host-a.pem", "host-b.pem")]
    assert sorted(file.name for file in where.iterdir()) == [
        "ca.key",
        "ca.pem",
        "host-a.key",
        "host-a.pem",
        "host-b.key",
        "host-b.pem",
    ]
    assert {mode(file) for file in where.glob("*.key")} == {0o600}
    assert mode(where) == 0o700
    assert names(where / "host-a.pem") == ["gradwire://digits/host-a", "digits.coordinator.gradwire"]
    assert names(where / "host-b.pem") == ["gradwire://digits/host-b"]
    assert tls_files.files(where, "host-b").identity == "gradwire://digits/host-b"


def test_make_keys_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make(tmp_path, "digits", ["a"])
    finally:
        os.umask(before)
    assert {mode(file) for file in tmp_path.glob("*.key")} == {0o600}


def test_make_again_uses_the_same_authority_and_keeps_roles(tmp_path: Path) -> None:
    make(tmp_path, "digits", ["a", "b"], ["b"])
    authority, old = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "b.pem").read_bytes()
    assert make(tmp_path, "digits", ["c", "b"]) == [tmp_path / "c.pem", tmp_path / "b.pem"]
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert (tmp_path / "b.pem").read_bytes() != old
    assert coordinator_name("digits") in names(tmp_path / "b.pem")
    assert coordinator_name("digits") not in names(tmp_path / "c.pem")
    for member in "abc":
        tls_files.files(tmp_path, member)


def test_make_coordinator_that_is_no_member_gets_its_own_certificate(tmp_path: Path) -> None:
    make(tmp_path, "digits", ["a"], ["boss"])
    assert coordinator_name("digits") in names(tmp_path / "boss.pem")
    assert coordinator_name("digits") not in names(tmp_path / "a.pem")


def test_issue_certificate_ends_no_later_than_its_authority(tmp_path: Path) -> None:
    make(tmp_path, "digits", ["a"], days=3650)
    ends = [
        x509.load_pem_x509_certificate((tmp_path / f).read_bytes()).not_valid_after_utc for f in ("a.pem", "ca.pem")
    ]
    assert ends[0] <= ends[1]
    make(tmp_path, "digits", ["b"], days=0.5)
    end = x509.load_pem_x509_certificate((tmp_path / "b.pem").read_bytes()).not_valid_after_utc
    assert timedelta(hours=11) < end - datetime.now(UTC) <= timedelta(hours=12)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "../a", ".hidden", "ä", "x" * 64, "a\n"])
def test_identity_with_an_invalid_name_raises(tmp_path: Path, name: str) -> None:
    for job, members in ((name, ["a"]), ("digits", [name])):
        with pytest.raises(ConfigError, match="is not a valid name: use at most 63 letters, digits"):
            make(tmp_path, job, members)
    assert list(tmp_path.iterdir()) == []


def test_make_with_invalid_arguments_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no member can be called 'ca'"):
        make(tmp_path, "digits", ["ca"])
    with pytest.raises(ConfigError, match="no certificate was requested"):
        make(tmp_path, "digits", [])
    with pytest.raises(ConfigError, match="at most 3650 days, not 0"):
        make(tmp_path, "digits", ["a"], days=0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*file"):
        make(tmp_path / "file", "digits", ["a"])
    make(tmp_path, "digits", ["a"])
    for coordinators in ([], ["a"]):
        with pytest.raises(
            ConfigError, match=r"a.pem is for job digits: use another directory for this job's certificates"
        ):
            make(tmp_path, "letters", ["a"], coordinators)


@pytest.mark.parametrize("spoil", ["missing", "garbage", "another's", "expired"])
def test_load_incomplete_authority_raises(tmp_path: Path, spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if spoil == "expired":
        monkeypatch.setattr(certificates, "CLOCK_TOLERANCE", timedelta(days=2))
        monkeypatch.setattr(certificates, "AUTHORITY_DAYS", -1)
        Authority.new().store(tmp_path)
        monkeypatch.undo()
    else:
        make(tmp_path, "digits", ["a"])
    if spoil == "missing":
        (tmp_path / "ca.key").unlink()
    elif spoil == "garbage":
        (tmp_path / "ca.key").write_bytes(b"garbage")
    elif spoil == "another's":
        shutil.copy(tmp_path / "a.key", tmp_path / "ca.key")
    said = {
        "missing": r"cannot read the certificate authority .*ca.key: No such file",
        "garbage": "is damaged or encrypted",
        "another's": r"ca.key is not the key of .*ca.pem",
        "expired": r"expired on \d{4}-\d\d-\d\d: create a new one",
    }
    with pytest.raises(ConfigError, match=said[spoil]):
        make(tmp_path, "digits", ["b"])
    assert not (tmp_path / "b.pem").exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_accepts_the_certificates(tmp_path: Path) -> None:
    make(tmp_path, "digits", ["a"])
    for purpose in ("sslserver", "sslclient"):
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", "ca.pem", "a.pem"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
        assert done.stdout == "a.pem: OK\n", done.stderr
