"""Creates a certificate authority and certificates for the members of a job, and reads certificates.

    ca.pem ca.key          the authority: ca.pem goes to every machine, ca.key stays where certificates are created
    NAME.pem NAME.key      a member's certificate and key, only for that member's machine

Keys are P-256, which makes handshakes cheap. A file is written under another name and then renamed, so a reader never
sees an incomplete one and a running job can load renewed files. Keys have mode 0600 from the moment of their creation.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import ConfigError
from gradwire.security.certificate_names import Identity, is_name, single_identity

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DAYS = 365
AUTHORITY_DAYS = 3650
CLOCK_TOLERANCE = timedelta(minutes=10)  # a new certificate is valid on machines whose clocks are this much behind


class Authority:
    """Signs certificates. It is stored in a directory as ca.pem and ca.key."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def new(cls) -> Authority:
        """Create a new, self-signed authority."""
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        key = _new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"gradwire CA {secrets.token_hex(4)}")])
        now = datetime.now(UTC)
        builder = _builder(name, name, key.public_key(), now - CLOCK_TOLERANCE, now + timedelta(days=AUTHORITY_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        return cls(_signed(builder, key, key), key)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        """Load the authority in a directory. Raise `ConfigError` if it cannot be read."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
            key = load_pem_private_key((directory / "ca.key").read_bytes(), None)
        except OSError as error:
            raise ConfigError(f"cannot read the certificate authority {error.filename}: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the certificate authority in {directory} is damaged or encrypted: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{directory / 'ca.key'} is not the key of {directory / 'ca.pem'}")
        if (end := certificate.not_valid_after_utc) <= datetime.now(UTC):
            raise ConfigError(f"the certificate authority in {directory} expired on {end:%Y-%m-%d}: create a new one")
        return cls(certificate, key)

    def store(self, directory: Path) -> None:
        write(directory / "ca.key", _key_pem(self._key), 0o600)
        write(directory / "ca.pem", _pem(self.certificate), 0o644)

    def issue(
        self, identity: Identity, *, serves: bool = False, begin: datetime | None = None, end: datetime | None = None
    ) -> tuple[bytes, bytes]:
        """Return a new certificate and its key, as PEM. With `serves`, its holder may also be the job's coordinator."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        key = _new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.member[:64])])
        now = datetime.now(UTC)
        builder = _builder(
            name,
            self.certificate.subject,
            key.public_key(),
            begin or now - CLOCK_TOLERANCE,
            end or now + timedelta(days=DAYS),
        )
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity))]
        if serves:
            names.append(x509.DNSName(coordinator_name(identity.job)))
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return _pem(_signed(builder, key, self._key)), _key_pem(key)


def coordinator_name(job: str) -> str:
    """Return the DNS name in the certificates of members that may be a job's coordinator. It is never resolved.

    >>> coordinator_name("digits")
    'digits.coordinator.gradwire'
    """
    return f"{job}.coordinator.gradwire"


def make(
    directory: Path, job: str, members: Sequence[str], coordinators: Sequence[str] = (), *, days: float = DAYS
) -> list[Path]:
    """Write a certificate and a key for each member, and return the paths of the written certificates.

    The authority in the directory signs them; if there is none, a new one is created. `coordinators` are names, of
    members or of others, that may also be the job's coordinator. If none is given, members keep the right that their
    existing certificates give them; if no certificate of the job gives it, the first member gets it. Existing
    certificates of the job are renewed.
    """
    names = list(dict.fromkeys((*members, *coordinators)))
    _check_names(job, names)
    if not 0 < days <= AUTHORITY_DAYS:
        raise ConfigError(f"certificates are valid for more than 0 and at most {AUTHORITY_DAYS} days, not {days:g}")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        serving = _existing_coordinators(directory, job, names)
        serving = list(coordinators) or serving or names[:1]
        written = []
        if (directory / "ca.pem").exists() or (directory / "ca.key").exists():
            authority = Authority.load(directory)
        else:
            authority = Authority.new()
            authority.store(directory)
            written.append(directory / "ca.pem")
        end = min(datetime.now(UTC) + timedelta(days=days), authority.certificate.not_valid_after_utc)
        for name in names:
            certificate, key = authority.issue(Identity(job, name), serves=name in serving, end=end)
            write(directory / f"{name}.key", key, 0o600)
            write(directory / f"{name}.pem", certificate, 0o644)
            written.append(directory / f"{name}.pem")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or directory}: {error.strerror}") from error
    return written


def _check_names(job: str, names: Sequence[str]) -> None:
    for name in (job, *names):
        if not is_name(name):
            raise ConfigError(
                f"{name!r} is not a valid name: use at most 63 letters, digits, '.', '_' and '-', "
                "beginning with a letter or digit"
            )
    if "ca" in names:
        raise ConfigError("no member can be called 'ca': that is the name of the authority's file")
    if not names:
        raise ConfigError("no certificate was requested: name at least one member")


def _existing_coordinators(directory: Path, job: str, names: Sequence[str]) -> list[str]:
    """Return the members that may be the job's coordinator according to the certificates in the directory.

    Raise `ConfigError` if one of `names` already has a certificate there that is for another job.
    """
    from cryptography import x509

    serving = []
    for path in sorted(directory.glob("*.pem")):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            identity = identity_in(certificate)
        except ValueError:
            continue  # the authority's certificate, or one that is not gradwire's
        if identity.job == job and coordinator_name(job) in _alternatives(certificate, x509.DNSName):
            serving.append(identity.member)
        if identity.job != job and path.stem in names:
            raise ConfigError(f"{path} is for job {identity.job}: use another directory for this job's certificates")
    return serving


def identity_of(der: bytes) -> Identity:
    """Return the identity in a certificate. Raise ValueError if it names no member of a gradwire job."""
    return identity_in(_parsed(der))


def may_coordinate(der: bytes, job: str) -> bool:
    """Return whether the holder of a certificate may be a job's coordinator."""
    from cryptography import x509

    return coordinator_name(job) in _alternatives(_parsed(der), x509.DNSName)


def identity_in(certificate: x509.Certificate) -> Identity:
    from cryptography import x509

    return single_identity(_alternatives(certificate, x509.UniformResourceIdentifier))


def _parsed(der: bytes) -> x509.Certificate:
    from cryptography import x509

    try:
        return x509.load_der_x509_certificate(der)
    except x509.InvalidVersion as error:
        raise ValueError(str(error)) from error


def _alternatives(certificate: x509.Certificate, kind: type[x509.GeneralName]) -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(f"the certificate cannot be read: {error}") from error
    return [str(name.value) for name in names if isinstance(name, kind)]


def write(path: Path, content: bytes, mode: int) -> None:
    """Write a file under another name, then rename it to `path`, so that readers see the old or the new content."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, issuer: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    return builder.add_extension(of_issuer, critical=False).sign(issuer, hashes.SHA256())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
