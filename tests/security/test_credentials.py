"""Tests of TLS from files: errors name the bad file, and changed files are read again."""

from __future__ import annotations

import os
import pickle
import shutil
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import ConfigError
from gradwire.security import certificates
from gradwire.security.certificate_names import Identity, covers, parse
from gradwire.security.credentials import Credentials, explain, identity_of
from support import tls_files
from support.captured_log import CapturedLog
from support.captured_log import captured_fixture as captured_fixture

LONG = 60.0


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A folder with files of members m0 and m1, which tests may damage."""
    shutil.copytree(tls_files.folder(), tmp_path / "certs")
    return tmp_path / "certs"


def load(where: Path, member: str = "m1") -> Credentials:
    return tls_files.files(where, member)


def issue(where: Path, name: str, **options: Any) -> None:
    pem, key = certificates.Authority.load(where).issue(Identity("tests", name), **options)
    certificates.write(where / f"{name}.pem", pem, 0o644)
    certificates.write(where / f"{name}.key", key, 0o600)


def test_credentials_identity_job_and_member_come_from_the_files(where: Path) -> None:
    credentials = load(where)
    assert credentials.identity == "gradwire://tests/m1"
    assert (credentials.job, credentials.member) == ("tests", "m1")
    der = ssl.PEM_cert_to_DER_cert((where / "m1.pem").read_text())
    assert identity_of(der) == credentials.identity
    for context in (credentials.server_context(), credentials.client_context()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED
        old = [cipher["name"] for cipher in context.get_ciphers() if not cipher["aead"]]
        assert old == []


def test_from_environ_needs_all_three_variables(where: Path) -> None:
    environ = {
        "GRADWIRE_TLS_CA": f"{where}/ca.pem",
        "GRADWIRE_TLS_CERT": f"{where}/m1.pem",
        "GRADWIRE_TLS_KEY": f"{where}/m1.key",
    }
    found = Credentials.from_environ(environ)
    assert found is not None
    assert found.member == "m1"
    assert Credentials.from_environ({}) is None
    assert Credentials.from_environ(dict.fromkeys(environ, "")) is None
    del environ["GRADWIRE_TLS_KEY"]
    with pytest.raises(ConfigError, match="TLS needs three files: GRADWIRE_TLS_KEY must be set too"):
        Credentials.from_environ(environ)


def test_from_environ_file_that_cannot_be_read_is_named_with_its_variable(where: Path) -> None:
    names = {"GRADWIRE_TLS_CA": "no.pem", "GRADWIRE_TLS_CERT": "m1.pem", "GRADWIRE_TLS_KEY": "m1.key"}
    with pytest.raises(ConfigError, match=r"cannot read .*/no.pem \(GRADWIRE_TLS_CA\): No such file"):
        Credentials.from_environ({name: f"{where}/{file}" for name, file in names.items()})


@pytest.mark.parametrize("path", [None, "", 3, b"ca.pem", "a\0b"])
def test_credentials_of_something_that_is_no_path_raise(where: Path, path: Any) -> None:
    with pytest.raises(ConfigError, match=r"the argument ca is .* not the path of a file"):
        Credentials(path, where / "m1.pem", where / "m1.key")


def test_credentials_are_compared_shown_and_pickled_by_their_paths(where: Path) -> None:
    credentials = load(where)
    copy = pickle.loads(pickle.dumps(credentials))
    assert (copy == credentials, hash(copy), copy.member) == (True, hash(credentials), "m1")
    assert repr(copy) == f"Credentials('{where}/ca.pem', '{where}/m1.pem', '{where}/m1.key')"
    assert (copy.ca, copy.cert, copy.key) == (where / "ca.pem", where / "m1.pem", where / "m1.key")
    assert copy != Credentials(where / "ca.pem", where / "m0.pem", where / "m0.key")


def as_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize("name", ["ca.pem", "m1.pem", "m1.key"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file: file.unlink(), r"cannot read .*{name}: No such file or directory"),
        (as_directory, "{name}( is not a regular file|: Is a directory)"),
        (as_pipe, "{name} is not a regular file"),
        (lambda file: file.write_bytes(b""), "{name} contains no readable (certificate|key)"),
        (lambda file: file.write_bytes(os.urandom(500)), "{name} contains no readable (certificate|key)"),
        (lambda file: file.write_bytes(file.read_bytes()[:100]), "{name} contains no readable (certificate|key)"),
        (lambda file: file.write_bytes(bytes(2 << 20)), r"{name} is too large"),
    ],
    ids=["missing", "directory", "pipe", "empty", "random", "cut", "huge"],
)
def test_file_that_cannot_be_used_is_named_in_the_error(
    where: Path, name: str, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(where / name)
    with pytest.raises(ConfigError, match=said.format(name=name)):
        load(where)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["ca.pem", "m1.pem", "m1.key"])
def test_file_without_read_permission_is_named_in_the_error(where: Path, name: str) -> None:
    (where / name).chmod(0)
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}: Permission denied"):
        load(where)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o620])
def test_key_open_to_other_users_is_refused(where: Path, mode: int) -> None:
    (where / "m1.key").chmod(mode)
    with pytest.raises(ConfigError, match=rf"other users can access the key .*m1.key \(mode {mode:o}\): chmod 600 it"):
        load(where)
    (where / "m1.key").chmod(0o400)
    load(where)


def test_key_of_another_certificate_is_refused(where: Path) -> None:
    with pytest.raises(ConfigError, match=r"m0.key is not the key of the certificate .*m1.pem"):
        Credentials(where / "ca.pem", where / "m1.pem", where / "m0.key")


def test_files_in_the_wrong_roles_are_refused(where: Path) -> None:
    with pytest.raises(ConfigError, match=r"m1.pem contains no readable key"):
        certificates.write(where / "m1.pem", (where / "m1.pem").read_bytes(), 0o600)
        Credentials(where / "ca.pem", where / "m1.pem", where / "m1.pem")
    with pytest.raises(ConfigError, match=r"m1.key contains no readable certificate"):
        Credentials(where / "ca.pem", where / "m1.key", where / "m1.key")


def test_encrypted_key_is_refused_without_asking_for_a_password(where: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((where / "m1.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"x"),
    )
    (where / "m1.key").write_bytes(locked)
    with pytest.raises(ConfigError, match=r"the key .*m1.key is encrypted"):
        load(where)


def test_certificate_of_another_authority_is_refused(where: Path, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other", "tests", ["m1"])
    with pytest.raises(
        ConfigError, match=r"m1.pem is not signed by the authority in .*ca.pem: other members would refuse it"
    ):
        Credentials(where / "ca.pem", tmp_path / "other" / "m1.pem", tmp_path / "other" / "m1.key")


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [(-2, -1, "expired on 20"), (1, 2, "is not valid before 20.*: check this machine's clock")],
)
def test_certificate_expired_or_not_yet_valid_is_refused(where: Path, begin: int, end: int, said: str) -> None:
    now = datetime.now(UTC)
    issue(where, "m1", begin=now + timedelta(days=begin), end=now + timedelta(days=end))
    with pytest.raises(ConfigError, match=f"the certificate .*m1.pem {said}"):
        load(where)


def test_certificate_without_a_member_name_is_refused(where: Path) -> None:
    shutil.copy(where / "ca.pem", where / "m1.pem")
    shutil.copy(where / "ca.key", where / "m1.key")
    with pytest.raises(ConfigError, match=r"m1.pem cannot be used: a certificate has one name of the form gradwire://"):
        load(where)


# -- members that a certificate covers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "id", "does"),
    [
        ("a", "a", True),
        ("a", "a/0", True),
        ("a/0", "a/0", True),
        ("a/0", "a", False),
        ("a", "ab", False),
        ("a", "b", False),
        ("a", "", False),
        ("a", "/", False),
        ("a", "A", False),
    ],
)
def test_covers_own_member_and_those_below_it(member: str, id: str, does: bool) -> None:
    assert covers(f"gradwire://job/{member}", id) is does


@pytest.mark.parametrize(
    "uri",
    ["", "gradwire://", "gradwire://job", "gradwire://job/", "gradwire:///a", "http://job/a", "gradwire://job/a//b"],
)
def test_parse_malformed_identity_raises_value_error(uri: str) -> None:
    with pytest.raises(ValueError, match="is not of the form gradwire://JOB/MEMBER"):
        parse(uri)


def test_refusal_depends_on_job_and_member(where: Path) -> None:
    credentials = load(where)
    assert credentials.refusal("gradwire://tests/m7", "m7/3") is None
    assert credentials.refusal("gradwire://tests/m7", "m1") == (
        "its certificate is for m7, which does not cover member m1"
    )
    assert credentials.refusal("gradwire://other/m1", "m1") == (
        "its certificate is for job other, and this is job tests"
    )


# -- changes ----------------------------------------------------------------------------------------------------------


def test_changed_files_are_read_again_and_unchanged_files_are_not(where: Path) -> None:
    credentials = load(where)
    context = credentials.server_context()
    assert credentials.server_context() is context
    issue(where, "m1")
    renewed = credentials.server_context()
    assert renewed is not context
    assert credentials.server_context() is renewed


def test_files_that_break_while_in_use_leave_the_loaded_ones_in_use(where: Path, captured: CapturedLog) -> None:
    credentials = load(where)
    context = credentials.client_context()
    (where / "m1.pem").unlink()
    for _ in range(3):
        assert credentials.client_context() is context
    assert len(captured.lines) == 1
    captured.wait_for(
        r"cannot read the certificate .*m1.pem: No such file.*; the certificates that were read before stay in use"
    )
    issue(where, "m1")
    assert credentials.client_context() is not context


def test_authority_can_be_changed_in_two_steps(where: Path, tmp_path: Path) -> None:
    """First all members trust both authorities, then all present certificates of the new one."""
    credentials = load(where)
    certificates.make(tmp_path / "new", "tests", ["m1"])
    both = (where / "ca.pem").read_bytes() + (tmp_path / "new" / "ca.pem").read_bytes()
    certificates.write(where / "ca.pem", both, 0o644)
    assert len(credentials.client_context().get_ca_certs()) == 2
    for name in ("m1.key", "m1.pem"):
        shutil.copy(tmp_path / "new" / name, where / name)
    certificates.write(where / "ca.pem", (tmp_path / "new" / "ca.pem").read_bytes(), 0o644)
    assert len(credentials.client_context().get_ca_certs()) == 1


def test_explain_turns_openssl_errors_into_sentences() -> None:
    error = ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca")
    error.reason = "TLSV1_ALERT_UNKNOWN_CA"
    assert explain(error) == "it does not accept this side: another authority signed this certificate"
    error.reason = "SSLV3_ALERT_CERTIFICATE_EXPIRED"
    assert explain(error) == "it does not accept this side: certificate expired"
    error.reason = "NO_SHARED_CIPHER"
    assert explain(error) == "TLS failed: no shared cipher"
