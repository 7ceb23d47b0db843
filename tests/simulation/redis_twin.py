"""A Redis of the simulation: a store and a registry in a process of their own, and those that call
them from others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from outrider.errors import InvariantError, OutriderError, StoreUnavailable
from outrider.fleet.registry import MemoryRegistry, ReplicaRecord, Role
from outrider.sessions.memory_store import MemoryStore
from outrider.sessions.redis_connection import answering
from outrider.sessions.store import (
    Append,
    Counters,
    FinishReason,
    NewSession,
    SessionRecord,
)

from .network import Network
from .processes import Process

T = TypeVar("T")


class WatchedStore(MemoryStore):
    """Remembers what it ever held: what is lost later may have been shown."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        super().__init__(now_ms)
        self._ever: dict[str, list[tuple[int, ...]]] = {}

    def held(self, session_id: str, token_ids: tuple[int, ...]) -> bool:
        """Whether a session's tokens ever began with these."""
        return any(
            tokens[: len(token_ids)] == token_ids for tokens in self._ever.get(session_id, ())
        )

    def owners(self) -> dict[str, str]:
        """Of all sessions."""
        return {key: kept.record.owner for key, kept in self._sessions.items()}

    def _append(self, append: Append) -> int | OutriderError:
        answer = super()._append(append)
        kept = self._sessions.get(append.session_id)
        if kept is not None:
            tokens = kept.record.token_ids
            ever = self._ever.setdefault(append.session_id, [()])
            if ever[-1] != tokens:
                if tokens[: len(ever[-1])] == ever[-1]:
                    ever.pop()
                ever.append(tokens)
        return answer


class Redis:
    """The server. It loses what it is told to lose."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.process = Process("redis")
        self.store = WatchedStore(lambda: loop.time() * 1e3)
        self.registry = MemoryRegistry()
        self.num_losses = 0
        """How often sessions were lost, or their last tokens."""

    def flush(self) -> None:
        """Loses everything."""
        self.num_losses += 1
        self.store.restore({})
        self.registry.forget()

    def start_again(self, sessions: Any, replicas: Any) -> None:
        """As it was once."""
        self.num_losses += 1
        self.store.restore(sessions)
        self.registry.restore(replicas)
        self.process = Process("redis")


class RemoteRedis:
    """Calls of one process."""

    may_fail = False
    """Whether single calls do, without a reason."""

    def __init__(self, network: Network, redis: Redis) -> None:
        self._network = network
        self._redis = redis

    async def _call(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        adversary, server = self._network.adversary, self._redis.process
        if server.is_dead:
            raise StoreUnavailable("nobody answers")
        if self.may_fail and adversary.call_fails():
            raise StoreUnavailable("the question was lost")
        try:
            async with answering():
                result = await self._network.call(server, lambda: _at_once(call()))
        except TimeoutError:
            raise StoreUnavailable("no answer in time") from None
        if self.may_fail and adversary.call_fails():
            raise StoreUnavailable("the answer was lost")
        return result

    async def close(self) -> None:
        """Nothing is open."""


def _at_once(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call that never waits."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise InvariantError("a call in memory waited")


class RemoteStore(RemoteRedis):
    """A `SessionStore`."""

    may_fail = True

    async def open(self, session: NewSession) -> None:
        await self._call(lambda: self._redis.store.open(session))

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        return await self._call(lambda: self._redis.store.append(appends))

    async def renew(self, owner: str, sessions: Sequence[tuple[str, int]]) -> list[str]:
        return await self._call(lambda: self._redis.store.renew(owner, sessions))

    async def take_over(self, session_id: str, owner: str) -> SessionRecord:
        return await self._call(lambda: self._redis.store.take_over(session_id, owner))

    async def finish(
        self, session_id: str, epoch: int, reason: FinishReason, counters: Counters
    ) -> int:
        return await self._call(
            lambda: self._redis.store.finish(session_id, epoch, reason, counters)
        )

    async def load(self, session_id: str) -> SessionRecord:
        return await self._call(lambda: self._redis.store.load(session_id))


class RemoteRegistry(RemoteRedis):
    """A `Registry`."""

    async def announce(self, record: ReplicaRecord) -> None:
        await self._call(lambda: self._redis.registry.announce(record))

    async def withdraw(self, role: Role, name: str) -> None:
        await self._call(lambda: self._redis.registry.withdraw(role, name))

    async def records(self, role: Role) -> list[ReplicaRecord]:
        return await self._call(lambda: self._redis.registry.records(role))

    async def want(self, counts: Mapping[Role, int]) -> None:
        await self._call(lambda: self._redis.registry.want(counts))

    async def wanted(self) -> dict[Role, int]:
        return await self._call(lambda: self._redis.registry.wanted())

    async def note_started(self, number: int) -> None:
        await self._call(lambda: self._redis.registry.note_started(number))

    async def started(self) -> int:
        return await self._call(lambda: self._redis.registry.started())
