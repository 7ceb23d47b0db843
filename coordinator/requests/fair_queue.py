"""A number of places that tenants take turns in."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.errors import Overloaded


class FairQueue:
    """Places for work on an event loop. Among tenants that wait, the one that holds the fewest
    places is next, then the one that has waited longest for its turn; within a tenant the first
    comes first."""

    def __init__(self, num_places: int, waiting_max: int, per_tenant_max: int, what: str) -> None:
        """So many hold a place at a time; of those that wait there are at most `waiting_max`, and
        of one tenant `per_tenant_max`. `what` names them in errors."""
        self._num_free = num_places
        self._waiting_max = waiting_max
        self._per_tenant_max = per_tenant_max
        self._what = what
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant; the one whose turn is longest ago comes first."""

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """A place of the tenant's, while the context lasts. Raises `Overloaded` where too many
        wait already."""
        if self._num_free:
            self._take(tenant)
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._held[tenant] -= 1
            self._held += Counter()  # Forgets tenants without places.
            self._num_free += 1
            self._next()

    async def _wait(self, tenant: str) -> None:
        own = self._waiting.get(tenant, ())
        for num_waiting, most, whose in (
            (len(own), self._per_tenant_max, "of yours "),
            (sum(map(len, self._waiting.values())), self._waiting_max, ""),
        ):
            if num_waiting >= most:
                raise Overloaded(f"{most} {self._what} {whose}wait already; try again later")
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # It was given a place just now.
                self._held[tenant] -= 1
                self._num_free += 1
                self._next()
            else:
                self._forget(tenant, future)
            raise

    def _take(self, tenant: str) -> None:
        self._num_free -= 1
        self._held[tenant] += 1

    def _next(self) -> None:
        """Gives free places to those that wait."""
        while self._num_free and self._waiting:
            tenant = min(self._waiting, key=lambda name: self._held[name])
            future = self._waiting[tenant][0]
            self._forget(tenant, future)
            if tenant in self._waiting:
                self._waiting.move_to_end(tenant)
            self._take(tenant)
            future.set_result(None)

    def _forget(self, tenant: str, future: asyncio.Future[None]) -> None:
        self._waiting[tenant].remove(future)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
