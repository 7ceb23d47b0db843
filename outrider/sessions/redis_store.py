"""Sessions in Redis (6.2 or newer, or Valkey).

    <prefix>session:{<id>}            hash: epoch, owner, lease_until_ms, state, seed, parameters,
                                      prompt_length, prefix_digest, caches, counters ...
    <prefix>session:{<id>}:tokens     string: all tokens, uint32 LE
    <prefix>session:{<id>}:logprobs   string: one JSON line per token after the prompt
    <prefix>replicated                string: written before replicas are waited for

The braces are literal. Every change is one Lua script (`lua/`), so it happens wholly or not at all,
and the clock of leases is Redis' own. A session's time to live is written a sixtieth too long, so
that it need not be written again with each append.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import redis.asyncio

from outrider.errors import ConfigError, InvariantError, OutriderError
from outrider.limits import LEASES_PER_SCRIPT_MAX
from outrider.sessions.lifetimes import DEFAULT_LIFETIMES, Lifetimes
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_connection import check_server, new_client
from outrider.sessions.redis_fields import (
    append_fields,
    decode_record,
    encode_tokens,
    finish_fields,
    new_session_fields,
)
from outrider.sessions.redis_scripts import Call, Replication, Script, ScriptRunner
from outrider.sessions.refusals import leased, missing, not_found, stale, taken, verified
from outrider.sessions.store import Append, Counters, FinishReason, NewSession, SessionRecord

DEFAULT_KEY_PREFIX = "outrider:"


_OPEN = Script("open", replicated=True)
_APPEND = Script("append", replicated=True)
_RENEW = Script("renew")
_TAKE_OVER = Script("take_over", replicated=True)
_FINISH = Script("finish", replicated=True)
_LOAD = Script("load", replicated=True)


class RedisStore:
    """A `SessionStore` in one Redis server. Made by `connect`."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        key_prefix: str,
        lifetimes: Lifetimes,
        wait_replicas: int = 0,
    ) -> None:
        self._client = client
        replication = Replication(wait_replicas, f"{key_prefix}replicated")
        self._scripts = ScriptRunner(client, replication if wait_replicas else None)
        self._key_prefix = key_prefix
        self._lifetimes = lifetimes

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        key_prefix: str = DEFAULT_KEY_PREFIX,
        password: str = "",
        ca_file: str = "",
        lifetimes: Lifetimes = DEFAULT_LIFETIMES,
        wait_replicas: int = 0,
    ) -> Self:
        """`connect_to` the address that has these parts."""
        address = RedisAddress(url=url, password=password, ca_file=ca_file, key_prefix=key_prefix)
        return await cls.connect_to(address, lifetimes=lifetimes, wait_replicas=wait_replicas)

    @classmethod
    async def connect_to(
        cls,
        address: RedisAddress,
        *,
        lifetimes: Lifetimes = DEFAULT_LIFETIMES,
        wait_replicas: int = 0,
    ) -> Self:
        """Connects and makes sure that the server can keep sessions.

        With `wait_replicas` a change counts, and what is read is given, only once so many replicas
        have it; where they do not within `REDIS_WAIT_MS`, the method raises `StoreUnavailable`.
        Renewed leases do not wait. Raises `ConfigError`, in one line, with the password masked."""
        if "{" in address.key_prefix or "}" in address.key_prefix:
            raise ConfigError(f"Redis key prefix {address.key_prefix!r}: braces are not allowed")
        client = new_client(address)
        try:
            await check_server(client, address.url)
        except BaseException:
            await client.aclose()
            raise
        return cls(client, address.key_prefix, lifetimes, wait_replicas)

    async def open(self, session: NewSession) -> None:
        """See `SessionStore.open`."""
        arguments = [
            self._lifetimes.lease_ms,
            self._lifetimes.session_ttl_ms,
            encode_tokens(session.prompt_ids),
            *new_session_fields(session),
        ]
        answer = await self._scripts.run(_OPEN, (self._keys(session.session_id), arguments))
        if answer == 0:
            raise taken(session.session_id)

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        """See `SessionStore.append`."""
        calls: list[Call] = [
            (
                self._keys(append.session_id),
                [
                    append.epoch,
                    append.owner,
                    self._lifetimes.lease_ms,
                    self._lifetimes.session_ttl_ms,
                    append.expected_length,
                    encode_tokens(append.token_ids),
                    append.logprobs,
                    *append_fields(append),
                ],
            )
            for append in appends
        ]
        answers = await self._scripts.run_all(_APPEND, calls)
        return [
            answer
            if isinstance(answer, int | OutriderError)
            else _refusal(append.session_id, append.epoch, answer)
            for append, answer in zip(appends, answers, strict=True)
        ]

    async def renew(self, owner: str, sessions: Sequence[tuple[str, int]]) -> list[str]:
        """See `SessionStore.renew`."""
        chunks = [
            sessions[start : start + LEASES_PER_SCRIPT_MAX]
            for start in range(0, len(sessions), LEASES_PER_SCRIPT_MAX)
        ]
        first: list[str | int] = [owner, self._lifetimes.lease_ms, self._lifetimes.session_ttl_ms]
        calls: list[Call] = [
            (
                [key for session_id, _ in chunk for key in self._keys(session_id)],
                [*first, *(epoch for _, epoch in chunk)],
            )
            for chunk in chunks
        ]
        lost: list[str] = []
        for chunk, answer in zip(chunks, await self._scripts.run_all(_RENEW, calls), strict=True):
            if isinstance(answer, OutriderError):
                raise answer
            lost.extend(chunk[index][0] for index in answer)
        return lost

    async def take_over(self, session_id: str, owner: str) -> SessionRecord:
        """See `SessionStore.take_over`."""
        arguments: list[str | int] = [
            owner,
            self._lifetimes.lease_ms,
            self._lifetimes.session_ttl_ms,
        ]
        answer = await self._scripts.run(_TAKE_OVER, (self._keys(session_id), arguments))
        return _record(session_id, answer)

    async def finish(
        self, session_id: str, epoch: int, reason: FinishReason, counters: Counters
    ) -> int:
        """See `SessionStore.finish`."""
        arguments = [epoch, self._lifetimes.finished_ttl_ms, *finish_fields(reason, counters)]
        answer = await self._scripts.run(_FINISH, (self._keys(session_id), arguments))
        if not isinstance(answer, int):
            raise _refusal(session_id, epoch, answer)
        return answer

    async def load(self, session_id: str) -> SessionRecord:
        """See `SessionStore.load`."""
        answer = await self._scripts.run(_LOAD, (self._keys(session_id), []))
        return _record(session_id, answer)

    async def close(self) -> None:
        """See `SessionStore.close`."""
        await self._scripts.close()
        await self._client.aclose()

    def _keys(self, session_id: str) -> tuple[str, str, str]:
        key = f"{self._key_prefix}session:{{{session_id}}}"
        return key, f"{key}:tokens", f"{key}:logprobs"


def _refusal(session_id: str, epoch: int, answer: Sequence[Any]) -> OutriderError:
    """What a script meant that did not do what it was asked."""
    match answer:
        case [b"missing", _]:
            return missing(session_id)
        case [b"stale", int(stored_epoch)]:
            return stale(session_id, epoch, stored_epoch)
        case _:
            return InvariantError(f"Redis gave an unknown answer for session {session_id}")


def _record(session_id: str, answer: Sequence[Any]) -> SessionRecord:
    """The record that `load` or `take_over` read, or the error that they meant."""
    match answer:
        case [b"missing", _]:
            raise not_found(session_id)
        case [b"leased", int(left_ms)]:
            raise leased(session_id, left_ms)
        case [list(fields), bytes(tokens), bytes(logprobs)]:
            return verified(decode_record(session_id, fields, tokens, logprobs))
        case _:
            raise InvariantError(f"Redis gave an unknown answer for session {session_id}")
