"""TLS for both ends of gRPC: for users, and between services that know each other by their roles.

Servers read their files again when these change, and use the new contents for connections made
from then on. A channel has what its files held when it was opened.

Reading certificates takes a slow import, made only where there are any.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from outrider.errors import ConfigError, PermissionDenied
from outrider.files import FileWatch
from outrider.transport.channel import Trust

if TYPE_CHECKING:
    from outrider.transport.certificates import InternalRole
    from outrider.transport.server import Context, Guard

_log = logging.getLogger(__name__)

WARNED_DAYS: Final = 30
"""Before a service's certificate ends its log says so, whenever it starts."""


def server_credentials(
    certificate: Path,
    key: Path,
    authority: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> grpc.ServerCredentials:
    """Of a server with this certificate, and those of its authorities in between behind it. With
    an `authority` callers must have certificates by it. Raises `ConfigError`."""
    from outrider.transport.certificates import check_pair, read_pem

    def read() -> Any:
        check_pair(certificate, key)
        root = None if authority is None else _authorities(authority)
        return grpc.ssl_server_certificate_configuration(
            [(read_pem(key), read_pem(certificate))], root_certificates=root
        )

    watch = FileWatch([certificate, key, authority], read, clock)
    return grpc.dynamic_ssl_server_credentials(
        watch.current(), watch.current, require_client_authentication=authority is not None
    )


def caller_trust(
    authority: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    server_name: str = "",
) -> Trust:
    """Of a user: TLS that checks the server by the `authority`, or by those of gRPC where none is
    given. A `certificate` with its `key` is shown to servers that ask for one. Raises
    `ConfigError`."""
    from outrider.transport.certificates import check_pair, read_pem

    if (certificate is None) != (key is None):
        raise ConfigError("a certificate goes with its key; give both, or none")
    chain = private = None
    if certificate is not None and key is not None:
        check_pair(certificate, key)
        chain, private = read_pem(certificate), read_pem(key)
    root = None if authority is None else _authorities(authority)
    return Trust(grpc.ssl_channel_credentials(root, private, chain), server_name)


def pinned_trust(server: Path, certificate: Path | None = None, key: Path | None = None) -> Trust:
    """Of a caller who has the `server`'s own certificate at hand, and takes no other; the rest as
    for `caller_trust`. Raises `ConfigError`."""
    from outrider.transport.certificates import certificate_names

    names = certificate_names(server)
    if not names:
        raise ConfigError(f"{server}: names no host; it needs a subject alternative name")
    # A name with a wildcard stands for any first label.
    name = names[0].replace("*", "outrider", 1)
    return caller_trust(server, certificate, key, server_name=name)


def internal_server_credentials(directory: Path, role: InternalRole) -> grpc.ServerCredentials:
    """Of a service that others of the deployment call. Raises `ConfigError`."""
    from outrider.transport.certificates import RoleFiles

    files = RoleFiles.of(directory, role)
    files.check()
    _warn_of_end(files.certificate)
    return server_credentials(files.certificate, files.key, files.authority)


def internal_trust(directory: Path, role: InternalRole, peer: InternalRole) -> Trust:
    """Of a service that calls one of another role. Raises `ConfigError`."""
    from outrider.transport.certificates import RoleFiles, name_of

    files = RoleFiles.of(directory, role)
    files.check()
    _warn_of_end(files.certificate)
    return caller_trust(files.authority, files.certificate, files.key, name_of(peer))


def role_guard(*roles: InternalRole) -> Guard:
    """Lets in callers whose certificate names one of these roles; that it is one of ours TLS has
    checked."""
    from outrider.transport.certificates import name_of

    names = frozenset(name_of(role).encode() for role in roles)

    def check_role(method: str, context: Context) -> None:
        found = context.auth_context().get("x509_subject_alternative_name", ())
        if not names.intersection(found):
            shown = ", ".join(name.decode(errors="replace") for name in found) or "no name"
            raise PermissionDenied(f"{shown}: may not call {method}")

    return check_role


def _warn_of_end(certificate: Path) -> None:
    from outrider.transport.certificates import days_left

    left = days_left(certificate, datetime.datetime.now(datetime.UTC))
    if left < WARNED_DAYS:
        _log.warning("%s ends in %d days; renew it with `outrider certs`", certificate, left)


def _authorities(path: Path) -> bytes:
    from outrider.transport.certificates import read_certificates, read_pem

    read_certificates(path)
    return read_pem(path)
