"""Clients that call `Cancel`, and what its answer promises."""

import asyncio
import math
from collections import Counter

from outrider.client import Client
from outrider.errors import DataLoss, DeadlineExceeded, NotFound, Unavailable, check
from outrider.sessions.state import Session
from outrider.sessions.store import FinishReason, SessionRecord
from tests.simulation.redis_host import Redis

ROUND_TOKENS_MAX = 5
"""A round that ends in the turn of the event loop in which `Cancel` is answered still counts."""

AGAIN_S = 0.5


class Canceller:
    """Calls `Cancel` for one session, which another task of the client reads."""

    def __init__(self, client: Client, redis: Redis) -> None:
        self._client = client
        self._redis = redis
        self._num_losses = redis.history.num_losses
        self._task: asyncio.Task[bool] | None = None

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    def begin(self, session_id: str) -> None:
        self._task = asyncio.create_task(self._cancel(session_id))

    async def done(self) -> bool:
        """Waits until `Cancel` has succeeded. False if it was not called, or the session is lost.
        Raises its error if that is none of docs/reliability.md."""
        return self._task is not None and await self._task

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _cancel(self, session_id: str) -> bool:
        while True:
            try:
                await self._client.cancel(session_id)
            except (Unavailable, DeadlineExceeded):
                await asyncio.sleep(AGAIN_S)
            except (NotFound, DataLoss):
                is_lost = self._redis.has_lost(self._num_losses)
                check(is_lost, f"{session_id} is lost, but nothing was")
                return False
            else:
                return True


class Cancels:
    """The sessions whose `Cancel` succeeded."""

    def __init__(self, redis: Redis, shapes: Counter[str]) -> None:
        self._redis = redis
        self._shapes = shapes
        self._ends: dict[str, tuple[int, int]] = {}
        """Id of a session that its owner ends -> its epoch, and length with the prompt."""

    async def note(self, session_id: str, running: Session | None) -> None:
        """A coordinator has answered, where the session is `running` (None: it is not there).
        Raises `InvariantError` if it is not, and the store has no end of it."""
        if running is not None:
            self._shapes["cancel_at_owner"] += 1
            self._ends[session_id] = running.epoch, running.length
            return
        self._shapes["cancel_elsewhere"] += 1
        if not self._redis.is_split:
            record = await self._redis.at_once().load(session_id)
            check(record.finish_reason is not None, f"{session_id} is cancelled, but not ended")

    def is_late(self, record: SessionRecord) -> bool:
        """Whether a session has not ended because the owner that answered had already lost it to
        another coordinator, whose cancellation the store will get later."""
        epoch, _ = self._ends.get(record.session_id, (math.inf, 0))
        return record.finish_reason is None and record.epoch > epoch

    def check_end(self, record: SessionRecord) -> None:
        """Raises `InvariantError` if a session has gone on at the owner that answered `Cancel`."""
        epoch, length = self._ends.get(record.session_id, (0, 0))
        is_ended = record.finish_reason is FinishReason.CANCELLED
        if record.epoch == epoch and not is_ended:
            num_more = len(record.token_ids) - length
            check(num_more <= ROUND_TOKENS_MAX, f"{num_more} tokens came after Cancel")
