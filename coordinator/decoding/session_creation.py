"""Sessions that are opened, or given up, in a store which may not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from coordinator.requests.validation import GenerationParameters
from outrider.backoff import backoff
from outrider.errors import OutriderError, StoreUnavailable
from outrider.limits import (
    ABANDON_TRIES_MAX,
    CANCEL_WAIT_S,
    COMMIT_RETRY_MS_MAX,
    COMMIT_RETRY_MS_MIN,
    OPEN_TRIES_MAX,
    TAKE_OVER_RETRY_MS,
    UNTOLD_SESSIONS_MAX,
)
from outrider.sessions.state import Session
from outrider.sessions.store import (
    FIRST_EPOCH,
    Counters,
    Finish,
    FinishReason,
    SessionRecord,
    SessionStore,
    released,
)

_log = logging.getLogger(__name__)


class SessionCreator:
    """Opens the sessions of one coordinator, and records those that nobody wants."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        random_bits: Callable[[int], int],
        random: Callable[[], float],
        in_background: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        """`owner` is the coordinator's name in the store, `random_bits(n)` gives n fresh random
        bits, `random` is for `backoff`; work that nobody waits for goes `in_background`."""
        self._store = store
        self._owner = owner
        self._random_bits = random_bits
        self._random = random
        self._in_background = in_background
        self._telling: dict[str, set[asyncio.Task[OutriderError | None]]] = {}
        """By session: what the store is being told."""
        self._closed = False

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
        new = SessionRecord.new(
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
        return Session(new)

    async def _abandon(self, opening: asyncio.Task[None], session_id: str) -> None:
        """Records a session as cancelled that nobody wants, once its opening has ended."""
        await asyncio.wait([opening])
        await self.cancel(session_id, FIRST_EPOCH, Counters())

    def is_telling(self, session_id: str) -> bool:
        """Whether a release or an end of the session is on its way to the store. Under an epoch
        that the store has lost, and gives once more, it would hit the session that runs then."""
        return session_id in self._telling

    async def told(self, session_id: str) -> None:
        """Waits until none is, but no longer than `TAKE_OVER_RETRY_MS`."""
        if session_id in self._telling:
            await asyncio.wait(self._telling[session_id], timeout=TAKE_OVER_RETRY_MS / 1e3)

    def release(self, session_id: str, epoch: int) -> asyncio.Task[OutriderError | None]:
        """Lets any coordinator take a session over that runs nowhere now. Returns as `_tell`."""
        return self._tell(session_id, lambda: self._store.release(session_id, epoch, self._owner))

    def cancel(
        self, session_id: str, epoch: int, counters: Counters, *, is_released: bool = False
    ) -> asyncio.Task[OutriderError | None]:
        """Records a session that runs nowhere as cancelled, unless another stream goes on with
        it. Returns as `_tell`."""
        owner = released(self._owner) if is_released else self._owner
        end = Finish(session_id, epoch, owner, None, FinishReason.CANCELLED, counters)
        return self._tell(session_id, lambda: self._store.finish(end))

    async def cancel_now(self, session_id: str, epoch: int, counters: Counters) -> None:
        """As `cancel`, but raises why it was not recorded: `StoreUnavailable` also where the store
        has not answered for `CANCEL_WAIT_S`. Then, and where the caller is cancelled, the store is
        still asked to record it."""
        task = self.cancel(session_id, epoch, counters)
        await asyncio.wait([task], timeout=CANCEL_WAIT_S)
        if not task.done() or task.cancelled():
            raise StoreUnavailable(
                f"session {session_id} is recorded as cancelled once the session store answers"
            )
        error = task.result()
        if error is not None:
            raise error

    def close(self) -> None:
        """No call is repeated any more: the coordinator's lease is about to end."""
        self._closed = True

    def _tell(
        self, session_id: str, call: Callable[[], Awaitable[object]]
    ) -> asyncio.Task[OutriderError | None]:
        """See `_insist`. It goes on without the caller, too."""
        task = self._in_background(self._insist(session_id, call))
        tasks = self._telling.setdefault(session_id, set())
        tasks.add(task)

        def told(task: asyncio.Task[OutriderError | None]) -> None:
            tasks.discard(task)
            if not tasks:
                self._telling.pop(session_id, None)

        task.add_done_callback(told)
        return task

    async def _insist(
        self, session_id: str, call: Callable[[], Awaitable[object]]
    ) -> OutriderError | None:
        """Calls the store until it has answered, for as long as this coordinator lives: a session
        that it owned but does not run would be kept from others by its lease. Gives up after
        `ABANDON_TRIES_MAX` calls where it insists for more than `UNTOLD_SESSIONS_MAX` sessions.
        Returns what the store refused with, or why it was given up; None where the call has
        succeeded."""
        attempt = 0
        while True:
            try:
                await call()
            except StoreUnavailable as error:
                _log.debug("the store is told later of session %s: %r", session_id, error)
                attempt += 1
                is_full = len(self._telling) > UNTOLD_SESSIONS_MAX
                if self._closed or (is_full and attempt >= ABANDON_TRIES_MAX):
                    _log.warning("the store was not told of session %s: %r", session_id, error)
                    return error
            except OutriderError as error:
                _log.debug("session %s is not there, or another's: %r", session_id, error)
                return error
            else:
                return None
            wait_ms = backoff(COMMIT_RETRY_MS_MIN, COMMIT_RETRY_MS_MAX, attempt - 1, self._random)
            await asyncio.sleep(wait_ms / 1e3)
