"""Certificates of a deployment's own services, which name the role of their holder.

    DIR/ca.pem, ca-key.pem              the authority that all of them trust; its key makes others
    DIR/<role>.pem, <role>-key.pem      a role's certificate and key, for all replicas of it

A replica's address is not known when its certificate is made, so none is in it: a role is, as the
DNS name `<role>.outrider.internal`. A caller checks it in place of the address, and a server looks
for it in the caller's certificate.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.errors import ConfigError
from outrider.files import write_whole
from outrider.limits import PEM_BYTES_MAX

InternalRole = Literal["coordinator", "target", "draft"]
INTERNAL_ROLES: Final[tuple[InternalRole, ...]] = ("coordinator", "target", "draft")
AUTHORITY: Final = "ca"
DOMAIN: Final = "outrider.internal"
AUTHORITY_DAYS: Final = 3650
ROLE_DAYS: Final = 397
_BACKDATED: Final = datetime.timedelta(hours=1)
"""Clocks of machines differ."""


@dataclass(frozen=True, slots=True)
class RoleFiles:
    """What a service of one role is given: the authority, its certificate and its key."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def of(cls, directory: Path, role: InternalRole) -> RoleFiles:
        """As `outrider certs` names them."""
        return cls(
            directory / f"{AUTHORITY}.pem", directory / f"{role}.pem", directory / f"{role}-key.pem"
        )

    def check(self) -> None:
        """Raises `ConfigError` for a file that is not there, is none, or does not fit the others,
        and for a certificate whose time is over."""
        check_pair(self.certificate, self.key)
        check_authority(self.authority, self.certificate)


def name_of(role: InternalRole) -> str:
    """The DNS name that the certificates of a role have."""
    return f"{role}.{DOMAIN}"


def make_authority(directory: Path, now: datetime.datetime) -> None:
    """A new authority, whose key is for its owner only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Outrider internal authority")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(name, name, key, now, AUTHORITY_DAYS).add_extension(identifier, False)
    _write(directory, AUTHORITY, builder.sign(key, hashes.SHA256()), key)


def make_role(
    directory: Path, role: InternalRole, now: datetime.datetime, days: int = ROLE_DAYS
) -> None:
    """A new key and certificate of a role, by the authority in the directory. Raises `ConfigError`
    where that cannot make one."""
    files = RoleFiles.of(directory, role)
    authority = read_certificates(files.authority)[0]
    signer = _read_key(directory / f"{AUTHORITY}-key.pem")
    if signer.public_key() != authority.public_key():
        raise ConfigError(f"{files.authority}: is not of the key beside it")
    end = authority.not_valid_after_utc
    if now + datetime.timedelta(days=1) > end:
        raise ConfigError(f"{files.authority}: ends {end:%Y-%m-%d}; make another one with --force")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Outrider {role}")])
    builder = _builder(subject, authority.subject, key, now, min(days, (end - now).days))
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    for extension in (
        x509.ExtendedKeyUsage(both),
        x509.SubjectAlternativeName([x509.DNSName(name_of(role))]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    ):
        builder = builder.add_extension(extension, False)
    _write(directory, role, builder.sign(signer, hashes.SHA256()), key)


def days_left(path: Path, now: datetime.datetime) -> int:
    """Whole days until a certificate ends; negative where that is over."""
    return (read_certificates(path)[0].not_valid_after_utc - now).days


def read_certificates(path: Path) -> Sequence[x509.Certificate]:
    """Those in a file, of which there is one at least. Raises `ConfigError`."""
    try:
        found = x509.load_pem_x509_certificates(read_pem(path))
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{path}: holds no certificate in PEM")
    return found


def certificate_names(path: Path) -> list[str]:
    """The hosts that a certificate is for, names before addresses. Raises `ConfigError`."""
    try:
        found = read_certificates(path)[0].extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return []
    names = found.value.get_values_for_type(x509.DNSName)
    return [*names, *map(str, found.value.get_values_for_type(x509.IPAddress))]


def check_pair(certificate: Path, key: Path) -> None:
    """Raises `ConfigError` unless a key is that of a certificate, whose time is not over."""
    found = read_certificates(certificate)[0]
    if _read_key(key).public_key() != found.public_key():
        raise ConfigError(f"{key}: is not the key of {certificate}")
    end = found.not_valid_after_utc
    if end < datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{certificate}: ended {end:%Y-%m-%d %H:%M} UTC; make a new one")


def check_authority(authority: Path, certificate: Path) -> None:
    """Raises `ConfigError` unless one of the authorities in a file has signed a certificate."""
    found = read_certificates(certificate)[0]
    for one in read_certificates(authority):
        with suppress(ValueError, TypeError, InvalidSignature):
            found.verify_directly_issued_by(one)
            return
    raise ConfigError(f"{certificate}: is not by an authority of {authority}")


def read_pem(path: Path) -> bytes:
    """The bytes of a file. Raises `ConfigError`, also for one that is far too large."""
    try:
        with path.open("rb") as file:
            data = file.read(PEM_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > PEM_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {PEM_BYTES_MAX} bytes")
    return data


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey:
    """Raises `ConfigError`; nothing of the file is in it."""
    try:
        found = serialization.load_pem_private_key(read_pem(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: holds no private key in PEM that needs no password") from None
    if not isinstance(found, (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey)):
        raise ConfigError(f"{path}: holds a key of a kind that TLS here does not take")
    return found


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    days: int,
) -> x509.CertificateBuilder:
    """Of an authority that issues itself, or of what it issues."""
    is_ca, builder = subject == issuer, x509.CertificateBuilder()
    usage = x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False)
    return (
        builder.subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _write(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """The key first, so that a new certificate always has its key."""
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    write_whole(directory / f"{name}-key.pem", private.decode(), 0o600)
    write_whole(directory / f"{name}.pem", certificate.public_bytes(pem).decode(), 0o644)
