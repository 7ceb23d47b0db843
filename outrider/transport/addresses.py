"""The addresses under which other machines reach a server."""

from __future__ import annotations

import socket
from contextlib import suppress

_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 (recognised, not bound)


_ANY_REMOTE_HOST = "192.0.2.1"  # From a range for documentation (RFC 5737).


def advertised(host: str, address: str) -> str:
    """Returns the HOST:PORT at which other processes reach a server that listens at `address`.
    `host` is the host to which the server was bound, perhaps a wildcard."""
    if host not in _WILDCARDS:
        return address
    port = address.rpartition(":")[2]
    return f"{machine_address()}:{port}"


def machine_address() -> str:
    """Returns the IP address from which this machine would send to the internet. Without a route to
    the internet, returns the address of the machine's name (on Debian, a loopback address)."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_ANY_REMOTE_HOST, 1))  # For UDP this sends nothing.
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())
