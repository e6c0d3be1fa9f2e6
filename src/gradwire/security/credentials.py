"""Makes TLS contexts from three files: the authority's certificate, this process's certificate, and its key.

Both sides of every connection must present a certificate of that authority. Host names are not checked. The identity in
the certificate (see certificate_names.py) must cover the member that the peer claims to be.

Changed files are read again before the next handshake. While the files do not fit together, for example in the middle
of a renewal, the contents that were read before stay in use.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.errors import ConfigError
from gradwire.security import certificates
from gradwire.security.certificate_names import Identity, covers, parse, single_identity

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["CA", "CERT", "KEY", "Credentials", "covers", "explain", "identity_of"]

log = logging.getLogger("gradwire.security")

CA, CERT, KEY = "GRADWIRE_TLS_CA", "GRADWIRE_TLS_CERT", "GRADWIRE_TLS_KEY"
LONGEST_FILE = 1 << 20
LONGEST_CHAIN = 8
# OpenSSL's X509_V_ERR_…: 18 and 19, self-signed leaf or chain; 20 and 21, no issuer found for the chain or the leaf.
_UNKNOWN_ISSUER = (18, 19, 20, 21)
# For TLS 1.2: only ciphers with forward secrecy and authenticated encryption. All ciphers of TLS 1.3 have both.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The contents of the three files when they were last read."""

    versions: tuple[object, ...]
    ca: bytes
    cert: bytes
    key: bytes
    identity: Identity
    server: ssl.SSLContext
    client: ssl.SSLContext
    http2_server: ssl.SSLContext
    http2_client: ssl.SSLContext


class Credentials:
    """The certificate that this process presents, and the authority that it trusts: three files in PEM format.

    `gradwire certs` makes the files. If one of them cannot be used, `ConfigError` names it and the reason. Renewed
    files are read again. Accepted by `JobConfig(tls=...)` and `WorkerNode(tls=...)`.

        gw.init(config=gw.JobConfig(tls=gw.Credentials("ca.pem", "host-a.pem", "host-a.key")))
    """

    def __init__(
        self,
        ca: str | os.PathLike[str],
        cert: str | os.PathLike[str],
        key: str | os.PathLike[str],
        *,
        names: tuple[str, ...] = (),
    ) -> None:
        """`names` are what the three paths came from, for error messages; empty: the arguments of this call."""
        self._ca, self._cert, self._key = (
            _path(name, path) for name, path in (("ca", ca), ("cert", cert), ("key", key))
        )
        self._names = names
        self._lock = threading.Lock()
        self._failed: tuple[object, ...] = ()  # the last versions of the files that could not be used
        self._loaded = self._load(self._file_versions())

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Credentials | None:
        """Load the files that `GRADWIRE_TLS_CA`, `_CERT` and `_KEY` name. Return None if none of them is set."""
        return cls.from_paths(*(environ.get(name) for name in (CA, CERT, KEY)))

    @classmethod
    def from_paths(
        cls,
        ca: str | os.PathLike[str] | None,
        cert: str | os.PathLike[str] | None,
        key: str | os.PathLike[str] | None,
    ) -> Credentials | None:
        """Load three files that variables or options of the command line name. Return None if none of them is set."""
        paths = {CA: ca, CERT: cert, KEY: key}
        if not any(paths.values()):
            return None
        if missing := [name for name, path in paths.items() if not path]:
            raise ConfigError(f"TLS needs three files: {' and '.join(missing)} must be set too")
        return cls(*(path for path in paths.values() if path), names=tuple(paths))

    @property
    def ca(self) -> Path:
        """The file with the certificate of the authority."""
        return self._ca

    @property
    def cert(self) -> Path:
        """The file with the certificate of this process."""
        return self._cert

    @property
    def key(self) -> Path:
        """The file with the key of this process's certificate."""
        return self._key

    def __repr__(self) -> str:
        return f"Credentials({str(self._ca)!r}, {str(self._cert)!r}, {str(self._key)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Credentials) and self._paths() == other._paths()

    def __hash__(self) -> int:
        return hash(self._paths())

    def __reduce__(self) -> tuple[type[Credentials], tuple[Path, Path, Path]]:
        return Credentials, self._paths()  # a copy in another process reads the files there

    def _paths(self) -> tuple[Path, Path, Path]:
        return self._ca, self._cert, self._key

    @property
    def identity(self) -> str:
        """The identity in this process's certificate, as a URI."""
        return str(self._fresh().identity)

    @property
    def job(self) -> str:
        """The job that this process's certificate is for."""
        return self._fresh().identity.job

    @property
    def member(self) -> str:
        """The member that this process's certificate names. It covers the members below that one too."""
        return self._fresh().identity.member

    def refusal(self, identity: str, member_id: str) -> str | None:
        """Return why the holder of a certificate of this identity cannot be this member; None if it can."""
        job = parse(identity).job
        if job != self.job:
            return f"its certificate is for job {job}, and this is job {self.job}"
        if not covers(identity, member_id):
            return f"its certificate is for {parse(identity).member}, which does not cover member {member_id}"
        return None

    def server_context(self) -> ssl.SSLContext:
        """Return a TLS context for accepting connections, from the files as they are now."""
        return self._fresh().server

    def client_context(self) -> ssl.SSLContext:
        """Return a TLS context for making connections, from the files as they are now."""
        return self._fresh().client

    def http2_server_context(self) -> ssl.SSLContext:
        """Return the context of a server of HTTP/2, which TLS negotiates as the protocol inside."""
        return self._fresh().http2_server

    def http2_client_context(self) -> ssl.SSLContext:
        """Return the context of a client of HTTP/2."""
        return self._fresh().http2_client

    # -- gRPC ---------------------------------------------------------------------------------------------------------

    def grpc_server(self) -> Any:
        """Return credentials for `server.add_secure_port`.

        Callers must present a certificate. Renewed files take effect with the next connection.
        """
        import grpc

        configured: _Loaded | None = None

        def configuration() -> Any:
            nonlocal configured
            loaded = self._fresh()
            if loaded is configured:
                return None  # tells gRPC that nothing has changed
            configured = loaded
            return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)

        return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)

    def grpc_channel(self) -> Any:
        """Return credentials for `grpc.secure_channel`, which needs `grpc_options` too."""
        import grpc

        loaded = self._fresh()
        return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)

    def grpc_options(self) -> list[tuple[str, str]]:
        """Return channel options that check the server's certificate for the coordinator's name, not the host's."""
        return [("grpc.ssl_target_name_override", certificates.coordinator_name(self.job))]

    def probe_context(self) -> ssl.SSLContext:
        """Return a context to connect to a gRPC server without gRPC, from the files as they are now.

        Raise `ConfigError` if the files cannot be used.
        """
        context = self._load(self._file_versions()).client
        context.set_alpn_protocols(["h2"])
        return context

    @staticmethod
    def names_of(auth_context: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the identity in a gRPC caller's certificate (`context.auth_context()`), or an empty tuple."""
        names = auth_context.get("x509_subject_alternative_name", ())
        try:
            return (str(single_identity(name.decode() for name in names)),)
        except ValueError:
            return ()

    def caller_refusal(self, auth_context: Mapping[str, Any], member_id: str) -> str | None:
        """Return why a gRPC caller's certificate does not cover this member; None if it does."""
        for identity in self.names_of(auth_context):
            return self.refusal(identity, member_id)
        return "its certificate is for no member of a gradwire job"

    # -- the files ----------------------------------------------------------------------------------------------------

    def _fresh(self) -> _Loaded:
        with self._lock:
            versions = self._file_versions()
            if versions not in (self._loaded.versions, self._failed):
                try:
                    self._loaded = self._load(versions)
                    log.info("the certificate files have changed and were read again: %s", self._loaded.identity)
                except ConfigError as error:
                    self._failed = versions
                    log.warning("%s; the certificates that were read before stay in use", error)
            return self._loaded

    def _file_versions(self) -> tuple[object, ...]:
        return tuple(map(_version, self._paths()))

    def _load(self, versions: tuple[object, ...]) -> _Loaded:
        ca_name, cert_name, key_name = (f" ({name})" for name in self._names) if self._names else ("",) * 3
        ca = _read(self._ca, f"the certificate authority {self._ca}{ca_name}")
        cert = _read(self._cert, f"the certificate {self._cert}{cert_name}")
        key = _read(self._key, f"the key {self._key}{key_name}", private=True)
        authorities = _certificates(ca, self._ca)
        chain = _certificates(cert, self._cert)
        _check_key(key, chain[0], self._key, self._cert)
        _check_dates(chain[0], self._cert)
        _check_chain(chain, authorities, self._cert, self._ca)
        try:
            identity = certificates.identity_in(chain[0])
        except ValueError as error:
            raise ConfigError(f"the certificate {self._cert} cannot be used: {error}") from error
        sides = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        contexts = [_context(side, ca, self) for side in (*sides, *sides)]
        for context in contexts[2:]:
            context.set_alpn_protocols(["h2"])
        return _Loaded(versions, ca, cert, key, identity, *contexts)


def identity_of(der: bytes) -> str:
    """Return the identity in a certificate, as a URI. Raise ValueError if it names no member of a gradwire job."""
    return str(certificates.identity_of(der))


def explain(error: ssl.SSLError) -> str:
    """Describe a TLS failure from the view of this side, where "it" is the peer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = "another authority signed it" if error.verify_code in _UNKNOWN_ISSUER else error.verify_message
        return f"its certificate is not accepted: {why}"
    reason = error.reason or str(error)
    _, alert, constant = reason.partition("_ALERT_")
    if alert:
        return f"it does not accept this side: {_readable(constant)}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it presented no certificate"
    return f"TLS failed: {_readable(reason)}"


def _readable(constant: str) -> str:
    """Turn OpenSSL's name of a reason into text, with more detail where the name alone is unclear."""
    known = {
        "UNKNOWN_CA": "another authority signed this certificate",
        "BAD_CERTIFICATE": "the certificate is invalid",
        "UNSUPPORTED_PROTOCOL": "it offers nothing newer than TLS 1.1",
        "PROTOCOL_VERSION": "it requires a newer version of TLS",
    }
    return known.get(constant, constant.replace("_", " ").lower())


def _context(side: ssl._SSLMethod, ca: bytes, files: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no session resumption: every handshake checks the certificate
    try:
        context.load_verify_locations(cadata=ca.decode())
        # Without a password argument, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files._cert, files._key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{files._cert} and {files._key} cannot be used: {error}") from error
    return context


def _version(path: Path) -> object:
    """Return a value that differs when the file has changed."""
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode, status.st_uid


def _path(name: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
        raise ConfigError(f"the argument {name} is {path!r}, which is not the path of a file")
    return Path(path)


def _read(path: Path, what: str, *, private: bool = False) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{what} is not a regular file")
            if private:
                _check_private(status, path)
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what}: {error.strerror}") from error
    if len(content) > LONGEST_FILE:
        raise ConfigError(f"{what} is too large: {status.st_size} bytes, at most {LONGEST_FILE} are allowed")
    return content


def _check_private(status: os.stat_result, path: Path) -> None:
    """Raise `ConfigError` if other users can read a key.

    A key that belongs to root may be readable by its group, because clusters mount secrets like that.
    """
    allowed = 0o640 if status.st_uid == 0 != os.geteuid() else 0o600
    if stat.S_IMODE(status.st_mode) & 0o077 & ~allowed:
        raise ConfigError(
            f"other users can access the key {path} (mode {stat.S_IMODE(status.st_mode):o}): chmod 600 it"
        )


def _certificates(pem: bytes, path: Path) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path} contains no readable certificate (PEM): {error}") from error


def _check_key(pem: bytes, certificate: x509.Certificate, path: Path, of: Path) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        public: object = load_pem_private_key(pem, None).public_key()
        expected: object = certificate.public_key()
    except TypeError as error:
        raise ConfigError(f"the key {path} is encrypted: store it without a password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} contains no readable key (PEM): {error}") from error
    if public != expected:
        raise ConfigError(f"{path} is not the key of the certificate {of}")


def _check_dates(certificate: x509.Certificate, path: Path) -> None:
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise ConfigError(f"the certificate {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if now < certificate.not_valid_before_utc:
        begin = certificate.not_valid_before_utc
        raise ConfigError(
            f"the certificate {path} is not valid before {begin:%Y-%m-%d %H:%M} UTC: check this machine's clock"
        )


def _check_chain(chain: list[x509.Certificate], authorities: list[x509.Certificate], path: Path, ca: Path) -> None:
    """Raise `ConfigError` unless an authority signed the first certificate, directly or through the rest of the chain.

    OpenSSL checks everything else during a handshake.
    """
    current, intermediates = chain[0], chain[1:]
    for _ in range(LONGEST_CHAIN):
        if any(_signed_by(current, authority) for authority in authorities):
            return
        issuers = [candidate for candidate in intermediates if _signed_by(current, candidate)]
        if not issuers:
            break
        current = issuers[0]
    raise ConfigError(f"the certificate {path} is not signed by the authority in {ca}: other members would refuse it")


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
