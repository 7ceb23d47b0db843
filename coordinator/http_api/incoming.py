"""Takes in the bodies of requests, within limits on bytes, time and connections."""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from tempfile import SpooledTemporaryFile
from typing import IO

from fastapi import Request
from starlette.exceptions import HTTPException

from coordinator.http_api.server import connections_max
from outrider import limits
from outrider.errors import Overloaded, TooLarge, Unavailable
from outrider.foundation.api_keys import ANYBODY, Caller
from outrider.transport.callers import site

_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's `malloc.h`."""


class IncomingBodies:
    """The bodies that a server holds, counted by owner. The owner is the tenant of the request's
    API key. A request without a key has no owner or, with `by_address`, its client's address."""

    def __init__(self, *, by_address: bool = False, spools: bool = False) -> None:
        """With `spools`, bodies longer than `HTTP_BODY_IN_MEMORY_BYTES` are in temporary files."""
        _return_large_blocks()
        self._by_address, self._spools = by_address, spools
        self._num_bytes = Counter[str]()
        self._num_incomplete = Counter[str]()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[IO[bytes]]:
        """Reads the body of a request, yields it as a file, and holds it until the context ends.

        Raises `TooLarge` if the body exceeds `HTTP_BODY_BYTES_MAX`, and `HTTPException` (408) if
        it takes longer than `HTTP_BODY_S_MAX` or pauses for `HTTP_BODY_PART_S_MAX`. Raises
        `Overloaded` if all bodies together exceed `HTTP_BODIES_BYTES_MAX` (`HTTP_SPOOLED_BYTES_MAX`
        with `spools`), or if one owner has more than `1 / HTTP_OWNERS_MIN` of these bytes, or as
        large a share of the server's connections with incomplete bodies."""
        owner = self._owner(request)
        most = connections_max(spools=self._spools) // limits.HTTP_OWNERS_MIN
        if owner and self._num_incomplete[owner] >= most:
            raise Overloaded(
                f"{owner} is sending {most} bodies, the most allowed at a time; try again later",
                limit="http_owner_bodies",
            )
        memory_max = limits.HTTP_BODY_IN_MEMORY_BYTES if self._spools else 0  # 0 = no limit
        held = Counter[str]()
        with _temporary(memory_max) as file:
            try:
                self._num_incomplete[owner] += 1
                try:
                    await self._receive(request, owner, file, held)
                finally:
                    _subtract(self._num_incomplete, owner, 1)
                yield file
            finally:
                _subtract(self._num_bytes, owner, held[owner])

    def _owner(self, request: Request) -> str:
        caller: Caller = request.state.caller
        if caller is not ANYBODY:
            return f"the tenant {caller.tenant!r}"
        if self._by_address and request.client is not None:
            return f"the address {site(request.client.host) or request.client.host}"
        return ""

    async def _receive(
        self, request: Request, owner: str, file: IO[bytes], held: Counter[str]
    ) -> None:
        """Stores a body, and adds its bytes to `held` as they are counted."""
        now = asyncio.get_running_loop().time
        end = now() + limits.HTTP_BODY_S_MAX
        try:
            async with asyncio.timeout(limits.HTTP_BODY_PART_S_MAX) as late:
                async for part in request.stream():
                    late.reschedule(min(end, now() + limits.HTTP_BODY_PART_S_MAX))
                    self._check_room(owner, held[owner], len(part))
                    for counts in (self._num_bytes, held):
                        counts[owner] += len(part)
                    file.write(part)
            file.seek(0)
        except TimeoutError:
            whole, part_s = limits.HTTP_BODY_S_MAX, limits.HTTP_BODY_PART_S_MAX
            reason = f"the body did not arrive within {whole} s, or paused for {part_s} s"
            raise HTTPException(408, reason, {"connection": "close"}) from None
        except OSError as error:
            raise Unavailable(f"the body cannot be stored: {error.strerror or error}") from error

    def _check_room(self, owner: str, size: int, num_more: int) -> None:
        if size + num_more > (most := limits.HTTP_BODY_BYTES_MAX):
            raise TooLarge(f"the body has more than {most} bytes", "http_body")
        most = limits.HTTP_SPOOLED_BYTES_MAX if self._spools else limits.HTTP_BODIES_BYTES_MAX
        if self._num_bytes.total() + num_more > most:
            raise Overloaded(
                f"the server holds bodies of {most} bytes, the most allowed; try again later",
                limit="http_bodies_bytes",
                of_server=True,
            )
        most //= limits.HTTP_OWNERS_MIN
        if owner and self._num_bytes[owner] + num_more > most:
            raise Overloaded(
                f"the bodies of {owner} have more than {most} bytes together; try again later",
                limit="http_owner_bytes",
            )


@cache
def _return_large_blocks() -> None:
    """Makes glibc return each large block of memory to the system when the block is freed. By
    default, glibc changes its mind after the first freed block: it takes later ones of that size
    from its heap, which cannot shrink while a small block lies behind them. Other C libraries have
    no such function."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, limits.MAPPED_BLOCK_BYTES_MIN)


@contextmanager
def _temporary(memory_max: int) -> Iterator[IO[bytes]]:
    file = SpooledTemporaryFile[bytes](memory_max)
    try:
        yield file
    finally:
        with suppress(OSError):  # The disk is full, as an earlier error has said.
            file.close()


def _subtract(counts: Counter[str], owner: str, number: int) -> None:
    counts[owner] -= number
    if not counts[owner]:
        del counts[owner]
