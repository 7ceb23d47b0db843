"""The session store with its own scripts, on a substitute for Redis in this process."""

from collections.abc import Callable, Sequence
from typing import Any

from outrider.errors import StoreUnavailable
from outrider.redis.connection import Call, Script
from outrider.sessions.redis_store import TOKEN_BYTES, RedisStore
from outrider.sessions.store import SessionRecord, StoreMemory
from tests.simulation.redis_data import RedisData, Reply, ReplyError, Snapshot, packed


class ScriptStore(RedisStore):
    """Can be set back to a snapshot, like a server that lost its last writes."""

    def __init__(
        self,
        now_ms: Callable[[], float],
        data: Callable[[Any], RedisData] = RedisData,
        key_prefix: str = "",
    ) -> None:
        no_client: Any = None
        super().__init__(no_client, key_prefix)
        self.data: Any = data(now_ms)
        self.used = self.most = 0
        self._scripts: Any = self

    async def run(self, script: Script, call: Call) -> Reply:
        """Replaces `ScriptRunner.run`."""
        keys, arguments = (packed(("", *words)) for words in call)
        try:
            sha = self.data.load_script(script.source.encode())
            reply = self.data.run_script(sha, keys, arguments)
            for part in reply if isinstance(reply, list) else ():
                if isinstance(part, ReplyError):
                    raise part
            return reply
        except ReplyError as error:
            raise StoreUnavailable(str(error)) from error

    async def run_all(self, script: Script, calls: Sequence[Call]) -> list[Reply]:
        return [await self.run(script, call) for call in calls]

    async def memory(self) -> StoreMemory:
        return StoreMemory(self.used, self.most)

    def key(self, session_id: str) -> bytes:
        return self._keys(session_id)[0].encode()

    def length(self, session_id: str) -> int:
        """The number of stored tokens of a session, as a reader sees it."""
        fields = self.data.get(self.key(session_id))
        return (int(fields[b"tokens_end"]) - int(fields[b"tokens_start"])) // TOKEN_BYTES

    async def records(self) -> list[SessionRecord]:
        keys = [key.decode() for key in self.data.sorted_keys()]
        ids = [key[:-1].removeprefix("session:{") for key in keys if key.endswith("}")]
        return [await self.load(one) for one in ids if one.isalnum()]

    def snapshot(self) -> Snapshot:
        return self.data.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Sets the store back to a snapshot. All leases have expired meanwhile."""
        self.data.restore(snapshot)
        for key in self.data.sorted_keys():
            if key.startswith(b"lease:"):
                self.data.drop(key)

    async def close(self) -> None:
        """Nothing is open."""
