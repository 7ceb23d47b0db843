"""Whether another process listens on a port.

Two servers with SO_REUSEPORT share a port silently: the kernel gives each new connection to one of
them. So a server that is not meant to share asks here before it binds.
"""

from __future__ import annotations

import errno
import socket


def is_taken(host: str, port: int) -> bool:
    """Whether an address of `host` has a listener on `port`, with SO_REUSEPORT or without. Binds
    each address for a moment. False where an address cannot be bound for another reason."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return any(_in_use(family, address) for family, _, _, _, address in found)


def _in_use(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections that have just ended do not count, as for the server itself.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
