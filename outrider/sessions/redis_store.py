"""Sessions in Redis (6.2 or newer, or Valkey).

    <prefix>session:{<id>}            hash: epoch, owner, lease_until_ms, state, seed, parameters,
                                      prompt_length, prefix_digest, caches, counters ...
    <prefix>session:{<id>}:tokens     string: all tokens, uint32 LE
    <prefix>session:{<id>}:logprobs   string: one JSON line per token after the prompt

The braces are literal. Every change is one Lua script (`lua/`), so it happens wholly or not at all,
and the clock of leases is Redis' own. A session's time to live is written a sixtieth too long, so
that it need not be written again with each append.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import redis.asyncio

from outrider.errors import (
    ConfigError,
    InvariantError,
    OutriderError,
    StaleEpoch,
    StoreUnavailable,
)
from outrider.limits import (
    LEASES_PER_SCRIPT_MAX,
    LOAD_TRIES_MAX,
    RECORD_PART_BYTES,
    RECORD_WHOLE_BYTES,
)
from outrider.sessions.lifetimes import DEFAULT_LIFETIMES, Lifetimes
from outrider.sessions.redis_connection import check_server, new_client
from outrider.sessions.redis_fields import (
    append_fields,
    decode_record,
    encode_tokens,
    finish_fields,
    new_session_fields,
)
from outrider.sessions.redis_scripts import Call, Script, ScriptRunner
from outrider.sessions.refusals import leased, missing, not_found, stale, taken, verified
from outrider.sessions.store import Append, Counters, FinishReason, NewSession, SessionRecord

DEFAULT_KEY_PREFIX = "outrider:"


_OPEN = Script("open")
_APPEND = Script("append")
_RENEW = Script("renew")
_TAKE_OVER = Script("take_over")
_FINISH = Script("finish")
_LOAD = Script("load")
_READ_PART = Script("read_part")


class RedisStore:
    """A `SessionStore` in one Redis server. Made by `connect`."""

    def __init__(self, client: redis.asyncio.Redis, key_prefix: str, lifetimes: Lifetimes) -> None:
        self._client = client
        self._scripts = ScriptRunner(client)
        self._key_prefix = key_prefix
        self._lifetimes = lifetimes
        self._threads = ThreadPoolExecutor(1, "record")
        """Decodes long records and hashes their tokens."""

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        key_prefix: str = DEFAULT_KEY_PREFIX,
        username: str | None = None,
        password: str | None = None,
        ca_file: str | None = None,
        lifetimes: Lifetimes = DEFAULT_LIFETIMES,
    ) -> Self:
        """Connects and makes sure that the server can keep sessions.

        `url` is `redis://`, `rediss://` (TLS, checked against `ca_file` or the system's
        authorities) or `unix://`; a user and password in it win over the arguments. Raises
        `ConfigError`, in one line, with the password masked."""
        if "{" in key_prefix or "}" in key_prefix:
            raise ConfigError(f"Redis key prefix {key_prefix!r}: braces are not allowed")
        client = new_client(url, username, password, ca_file)
        try:
            await check_server(client, url)
        except BaseException:
            await client.aclose()
            raise
        return cls(client, key_prefix, lifetimes)

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
            RECORD_WHOLE_BYTES,
        ]
        answer = await self._scripts.run(_TAKE_OVER, (self._keys(session_id), arguments))
        record = await self._record(session_id, answer)
        if record is None:
            raise StaleEpoch(f"session {session_id} was taken over by another coordinator")
        return record

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
        for _ in range(LOAD_TRIES_MAX):
            answer = await self._scripts.run(_LOAD, (self._keys(session_id), [RECORD_WHOLE_BYTES]))
            record = await self._record(session_id, answer)
            if record is not None:
                return record
        raise StoreUnavailable(
            f"session {session_id} changed its owner {LOAD_TRIES_MAX} times while it was read"
        )

    async def close(self) -> None:
        """See `SessionStore.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._scripts.close()
        await self._client.aclose()

    async def _record(self, session_id: str, answer: Sequence[Any]) -> SessionRecord | None:
        """The record that `load` or `take_over` found, read in parts where it is long; None where
        its tokens were replaced meanwhile. Raises the error that the script meant."""
        match answer:
            case [b"missing", _]:
                raise not_found(session_id)
            case [b"leased", int(left_ms)]:
                raise leased(session_id, left_ms)
            case [list(fields), bytes(tokens), bytes(logprobs)]:
                return verified(decode_record(session_id, fields, tokens, logprobs))
            case [list(fields), int(num_tokens), int(num_logprobs)]:
                _, *keys = self._keys(session_id)
                known = dict(zip(fields[::2], fields[1::2], strict=True))
                token_parts = await self._string(session_id, keys[0], num_tokens, known)
                logprob_parts = await self._string(session_id, keys[1], num_logprobs, known)
                if token_parts is None or logprob_parts is None:
                    return None

                def decode() -> SessionRecord:
                    tokens, logprobs = b"".join(token_parts), b"".join(logprob_parts)
                    return verified(decode_record(session_id, fields, tokens, logprobs))

                return await asyncio.get_running_loop().run_in_executor(self._threads, decode)
            case _:
                raise InvariantError(f"Redis gave an unknown answer for session {session_id}")

    async def _string(
        self, session_id: str, key: str, size: int, known: Mapping[bytes, bytes]
    ) -> list[bytes] | None:
        """The first `size` bytes of one of a session's strings, in parts. `known` are the
        session's fields as they were when the string had this size. None where it was replaced
        since, or is shorter: then Redis has lost its tail. Raises `NotFound` where the session is
        gone."""
        lineage = [known.get(b"epoch"), known.get(b"rewrite", b"")]
        parts: list[bytes] = []
        for start in range(0, size, RECORD_PART_BYTES):
            stop = min(start + RECORD_PART_BYTES, size)
            keys = (self._keys(session_id)[0], key)
            answer = await self._scripts.run(_READ_PART, (keys, [start, stop - 1]))
            if answer[0] == b"missing":
                raise not_found(session_id)
            if answer[:2] != lineage or len(answer[2]) != stop - start:
                return None
            parts.append(answer[2])
        return parts

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
