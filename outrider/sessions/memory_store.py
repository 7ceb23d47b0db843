"""A session store in memory, for simulations."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from outrider.errors import OutriderError
from outrider.sessions.store import Append, Finish, SessionRecord, SessionStore, not_found


class MemoryStore(SessionStore):
    """Keeps only the number of tokens of each session. Sessions keep their owners."""

    def __init__(self) -> None:
        self._lengths: Counter[str] = Counter()

    async def open(self, session: SessionRecord) -> None:
        self._lengths[session.session_id] = len(session.token_ids)

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        self._lengths.update({one.session_id: len(one.token_ids) for one in appends})
        return [self._lengths[one.session_id] for one in appends]

    async def finish(self, finish: Finish) -> int:
        return self._lengths.pop(finish.session_id, finish.length or 0)

    async def load(self, session_id: str) -> SessionRecord:
        raise not_found(session_id)

    async def take_over(
        self,
        seen: SessionRecord,
        owner: str,
        on_sent: Callable[[], None] = lambda: None,
        cancels: bool = False,
    ) -> SessionRecord:
        raise not_found(seen.session_id)

    async def hold_lease(self, owner: str) -> Mapping[str, bool]:
        return {}

    async def end_lease(self, owner: str) -> None: ...

    async def release(self, session_id: str, epoch: int, owner: str) -> None: ...

    async def claim_key(self, key: str, value: str = "", replaces: str = "") -> str:
        return value

    async def close(self) -> None: ...
