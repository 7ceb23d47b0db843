"""Sessions in Redis (6.2 or newer, or Valkey).

    <prefix>lease:{<owner>}           string: expires unless the owner renews it
    <prefix>session:{<id>}            hash: epoch, owner, state, seed, parameters,
                                      prompt_length, prefix_digest, caches, counters ...,
                                      tokens_start, tokens_end, logprobs_start, logprobs_end
    <prefix>session:{<id>}:tokens     string: all tokens, uint32 LE, from byte tokens_start to
                                      tokens_end (excluded)
    <prefix>session:{<id>}:logprobs   string: one JSON line per token after the prompt, likewise

The braces are literal. Every change is one Lua script (`lua/`). Redis does not roll a script back
that it refuses to carry on with, so each is written to leave a whole session behind at any call:
see `lua/layout.lua`. No script touches keys of two hash slots: a take-over reads the owner's lease
by a call of its own, and then compares epoch and owner with what it read before. Redis counts
leases down; no point in time is stored, so no clock is compared with another. A lease that a
restarted Redis has lost lets a session be taken over from an owner that lives: the epoch refuses
what that owner still sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import redis.asyncio

from outrider.errors import ConfigError, InvariantError, OutriderError
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
from outrider.sessions.refusals import contended, leased, missing, not_found, stale, taken, verified
from outrider.sessions.store import (
    Append,
    Finish,
    NewSession,
    SessionRecord,
    SessionState,
    released,
)

DEFAULT_KEY_PREFIX = "outrider:"


_OPEN = Script("layout", "open")
_APPEND = Script("layout", "admit", "append")
_HOLD_LEASE = Script("hold_lease")
_READ_LEASE = Script("read_lease")
_RELEASE = Script("layout", "admit", "release")
_TAKE_OVER = Script("layout", "take_over")
_FINISH = Script("layout", "admit", "finish")
_LOAD = Script("layout", "load")


class RedisStore:
    """A `SessionStore` in one Redis server. Made by `connect`."""

    def __init__(self, client: redis.asyncio.Redis, key_prefix: str, lifetimes: Lifetimes) -> None:
        self._client = client
        self._scripts = ScriptRunner(client)
        self._key_prefix = key_prefix
        self._lifetimes = lifetimes

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

    async def hold_lease(self, owner: str) -> None:
        """See `SessionStore.hold_lease`."""
        await self._set_lease(owner, self._lifetimes.lease_ms)

    async def end_lease(self, owner: str) -> None:
        """See `SessionStore.end_lease`."""
        await self._set_lease(owner, 0)

    async def release(self, session_id: str, epoch: int, owner: str) -> None:
        """See `SessionStore.release`."""
        arguments: list[str | int] = [epoch, owner, released(owner)]
        answer = await self._scripts.run(_RELEASE, (self._keys(session_id), arguments))
        if not isinstance(answer, int):
            raise _refusal(session_id, epoch, answer)

    async def take_over(self, seen: SessionRecord, owner: str) -> SessionRecord:
        """See `SessionStore.take_over`."""
        session_id = seen.session_id
        if seen.state is SessionState.RUNNING and seen.owner != owner:
            left_ms = await self._scripts.run(_READ_LEASE, (self._lease(seen.owner), []))
            if left_ms >= 0:
                raise leased(session_id, left_ms)
        arguments: list[str | int] = [
            seen.epoch,
            seen.owner,
            owner,
            self._lifetimes.session_ttl_ms,
        ]
        answer = await self._scripts.run(_TAKE_OVER, (self._keys(session_id), arguments))
        return _record(session_id, answer)

    async def finish(self, finish: Finish) -> int:
        """See `SessionStore.finish`."""
        arguments = [
            finish.epoch,
            finish.owner,
            self._lifetimes.finished_ttl_ms,
            -1 if finish.length is None else finish.length,
            *finish_fields(finish),
        ]
        answer = await self._scripts.run(_FINISH, (self._keys(finish.session_id), arguments))
        if not isinstance(answer, int):
            raise _refusal(finish.session_id, finish.epoch, answer)
        return answer

    async def load(self, session_id: str) -> SessionRecord:
        """See `SessionStore.load`."""
        answer = await self._scripts.run(_LOAD, (self._keys(session_id), []))
        return _record(session_id, answer)

    async def close(self) -> None:
        """See `SessionStore.close`."""
        await self._scripts.close()
        await self._client.aclose()

    async def _set_lease(self, owner: str, lease_ms: int) -> None:
        """Alone in its round trip: no other caller has a call of this script to share it with."""
        [answer] = await self._scripts.run_all(_HOLD_LEASE, [(self._lease(owner), [lease_ms])])
        if isinstance(answer, OutriderError):
            raise answer

    def _lease(self, owner: str) -> tuple[str]:
        return (f"{self._key_prefix}lease:{{{owner}}}",)

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
        case [b"changed", _]:
            raise contended(session_id)
        case [list(fields), bytes(tokens), bytes(logprobs)]:
            return verified(decode_record(session_id, fields, tokens, logprobs))
        case _:
            raise InvariantError(f"Redis gave an unknown answer for session {session_id}")
