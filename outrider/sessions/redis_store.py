"""Sessions in Redis (6.2 or newer, or Valkey).

    <prefix>lease:{<owner>}           string: expires unless the owner renews it
    <prefix>lease:{<owner>}:wanted    set: this owner's sessions that others asked for; expires
    <prefix>session:{<id>}            hash: epoch, owner, state, seed, parameters,
                                      prompt_length, prefix_digest, caches, counters ...,
                                      tokens_start, tokens_end, logprobs_start, logprobs_end;
                                      rewrite, and pending_tokens_start ... while the tokens
                                      are sent again
    <prefix>session:{<id>}:tokens     string: all tokens, uint32 LE, from byte tokens_start to
                                      tokens_end (excluded)
    <prefix>session:{<id>}:logprobs   string: one JSON line per token after the prompt, likewise
    <prefix>replicated                string: written before replicas are waited for

The braces are literal. Every change is one Lua script (`lua/`). Redis does not roll a script back
that it refuses to carry on with, so each is written to leave a whole session behind at any call:
see `lua/layout.lua`. No script touches keys of two hash slots: a take-over reads the owner's lease
by a call of its own, and then compares epoch and owner with what it read before. Redis counts
leases down; no point in time is stored, so no clock is compared with another. A lease that a
restarted Redis has lost lets a session be taken over from an owner that lives: the epoch refuses
what that owner still sends.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import redis.asyncio

from outrider.errors import ConfigError, DataLoss, InvariantError, OutriderError, StoreUnavailable
from outrider.limits import (
    LOAD_TRIES_MAX,
    RECORD_PART_BYTES,
    RECORD_WHOLE_BYTES,
    TAKE_OVER_RETRY_MS,
)
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_connection import check_server, new_client
from outrider.sessions.redis_scripts import Call, Replication, Script, ScriptRunner
from outrider.sessions.store import (
    DEFAULT_LIFETIMES,
    Append,
    CacheState,
    Counters,
    Finish,
    FinishReason,
    Lifetimes,
    SessionRecord,
    SessionState,
    SessionStore,
    contended,
    leased,
    missing,
    not_found,
    released,
    stale,
    taken,
    verified,
)
from outrider.speculation.sampling_params import Rule

_OPEN = Script("layout", "open", replicated=True)
_APPEND = Script("layout", "admit", "append", replicated=True)
_HOLD_LEASE = Script("hold_lease")
_READ_LEASE = Script("read_lease")
_RELEASE = Script("layout", "admit", "release")
_TAKE_OVER = Script("layout", "take_over", replicated=True)
_FINISH = Script("layout", "admit", "finish", replicated=True)
_LOAD = Script("layout", "load", replicated=True)
_READ_PART = Script("read_part")


class RedisStore(SessionStore):
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
        self._threads = ThreadPoolExecutor(1, "record")
        """Decodes long records and hashes their tokens."""

    @classmethod
    async def connect(
        cls,
        server: RedisAddress | str,
        *,
        lifetimes: Lifetimes = DEFAULT_LIFETIMES,
        wait_replicas: int = 0,
        **parts: Any,
    ) -> Self:
        """Connects and makes sure that the server can keep sessions. With a URL alone, `parts` are
        other fields of its address.

        With `wait_replicas` a change counts, and what is read is given, only once so many replicas
        have it; where they do not within `REDIS_WAIT_MS`, the method raises `StoreUnavailable`.
        Renewed leases do not wait. Raises `ConfigError`, in one line, with the password masked."""
        address = RedisAddress(url=server, **parts) if isinstance(server, str) else server
        if "{" in address.key_prefix or "}" in address.key_prefix:
            raise ConfigError(f"Redis key prefix {address.key_prefix!r}: braces are not allowed")
        client = new_client(address)
        try:
            await check_server(client, address.url)
        except BaseException:
            await client.aclose()
            raise
        return cls(client, address.key_prefix, lifetimes, wait_replicas)

    async def open(self, session: SessionRecord) -> None:
        arguments = [
            self._lifetimes.session_ttl_ms,
            encode_tokens(session.token_ids),
            *new_session_fields(session),
        ]
        answer = await self._scripts.run(_OPEN, (self._keys(session.session_id), arguments))
        if answer == 0:
            raise taken(session.session_id)

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
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
                    int(append.more_follow),
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

    async def hold_lease(self, owner: str) -> Sequence[str]:
        return await self._set_lease(owner, self._lifetimes.lease_ms)

    async def end_lease(self, owner: str) -> None:
        await self._set_lease(owner, 0)

    async def release(self, session_id: str, epoch: int, owner: str) -> None:
        arguments: list[str | int] = [epoch, owner, released(owner)]
        answer = await self._scripts.run(_RELEASE, (self._keys(session_id), arguments))
        if not isinstance(answer, int):
            raise _refusal(session_id, epoch, answer)

    async def take_over(
        self, seen: SessionRecord, owner: str, on_sent: Callable[[], None] = lambda: None
    ) -> SessionRecord:
        session_id = seen.session_id
        if seen.state is SessionState.RUNNING and seen.owner != owner:
            asked: list[str | int] = [session_id, self._lifetimes.lease_ms]
            left_ms = await self._scripts.run(_READ_LEASE, (self._lease(seen.owner), asked))
            if left_ms >= 0:
                raise leased(session_id, left_ms)
        arguments: list[str | int] = [
            seen.epoch,
            seen.owner,
            owner,
            self._lifetimes.session_ttl_ms,
            RECORD_WHOLE_BYTES,
        ]
        on_sent()
        answer = await self._scripts.run(_TAKE_OVER, (self._keys(session_id), arguments))
        record = await self._record(session_id, answer)
        if record is None:
            raise StoreUnavailable(
                f"session {session_id} was taken over meanwhile, or lost its tail, while it was "
                f"read; try again",
                retry_after_ms=TAKE_OVER_RETRY_MS,
            )
        return record

    async def finish(self, finish: Finish) -> int:
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
        for _ in range(LOAD_TRIES_MAX):
            answer = await self._scripts.run(_LOAD, (self._keys(session_id), [RECORD_WHOLE_BYTES]))
            record = await self._record(session_id, answer)
            if record is not None:
                return record
        raise StoreUnavailable(
            f"session {session_id} changed its owner {LOAD_TRIES_MAX} times while it was read"
        )

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._scripts.close()
        await self._client.aclose()

    async def _set_lease(self, owner: str, lease_ms: int) -> Sequence[str]:
        """Alone in its round trip: no other caller has a call of this script to share it with."""
        [answer] = await self._scripts.run_all(_HOLD_LEASE, [(self._lease(owner), [lease_ms])])
        if isinstance(answer, OutriderError):
            raise answer
        return [session_id.decode() for session_id in answer]

    def _lease(self, owner: str) -> tuple[str, str]:
        key = f"{self._key_prefix}lease:{{{owner}}}"
        return key, f"{key}:wanted"

    async def _record(self, session_id: str, answer: Sequence[Any]) -> SessionRecord | None:
        """The record that `load` or `take_over` found, read in parts where it is long; None where
        its tokens were replaced meanwhile. Raises the error that the script meant."""
        match answer:
            case [b"missing", _]:
                raise not_found(session_id)
            case [b"changed", _]:
                raise contended(session_id)
            case [list(fields), bytes(tokens), bytes(logprobs)]:
                return verified(decode_record(session_id, fields, tokens, logprobs))
            case [list(fields), int(num_tokens), int(num_logprobs)]:
                _, *keys = self._keys(session_id)
                known = dict(zip(fields[::2], fields[1::2], strict=True))
                at_tokens, at_logprobs = int(known[b"tokens_start"]), int(known[b"logprobs_start"])
                token_parts = await self._string(session_id, keys[0], at_tokens, num_tokens, known)
                logprob_parts = await self._string(
                    session_id, keys[1], at_logprobs, num_logprobs, known
                )
                if token_parts is None or logprob_parts is None:
                    return None

                def decode() -> SessionRecord:
                    tokens, logprobs = b"".join(token_parts), b"".join(logprob_parts)
                    return verified(decode_record(session_id, fields, tokens, logprobs))

                return await asyncio.get_running_loop().run_in_executor(self._threads, decode)
            case _:
                raise InvariantError(f"Redis gave an unknown answer for session {session_id}")

    async def _string(
        self, session_id: str, key: str, first: int, size: int, known: Mapping[bytes, bytes]
    ) -> list[bytes] | None:
        """`size` bytes of one of a session's strings, from byte `first` on, in parts. `known` are
        the session's fields as they were when these were its bytes. None where it was replaced
        since, or is shorter: then Redis has lost its tail. Raises `NotFound` where the session is
        gone."""
        lineage = [known.get(b"epoch"), known.get(b"owner"), known.get(b"rewrite", b"")]
        parts: list[bytes] = []
        for start in range(first, first + size, RECORD_PART_BYTES):
            stop = min(start + RECORD_PART_BYTES, first + size)
            keys = (self._keys(session_id)[0], key)
            answer = await self._scripts.run(_READ_PART, (keys, [start, stop - 1]))
            if answer[0] == b"missing":
                raise not_found(session_id)
            *found, part = answer
            if found != lineage or len(part) != stop - start:
                return None
            parts.append(part)
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


Field = str | int
"""Redis stores both as text."""

TOKEN_BYTES = 4


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Each token id as four bytes, lowest first."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def decode_tokens(data: bytes) -> tuple[int, ...]:
    """The token ids of `encode_tokens`. Raises `ValueError` for a piece of an id."""
    if len(data) % TOKEN_BYTES:
        raise ValueError(f"{len(data)} bytes are not whole token ids")
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}I", data)


def new_session_fields(session: SessionRecord) -> list[Field]:
    return [
        "epoch", session.epoch,
        "owner", session.owner,
        "tenant", session.tenant,
        "state", session.state.value,
        "finish_reason", "",
        "seed", session.seed,
        "rule", session.rule.value,
        "parameters", session.parameters,
        "prompt_length", session.prompt_length,
        "prefix_digest", session.prefix_digest,
        *_cache_fields(session.draft, session.target),
        *_counter_fields(session.counters),
    ]  # fmt: skip


def append_fields(append: Append) -> list[Field]:
    return [
        "prefix_digest", append.prefix_digest,
        *_cache_fields(append.draft, append.target),
        *_counter_fields(append.counters),
    ]  # fmt: skip


def finish_fields(finish: Finish) -> list[Field]:
    return [
        "state", SessionState.FINISHED.value,
        "finish_reason", finish.reason.value,
        *_counter_fields(finish.counters),
    ]  # fmt: skip


def _cache_fields(draft: CacheState, target: CacheState) -> list[Field]:
    return [
        "draft_replica", draft.replica,
        "draft_cached_length", draft.cached_length,
        "target_replica", target.replica,
        "target_cached_length", target.cached_length,
    ]  # fmt: skip


def _counter_fields(counters: Counters) -> list[Field]:
    return [
        "num_rounds", counters.num_rounds,
        "num_draft_tokens", counters.num_draft_tokens,
        "num_accepted_draft_tokens", counters.num_accepted_draft_tokens,
    ]  # fmt: skip


def decode_record(
    session_id: str, fields: Sequence[bytes], tokens: bytes, logprobs: bytes
) -> SessionRecord:
    """The session of a hash (field, value, field, value ...), its tokens and log-probabilities.
    Raises `DataLoss` if they are not what this module writes."""
    texts = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        return _decode(
            session_id, {k.decode(): v.decode() for k, v in texts.items()}, tokens, logprobs
        )
    except (KeyError, ValueError) as error:
        raise DataLoss(f"session {session_id} is stored in an unknown form: {error}") from error


def _decode(
    session_id: str, texts: dict[str, str], tokens: bytes, logprobs: bytes
) -> SessionRecord:
    return SessionRecord(
        session_id=session_id,
        tenant=texts["tenant"],
        epoch=int(texts["epoch"]),
        owner=texts["owner"],
        state=SessionState(texts["state"]),
        seed=int(texts["seed"]),
        rule=Rule(texts["rule"]),
        parameters=texts["parameters"],
        prompt_length=int(texts["prompt_length"]),
        token_ids=decode_tokens(tokens),
        prefix_digest=int(texts["prefix_digest"]),
        draft=CacheState(texts["draft_replica"], int(texts["draft_cached_length"])),
        target=CacheState(texts["target_replica"], int(texts["target_cached_length"])),
        counters=Counters(
            int(texts["num_rounds"]),
            int(texts["num_draft_tokens"]),
            int(texts["num_accepted_draft_tokens"]),
        ),
        logprobs=logprobs.decode(),
        finish_reason=FinishReason(texts["finish_reason"]) if texts["finish_reason"] else None,
    )
