"""Sessions that are opened, or given up, in a store which may not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from outrider.backoff import backoff
from outrider.errors import OutriderError, StoreUnavailable
from outrider.limits import (
    ABANDON_TRIES_MAX,
    COMMIT_RETRY_MS_MAX,
    COMMIT_RETRY_MS_MIN,
    OPEN_TRIES_MAX,
)
from outrider.sessions.state import FIRST_EPOCH, Session
from outrider.sessions.store import (
    Counters,
    Finish,
    FinishReason,
    NewSession,
    SessionStore,
    released,
)

from .request import GenerationParameters

_log = logging.getLogger(__name__)


class Opener:
    """Opens the sessions of one coordinator, and records those that nobody wants."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        random_bits: Callable[[int], int],
        random: Callable[[], float],
        in_background: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`owner` is the coordinator's name in the store, `random_bits(n)` gives n fresh random
        bits, `random` is for `backoff`; work that nobody waits for goes `in_background`."""
        self._store = store
        self._owner = owner
        self._random_bits = random_bits
        self._random = random
        self._in_background = in_background

    async def open(self, tenant: str, parameters: GenerationParameters) -> Session:
        """A session that the store has. Each try opens another one: whether a store that did not
        answer has opened the one before is not known."""
        for tries_left in range(OPEN_TRIES_MAX - 1, 0, -1):
            try:
                return await self._open_one(tenant, parameters)
            except StoreUnavailable as error:
                _log.info("a session could not be opened, %d tries left: %r", tries_left, error)
            await asyncio.sleep(COMMIT_RETRY_MS_MIN / 1e3)
        return await self._open_one(tenant, parameters)

    async def _open_one(self, tenant: str, parameters: GenerationParameters) -> Session:
        new = NewSession(
            session_id=f"{self._random_bits(128):032x}",
            tenant=tenant,
            owner=self._owner,
            seed=parameters.seed,
            rule=parameters.rule,
            parameters=parameters.to_json(),
            prompt_ids=parameters.prompt_ids,
        )
        opening = asyncio.create_task(self._store.open(new))
        try:
            await asyncio.shield(opening)
        except (asyncio.CancelledError, StoreUnavailable):
            self._in_background(self._abandon(opening, new.session_id))
            raise
        return Session.opened(new)

    async def _abandon(self, opening: asyncio.Task[None], session_id: str) -> None:
        """Records a session as cancelled that nobody wants, once its opening has ended."""
        await asyncio.wait([opening])
        await self.cancel(session_id, FIRST_EPOCH, Counters())

    async def release(self, session_id: str, epoch: int) -> None:
        """Lets any coordinator take a session over that runs nowhere now."""
        await self._insist(session_id, lambda: self._store.release(session_id, epoch, self._owner))

    async def cancel(
        self, session_id: str, epoch: int, counters: Counters, *, is_released: bool = False
    ) -> None:
        """Records a session that runs nowhere as cancelled, unless another stream goes on with
        it."""
        owner = released(self._owner) if is_released else self._owner
        end = Finish(session_id, epoch, owner, None, FinishReason.CANCELLED, counters)
        await self._insist(session_id, lambda: self._store.finish(end))

    async def _insist(self, session_id: str, call: Callable[[], Awaitable[object]]) -> None:
        """Calls the store until it has answered, or for long enough."""
        for attempt in range(ABANDON_TRIES_MAX):
            try:
                await call()
            except StoreUnavailable as error:
                _log.info("the store is told later of session %s: %r", session_id, error)
            except OutriderError as error:
                _log.info("session %s is not there, or another's: %r", session_id, error)
                return
            else:
                return
            wait_ms = backoff(COMMIT_RETRY_MS_MIN, COMMIT_RETRY_MS_MAX, attempt, self._random)
            await asyncio.sleep(wait_ms / 1e3)
