"""What the callers of a gRPC server can make it hold: open calls, and incomplete messages."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import unquote
from weakref import WeakValueDictionary

from outrider import limits
from outrider.errors import Overloaded

_IPV6_SITE_BITS = 64  # one user has at least all addresses that share this prefix


def source(peer: str) -> str:
    """Returns `site` of a gRPC `peer`, or the peer itself if it is a Unix socket."""
    return site(unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")) or peer


def site(host: str) -> str:
    """Returns an IPv4 address, or the network of an IPv6 address; empty for other hosts."""
    try:
        address = ip_address(host)
    except ValueError:
        return ""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(ip_network((int(address), _IPV6_SITE_BITS), strict=False))
    return host


class OpenCalls:
    """The open calls of a server. A call is open until the client has taken the end of the answer,
    or is disconnected. A *stranger* is a caller that has shown no valid key."""

    def __init__(self) -> None:
        self._by_caller = Counter[str]()
        self._by_strangers = Counter[str]()  # address -> calls that end at once
        self._staying = Counter[str]()  # address -> calls that stay open
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def of_caller(self, name: str) -> Iterator[None]:
        """Counts a call of a known caller. Raises `Overloaded` if the caller has too many calls."""
        most = limits.GRPC_CALLS_PER_CALLER_MAX
        if self._by_caller[name] >= most:
            raise Overloaded(f"this caller has {most} calls open, the most allowed", limit="calls")
        with _one_more(self._by_caller, name):
            yield

    @contextmanager
    def of_stranger(self, address: str, *, stays: bool = False) -> Iterator[None]:
        """Counts a call of a stranger, separately if it `stays` open until the client leaves.
        Raises `Overloaded` if the strangers of this address have too many calls of this kind, or if
        too many calls stay. So watches of health keep no probe from being answered."""
        counts = self._staying if stays else self._by_strangers
        most, in_all = limits.STRANGER_CALLS_PER_ADDRESS_MAX, limits.STRANGER_CALLS_MAX
        if counts[address] >= most or (stays and counts.total() >= in_all):
            raise Overloaded(
                f"calls without a valid API key: at most {most} of an address, and {in_all} "
                "watches in all, may be open; send a key, or try again later",
                limit="stranger_calls",
            )
        with _one_more(counts, address):
            yield

    async def message(self, frames: AsyncIterator[bytes], name: str) -> bytes | None:
        """Returns the first message of a call of the caller `name`, or None if there is none. If
        other messages of this caller arrive slowly, waits for them first. gRPC buffers little of a
        message that is not awaited. Raises `Overloaded` if the message arrives too late."""
        turns = self._turns.setdefault(name, asyncio.Semaphore(limits.GRPC_MESSAGES_AWAITED_MAX))
        try:
            async with asyncio.timeout(limits.GRPC_MESSAGE_S_MAX), turns:
                return await anext(aiter(frames), None)
        except TimeoutError:
            raise Overloaded(
                f"the message did not arrive within {limits.GRPC_MESSAGE_S_MAX} s; at most "
                f"{limits.GRPC_MESSAGES_AWAITED_MAX} messages of a caller may arrive at a time",
                limit="message_arrival",
            ) from None


@contextmanager
def _one_more(counts: Counter[str], key: str) -> Iterator[None]:
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
