"""A running committer on a virtual clock, and a store whose failures the test decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from session_model import new_session
from twin_store import TwinStore

from coordinator.decoding.committer import Committer
from outrider.errors import OutriderError, StoreUnavailable
from outrider.sessions.state import Session
from outrider.sessions.store import Append, Counters, Finish

NO_COUNTS = Counters()
LATENCY_S = 0.01


class UnreliableStore(TwinStore):
    """Answers after `LATENCY_S`, and not at all while `down` or when `fails` says so."""

    def __init__(self) -> None:
        super().__init__(lambda: asyncio.get_running_loop().time() * 1000)
        self.down = False
        self.fails: Callable[[], str] = lambda: ""
        """Of appends and ends: 'request' = not carried out, 'answer' = carried out unheard."""
        self.appends: list[Sequence[Append]] = []
        self.append_times: list[float] = []
        self.num_renewals = 0
        self.num_finishes = 0

    async def _reach(self) -> None:
        await asyncio.sleep(LATENCY_S)
        if self.down:
            raise StoreUnavailable("down")

    async def _through(self, call: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(LATENCY_S)
        failure = "request" if self.down else self.fails()
        if failure == "request":
            raise StoreUnavailable("request lost")
        answer = await call()
        if failure == "answer":
            raise StoreUnavailable("answer lost")
        return answer

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        self.appends.append(appends)
        self.append_times.append(now())
        return await self._through(lambda: TwinStore.append(self, appends))

    async def hold_lease(self, owner: str) -> Sequence[str]:
        self.num_renewals += 1
        await self._reach()
        return await TwinStore.hold_lease(self, owner)

    async def end_lease(self, owner: str) -> None:
        await self._reach()
        await TwinStore.end_lease(self, owner)

    async def finish(self, finish: Finish) -> int:
        self.num_finishes += 1
        return await self._through(lambda: TwinStore.finish(self, finish))


def now() -> float:
    return asyncio.get_running_loop().time()


class Bench:
    """A running committer and its sessions."""

    def __init__(self) -> None:
        self.store = UnreliableStore()
        self.committer = Committer(self.store, "anna", random.Random(7).random)
        self.running = asyncio.create_task(self.committer.run())

    async def session(self, k: int = 0) -> Session:
        new = new_session(f"{k:032x}")
        await self.store.open(new)
        session = Session(new)
        self.committer.add(session)
        return session

    def decide(self, session: Session, num_tokens: int = 1) -> None:
        session.decide(range(session.length, session.length + num_tokens), NO_COUNTS)
        self.committer.notify(session)

    async def stored(self, session: Session) -> tuple[int, ...]:
        return (await self.store.load(session.session_id)).token_ids


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.committer.close()
    await made.running
    assert not made.committer._entries


async def is_waiting(task: asyncio.Task[Any], seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return not task.done()
