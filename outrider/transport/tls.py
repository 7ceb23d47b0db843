"""TLS of gRPC servers and channels: between users and coordinators, and between services.

If the files of a server change, new connections use the new contents. A channel uses the contents
that the files had when its `Trust` was made.

Services of a deployment identify each other by role. Each role has a certificate:

    DIR/ca.pem, ca-key.pem              the authority that all roles trust, and its key
    DIR/<role>.pem, <role>-key.pem      certificate and key of all replicas of a role

A replica's address is unknown when its certificate is made. So the certificate has the DNS name
`<role>.outrider.internal`. A caller checks that a server's certificate has the name of the expected
role. A server checks that a caller's certificate has the name of a role that may call it.

Import this module only if TLS is used, because the import of `cryptography` is slow."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.errors import ConfigError, PermissionDenied
from outrider.foundation.files import FileWatch, read_file, write_whole
from outrider.registry.registry import Role
from outrider.transport.channel import Trust

if TYPE_CHECKING:
    from outrider.transport.server import Context, Guard

_log = logging.getLogger(__name__)
_Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

AUTHORITY = "ca"
DOMAIN = "outrider.internal"
AUTHORITY_DAYS = 3650
ROLE_DAYS = 397
_BACKDATED = datetime.timedelta(hours=1)  # validity begins before creation, because clocks differ
WARNED_DAYS = 30  # a service logs a warning if its certificate expires within this number of days


class RoleFiles(NamedTuple):
    """The files of an authority's certificate, and of a role's certificate and key."""

    authority: Path
    certificate: Path
    key: Path

    @staticmethod
    def of(directory: Path, role: Role) -> RoleFiles:
        """Returns the files in `directory`, under the names that `outrider certs` gives them."""
        names = AUTHORITY, role, f"{role}-key"
        return RoleFiles(*(directory / f"{name}.pem" for name in names))

    def checked(self) -> RoleFiles:
        """Returns these files. Raises `ConfigError` if a file is missing or invalid, if the files
        do not belong together, or if the certificate has expired."""
        check_pair(self.certificate, self.key)
        check_authority(self.authority, self.certificate)
        return self


def name_of(role: str) -> str:
    return f"{role}.{DOMAIN}"


def make_authority(directory: Path, now: datetime.datetime) -> None:
    """Makes the key and certificate of a new authority. Only its owner can read the key file."""
    _make(directory, AUTHORITY, now, AUTHORITY_DAYS)


def make_role(directory: Path, role: Role, now: datetime.datetime, days: int = ROLE_DAYS) -> None:
    """Makes a new key and certificate of a role, signed by the authority in the directory. Raises
    `ConfigError` if the authority's files are unusable, or the authority expires within a day."""
    files = RoleFiles.of(directory, role)
    authority = read_certificates(files.authority)[0]
    signer = _read_key(directory / f"{AUTHORITY}-key.pem")
    if signer.public_key() != authority.public_key():
        raise ConfigError(f"{files.authority}: does not belong to the key in the same directory")
    end = authority.not_valid_after_utc
    if now + datetime.timedelta(days=1) > end:
        raise ConfigError(f"{files.authority}: expires {end:%Y-%m-%d}; make a new one with --force")
    _make(directory, role, now, min(days, (end - now).days), authority.subject, signer)


def days_left(path: Path, now: datetime.datetime) -> int:
    """Returns the number of whole days until a certificate expires; negative if it has expired."""
    return (read_certificates(path)[0].not_valid_after_utc - now).days


def read_certificates(path: Path) -> Sequence[x509.Certificate]:
    """Returns the certificates in a file. If there are none, raises `ConfigError`."""
    try:
        certificates = x509.load_pem_x509_certificates(read_file(path))
    except ValueError:
        certificates = []
    if not certificates:
        raise ConfigError(f"{path}: holds no certificate in PEM")
    return certificates


def check_pair(certificate: Path, key: Path) -> None:
    """Raises `ConfigError` if `key` does not fit `certificate`, or `certificate` has expired."""
    parsed = read_certificates(certificate)[0]
    if _read_key(key).public_key() != parsed.public_key():
        raise ConfigError(f"{key}: is not the key of {certificate}")
    end = parsed.not_valid_after_utc
    if end < datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{certificate}: expired {end:%Y-%m-%d %H:%M} UTC; make a new one")


def check_authority(authority: Path, certificate: Path) -> None:
    """Raises `ConfigError` if no authority in the file `authority` has signed the certificate."""
    parsed = read_certificates(certificate)[0]
    for signer in read_certificates(authority):
        with suppress(ValueError, TypeError, InvalidSignature):
            parsed.verify_directly_issued_by(signer)
            return
    raise ConfigError(f"{certificate}: is not signed by an authority of {authority}")


def _read_key(path: Path) -> _Key:
    """Reads a private key. The text of a `ConfigError` never quotes the file."""
    try:
        private_key = serialization.load_pem_private_key(read_file(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: holds no unencrypted private key in PEM") from None
    if not isinstance(private_key, (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey)):
        raise ConfigError(f"{path}: holds a key that is neither RSA nor elliptic-curve")
    return private_key


def _make(
    directory: Path,
    name: str,
    now: datetime.datetime,
    days: int,
    issuer: x509.Name | None = None,
    signer: _Key | None = None,
) -> None:
    """Makes a key and a certificate. The certificate of a role is signed with `signer`, the key of
    the `issuer`. Without an `issuer`, makes a self-signed certificate of an authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Outrider {name}")])
    is_ca = issuer is None
    extensions: list[x509.ExtensionType] = [
        x509.BasicConstraints(is_ca, 0 if is_ca else None),
        x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
    ]
    if signer is not None:
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        extensions += [
            x509.ExtendedKeyUsage(purposes),
            x509.SubjectAlternativeName([x509.DNSName(name_of(name))]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
        ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    for extension in extensions:
        is_critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, is_critical)
    certificate = builder.sign(signer or key, hashes.SHA256())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    # The key is written first, so that a new certificate never lacks its key.
    write_whole(directory / f"{name}-key.pem", private.decode(), 0o600)
    write_whole(directory / f"{name}.pem", certificate.public_bytes(pem).decode(), 0o644)


def server_credentials(
    certificate: Path, key: Path, authority: Path | None = None
) -> grpc.ServerCredentials:
    """Credentials of a server. In the file `certificate`, intermediate certificates may follow the
    server's certificate. With `authority`, each caller needs a certificate that this authority has
    signed. Raises `ConfigError` for missing or invalid files."""

    def read() -> grpc.ServerCertificateConfiguration:
        check_pair(certificate, key)
        root = None if authority is None else _authorities(authority)
        return grpc.ssl_server_certificate_configuration(
            [(read_file(key), read_file(certificate))], root_certificates=root
        )

    watch = FileWatch([certificate, key, authority], read)
    return grpc.dynamic_ssl_server_credentials(
        watch.current(), watch.current, require_client_authentication=authority is not None
    )


def caller_trust(
    authority: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    server_name: str = "",
) -> Trust:
    """TLS of a user's channel. `authority` must have signed the server's certificate; None = gRPC's
    own list of authorities. The channel shows `certificate` to servers that ask for a certificate.
    Raises `ConfigError` for missing or invalid files."""
    if (certificate is None) != (key is None):
        raise ConfigError("a certificate goes with its key; give both, or none")
    chain = private = None
    if certificate is not None and key is not None:
        check_pair(certificate, key)
        chain, private = read_file(certificate), read_file(key)
    root = None if authority is None else _authorities(authority)
    return Trust(grpc.ssl_channel_credentials(root, private, chain), server_name)


def pinned_trust(server: Path, certificate: Path | None = None, key: Path | None = None) -> Trust:
    """Like `caller_trust`, but accepts only a server with the certificate in the file `server`.
    Raises `ConfigError` if the certificate has neither a DNS name nor an IP address."""
    names: list[str] = []
    for extension in read_certificates(server)[0].extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            names = extension.value.get_values_for_type(x509.DNSName)
            names += map(str, extension.value.get_values_for_type(x509.IPAddress))
    if not names:
        raise ConfigError(f"{server}: names no host; it needs a subject alternative name")
    # In a name with a wildcard, any first label is valid, so `outrider` replaces the wildcard.
    return caller_trust(server, certificate, key, names[0].replace("*", "outrider", 1))


def internal_server_credentials(directory: Path, role: Role) -> grpc.ServerCredentials:
    """Credentials of a service with `role`, for calls by the deployment's other services. Raises
    `ConfigError` for missing or invalid files."""
    files = _own_files(directory, role)
    return server_credentials(files.certificate, files.key, files.authority)


def internal_trust(directory: Path, role: Role, peer: Role) -> Trust:
    """TLS of a channel from a service with the role `role` to a service with the role `peer`.
    Raises `ConfigError` for missing or invalid files."""
    files = _own_files(directory, role)
    return caller_trust(*files, name_of(peer))


def role_guard(*roles: Role) -> Guard:
    """Makes a guard that admits callers whose verified certificates name one of `roles`."""
    names = frozenset(name_of(role).encode() for role in roles)

    def check_role(method: str, context: Context) -> str:
        names_in_certificate = context.auth_context().get("x509_subject_alternative_name", ())
        if not names.intersection(names_in_certificate):
            names_or_none = (
                ", ".join(name.decode(errors="replace") for name in names_in_certificate)
                or "no name"
            )
            raise PermissionDenied(f"{names_or_none}: may not call {method}")
        return ""

    return check_role


def _own_files(directory: Path, role: Role) -> RoleFiles:
    files = RoleFiles.of(directory, role).checked()
    left = days_left(files.certificate, datetime.datetime.now(datetime.UTC))
    if left < WARNED_DAYS:
        _log.warning("%s expires in %d days; renew with `outrider certs`", files.certificate, left)
    return files


def _authorities(path: Path) -> bytes:
    read_certificates(path)
    return read_file(path)
