"""Sessions that this coordinator takes over, from others and from itself."""

from __future__ import annotations

from outrider.errors import Unavailable
from outrider.generation import ResumeRequest
from outrider.limits import TAKE_OVER_RETRY_MS, TAKE_OVERS_MAX
from outrider.messages import VerifyAnswer, VerifyItem
from outrider.sessions.store import SessionRecord, SessionStore

from .opening import Opener
from .replicas import ReplicaPool
from .request import GenerationParameters
from .resuming import resumable


class Place:
    """One of the take-overs that run at a time."""

    def __init__(self, taken: set[Place]) -> None:
        self._taken = taken
        taken.add(self)

    def leave(self) -> None:
        """The session runs here now, or will not. Leaving again changes nothing."""
        self._taken.discard(self)


class TakeOvers:
    """Takes sessions over, a bounded number at a time: when a coordinator dies, all of its clients
    ask the others at once, and each of their sessions is read and replayed."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        opener: Opener,
        targets: ReplicaPool[VerifyItem, VerifyAnswer],
    ) -> None:
        """`owner` is this coordinator's name in the store."""
        self._store = store
        self._owner = owner
        self._opener = opener
        self._targets = targets
        self._taken: set[Place] = set()

    def enter(self) -> Place:
        """A place for one more. Raises `Unavailable` where there is none."""
        if len(self._taken) >= TAKE_OVERS_MAX:
            raise Unavailable(
                f"this coordinator takes {TAKE_OVERS_MAX} sessions over already; try again",
                retry_after_ms=TAKE_OVER_RETRY_MS,
            )
        return Place(self._taken)

    async def claim(
        self, record: SessionRecord, request: ResumeRequest
    ) -> tuple[SessionRecord, GenerationParameters]:
        """A session that this coordinator may go on with under a new epoch, or one that has
        finished. Raises what keeps it from being resumed (`resumable`) before anything changes, and
        as `SessionStore.take_over`."""
        parameters = resumable(record, request, self._targets)
        if record.finish_reason is None:
            record = await self._store.take_over(record, self._owner)
        return record, parameters

    async def cancel(self, record: SessionRecord) -> None:
        """Ends a session as cancelled that runs nowhere; a finished one is left as it is. Raises
        `Unavailable` for one that another coordinator has."""
        if record.finish_reason is None:
            record = await self._store.take_over(record, self._owner)
            await self._opener.cancel(record.session_id, record.epoch, record.counters)
