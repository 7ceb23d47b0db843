"""Gives tenants turns at places that are scarce, such as threads, so that none waits for all the
work of another."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.errors import Overloaded

Place = TypeVar("Place")
Result = TypeVar("Result")
Work = TypeVar("Work")


def round_robin(works: Sequence[Work], tenant_of: Callable[[Work], str]) -> Sequence[Work]:
    """Returns the first work of each tenant, then the second of each, and so on."""
    tenants = [tenant_of(work) for work in works]
    if len(set(tenants)) <= 1:
        return works
    num_before: Counter[str] = Counter()

    def turn(tenant: str) -> int:
        num_before[tenant] += 1
        return num_before[tenant]

    turns = [turn(tenant) for tenant in tenants]
    return [works[place] for place in sorted(range(len(works)), key=turns.__getitem__)]


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """How much may wait, of one tenant and in all. Something larger may wait if nothing else
    does."""

    tenant_max: int
    total_max: int
    what: str
    """What waits, for the error, such as `constraints await compilation`."""
    limit: str
    """`Overloaded.limit`; for a tenant's limit, after `tenant_`."""


class WaitingWork:
    """Counts what waits, by tenant."""

    def __init__(self, allowed: WaitingLimits) -> None:
        self._allowed = allowed
        self._sizes: Counter[str] = Counter()

    @contextmanager
    def waiting(self, tenant: str, size: int) -> Iterator[None]:
        """Counts work while it waits. Raises `Overloaded` if too much work waits already."""
        allowed = self._allowed
        own, total = self._sizes[tenant], self._sizes.total()
        if own and own + size > allowed.tenant_max:
            most = f"for your tenant; allowed: {allowed.tenant_max}"
            reason = f"{own} {allowed.what} {most}; try again later"
            raise Overloaded(reason, limit=f"tenant_{allowed.limit}")
        if total and total + size > allowed.total_max:
            most = f"for all tenants; allowed: {allowed.total_max}"
            reason = f"{total} {allowed.what} {most}; try again later"
            raise Overloaded(reason, limit=allowed.limit, of_server=True)
        self._sizes[tenant] += size
        try:
            yield
        finally:
            self._sizes[tenant] -= size
            self._sizes += Counter()  # Removes entries that are 0.


class FairQueue(Generic[Place]):
    """Assigns places. Tenants take turns, each with its oldest work."""

    def __init__(self, places: Iterable[Place], room: WaitingWork | None = None) -> None:
        """`room` is None if the caller limits how much waits."""
        self._idle = [*places]
        self._room = room
        self._waiting: OrderedDict[str, deque[asyncio.Future[Place]]] = OrderedDict()
        """The work that waits for a place, of each tenant. The tenants stand in order of their next
        turns."""

    async def acquire(self, tenant: str, size: int = 1) -> Place:
        """Waits for a place. Raises the error of `WaitingWork.waiting`."""
        with nullcontext() if self._room is None else self._room.waiting(tenant, size):
            if self._idle:
                # The place that was used last. If it is a process, the process runs already.
                return self._idle.pop()
            given: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(given)
            try:
                return await given
            except asyncio.CancelledError:
                if given.cancelled():
                    self._forget(tenant, given)
                else:
                    self.release(given.result())
                raise

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Holds a place. Raises the error of `acquire`."""
        place = await self.acquire(tenant)
        try:
            yield
        finally:
            self.release(place)

    def release(self, place: Place) -> None:
        """Passes a place on to the work whose turn is next."""
        while self._waiting:
            tenant, works = self._waiting.popitem(last=False)
            given = works.popleft()
            while given.done() and works:  # Cancelled work takes no turn from its tenant.
                given = works.popleft()
            if works:
                self._waiting[tenant] = works
            if not given.done():
                given.set_result(place)
                return
        self._idle.append(place)

    def _forget(self, tenant: str, given: asyncio.Future[Place]) -> None:
        works = self._waiting.get(tenant, deque())
        with suppress(ValueError):
            works.remove(given)
        if not works:
            self._waiting.pop(tenant, None)


class FairThreads:
    """Threads at which tenants take turns."""

    def __init__(self, num_threads: int, name: str, room: WaitingWork | None = None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns = FairQueue(range(num_threads), room)

    async def run(self, tenant: str, call: Callable[[], Result], size: int = 1) -> Result:
        """Runs a call on a thread. If the caller stops waiting, a call that has begun goes on, and
        keeps its place until it ends. Raises the errors of `FairQueue.acquire`, and of `call`."""
        place, loop = await self._turns.acquire(tenant, size), asyncio.get_running_loop()

        def ended(_: Future[Result]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._turns.release, place)

        try:
            running = self._threads.submit(call)
        except RuntimeError:  # `close` was called meanwhile.
            raise asyncio.CancelledError from None
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Starts no more calls. Does not wait for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class TwoLanes:
    """Threads for short work, and others for long work. Work cannot be interrupted, so otherwise
    short work would wait until long work ends."""

    def __init__(
        self, num_short: int, num_long: int, name: str, short_max: int, allowed: WaitingLimits
    ) -> None:
        """Work whose size is above `short_max` is long."""
        self._short_max = short_max
        room = WaitingWork(allowed)
        self._short = FairThreads(num_short, name, room)
        self._long = FairThreads(num_long, f"{name}-long", room)

    async def run(self, tenant: str, call: Callable[[], Result], size: int) -> Result:
        """See `FairThreads.run`."""
        lane = self._long if size > self._short_max else self._short
        return await lane.run(tenant, call, size)

    def close(self) -> None:
        """See `FairThreads.close`."""
        self._short.close()
        self._long.close()
