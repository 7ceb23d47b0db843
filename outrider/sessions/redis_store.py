"""Sessions in Redis (6.2 or newer, or Valkey).

    <prefix>lease:{<owner>}           string: expires unless the owner renews it
    <prefix>lease:{<owner>}:wanted    set of other coordinators' requests: `<id>` to take a session
                                      over, `cancel:<id>` to cancel a session; expires
    <prefix>session:{<id>}            hash: epoch, owner, state, finish_reason, opened, caches,
                                      counters (JSON), prefix_digest, tokens_start, tokens_end,
                                      logprobs_start, logprobs_end; rewrite ('1' after Redis lost a
                                      take-over, until the owner has sent all tokens again);
                                      pending_tokens_start, ... (the byte ranges sent so far);
                                      shared (the digest of a shared text, if there is one)
    <prefix>session:{<id>}:tokens     string: all tokens, uint32 LE, from byte tokens_start to
                                      tokens_end (excluded)
    <prefix>session:{<id>}:logprobs   string: one JSON line per token after the prompt, from byte
                                      logprobs_start to logprobs_end (excluded)
    <prefix>shared:{<digest>}         string: parameters that sessions have in common; expires
    <prefix>key:{<key>}               string: value stored by `claim_key`; expires
    <prefix>replicated                string: written before each WAIT for replicas

The braces are part of the keys. Each change is one run of a Lua script (`lua/`). Redis does not
roll back a script that fails. So each script keeps the session consistent after each of its
commands, as `lua/layout.lua` describes. Except for `append`, which appends to many sessions, a
script uses keys of one hash slot only, but lease and session have different slots. So a take-over
needs two runs: the first reads the owner's lease, and the second checks that epoch and owner are
unchanged. If Redis loses the lease of a running owner,
another coordinator may take over. The owner's writes then fail, because their epoch is too low."""

import asyncio
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import msgpack
import redis.asyncio
from pydantic import TypeAdapter

from outrider import errors, limits
from outrider.foundation.shared_calls import SharedCalls
from outrider.foundation.tokens import TokenSequence
from outrider.redis.address import RedisAddress
from outrider.redis.connection import Call, Script, ScriptRunner, calling, check_server, new_client
from outrider.sessions import store
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
_RENEW = Script("layout", "renew")
_SHARE = Script("share", replicated=True)
_READ_SHARED = Script("read_shared")
_CLAIM_KEY = Script("claim_key", replicated=True)
Field = str | int | bytes
_CANCEL = "cancel:"
"""With this prefix, a session's id in the set `wanted` asks the owner to cancel the session."""


class RedisStore(store.SessionStore):
    """A `SessionStore` in one Redis server, opened by `connect`."""

    lease_ms = limits.SESSION_LEASE_MS
    finished_ttl_ms = limits.FINISHED_TTL_S * 1000
    key_ttl_ms = limits.KEY_TTL_S * 1000

    def __init__(
        self,
        client: redis.asyncio.Redis,
        key_prefix: str,
        wait_replicas: int = 0,
        resume_grace_ms: int = 0,
    ) -> None:
        self._client = client
        self.session_ttl_ms = resume_grace_ms + limits.SESSION_RESERVE_S * 1000
        self._sharing: SharedCalls[str, None] = SharedCalls()
        """Running calls that store a shared text, by the text's digest."""
        self._scripts = ScriptRunner(client, wait_replicas, f"{key_prefix}replicated")
        self._key_prefix = key_prefix

    @classmethod
    async def connect(
        cls, address: RedisAddress, *, wait_replicas: int = 0, resume_grace_ms: int = 0
    ) -> Self:
        """Connects to the server. Raises `ConfigError` if the server cannot keep sessions. If fewer
        than `wait_replicas` replicas of Redis have a call's data after `REDIS_WAIT_MS`, the call
        raises `StoreUnavailable`. Calls about leases, `renew` and `release` do not wait for
        replicas. An unfinished session without an owner can be resumed for `resume_grace_ms`, and
        expires `SESSION_RESERVE_S` later."""
        client = new_client(address)
        try:
            await check_server(client, address.url)
        except BaseException:
            await client.aclose()
            raise
        return cls(client, address.key_prefix, wait_replicas, resume_grace_ms)

    async def open(self, session: store.SessionRecord) -> None:
        shared: tuple[Field, ...] = ()
        if (text := session.shared) is not None:
            await self._share(text)
            shared = "shared", text.digest
        opened = (
            session.tenant,
            session.seed,
            session.rule,
            session.parameters,
            session.prompt_length,
        )
        answer = await self._run(
            _OPEN,
            session.session_id,
            self.session_ttl_ms,
            encode_tokens(session.token_ids),
            "epoch",
            session.epoch,
            "owner",
            session.owner,
            "state",
            "running",
            "finish_reason",
            "",
            "opened",
            _OPENED.dump_json(opened),
            *_progress(session),
            *shared,
        )
        if answer == 0:
            raise errors.InvariantError(f"another session has the id {session.session_id}")

    async def append(self, appends: Sequence[store.Append]) -> list[int | errors.OutriderError]:
        groups = [*_groups(appends)]
        runs = await self._scripts.run_all(_APPEND, [self._append_call(some) for some in groups])
        outcomes: list[int | errors.OutriderError] = []
        for some, answers in zip(groups, runs, strict=True):
            if isinstance(answers, errors.OutriderError):
                answers = [answers] * len(some)
            for append, answer in zip(some, answers, strict=True):
                outcomes.append(_outcome(append.session_id, append.epoch, answer))
        return outcomes

    def _append_call(self, appends: Sequence[store.Append]) -> Call:
        keys = [key for append in appends for key in self._keys(append.session_id)]
        given = [
            (
                append.epoch,
                append.owner,
                append.expected_length,
                encode_tokens(append.token_ids),
                append.logprobs,
                append.more_follow,
                _progress(append),
            )
            for append in appends
        ]
        # redis-py packs a few large arguments faster than many small ones.
        packed = msgpack.packb(given, use_bin_type=False)  # Redis reads the older MessagePack.
        return keys, (self.session_ttl_ms, packed)

    async def renew(self, sessions: Sequence[store.SessionRecord]) -> None:
        calls = [(self._keys(session.session_id), (self.session_ttl_ms,)) for session in sessions]
        for start in range(0, len(calls), limits.CALLS_PER_PIPELINE_MAX):
            some = calls[start : start + limits.CALLS_PER_PIPELINE_MAX]
            await self._scripts.run_all(_RENEW, some)
        for text in {session.shared for session in sessions if session.shared is not None}:
            await self._share(text)

    async def memory(self) -> store.StoreMemory:
        async with calling(self._client):
            info = await self._client.info("memory")
        most = info.get("maxmemory") or info.get("total_system_memory", 0)
        return store.StoreMemory(info.get("used_memory", 0), most)

    async def hold_lease(self, owner: str) -> Mapping[str, bool]:
        call = self._lease(owner), (self.lease_ms,)
        wanted = {member.decode() for member in await self._scripts.run(_HOLD_LEASE, call)}
        ids = sorted({member.removeprefix(_CANCEL) for member in wanted})
        return {session_id: _CANCEL + session_id in wanted for session_id in ids}

    async def end_lease(self, owner: str) -> None:
        await self._scripts.run(_HOLD_LEASE, (self._lease(owner), (0,)))

    async def release(self, session_id: str, epoch: int, owner: str) -> None:
        await self._write(_RELEASE, session_id, epoch, owner, store.released(owner))

    async def take_over(
        self,
        seen: store.SessionRecord,
        owner: str,
        on_sent: Callable[[], None] = lambda: None,
        cancels: bool = False,
    ) -> store.SessionRecord:
        session_id = seen.session_id
        if seen.finish_reason is None and seen.owner != owner:
            wanted = f"{_CANCEL}{session_id}" if cancels else session_id
            call = (self._lease(seen.owner), (wanted, self.lease_ms))
            left_ms = await self._scripts.run(_READ_LEASE, call)
            if left_ms >= 0:
                raise errors.Unavailable(
                    f"session {session_id} has an owner; try again in {left_ms} ms, when the "
                    "owner's lease ends",
                    retry_after_ms=max(left_ms, 1),
                )
        on_sent()
        ttl_ms = self.session_ttl_ms
        answer = await self._run(_TAKE_OVER, session_id, seen.epoch, seen.owner, owner, ttl_ms)
        if (record := await self._record(session_id, answer)) is not None:
            return record
        raise errors.StoreUnavailable(
            f"session {session_id} was taken over, or lost its last tokens, while it was read; try "
            "again",
            retry_after_ms=limits.TAKE_OVER_RETRY_MS,
        )

    async def finish(self, finish: store.Finish) -> int:
        return await self._write(
            _FINISH,
            finish.session_id,
            finish.epoch,
            finish.owner,
            self.finished_ttl_ms,
            -1 if finish.length is None else finish.length,
            "state",
            "finished",
            "finish_reason",
            finish.reason.value,
            "counters",
            _COUNTERS.dump_json(finish.counters),
        )

    async def load(self, session_id: str) -> store.SessionRecord:
        for _ in range(limits.LOAD_TRIES_MAX):
            record = await self._record(session_id, await self._run(_LOAD, session_id))
            if record is not None:
                return record
        raise errors.StoreUnavailable(
            f"session {session_id} changed {limits.LOAD_TRIES_MAX} times while it was read; try "
            "again"
        )

    async def claim_key(self, key: str, value: str = "", replaces: str = "") -> str:
        call = (f"{self._key_prefix}key:{{{key}}}",), (value, replaces, self.key_ttl_ms)
        stored: bytes = await self._scripts.run(_CLAIM_KEY, call)
        return stored.decode()

    async def close(self) -> None:
        await self._scripts.close()
        await self._client.aclose()

    async def _share(self, text: store.SharedText) -> None:
        """Stores a shared text, or restarts its time to live. It outlives all sessions that have
        it, also those that finish. Simultaneous calls share one round trip."""
        keys, ttl_ms = (self._shared_key(text.digest),), self.session_ttl_ms + self.finished_ttl_ms

        async def share() -> None:
            if not await self._scripts.run(_SHARE, (keys, (ttl_ms, ""))):
                await self._scripts.run(_SHARE, (keys, (ttl_ms, text.text)))

        await self._sharing.share(text.digest, lambda: asyncio.ensure_future(share()))

    def _shared_key(self, digest: str) -> str:
        return f"{self._key_prefix}shared:{{{digest}}}"

    async def _run(self, script: Script, session_id: str, *arguments: Field) -> Any:
        return await self._scripts.run(script, (self._keys(session_id), arguments))

    async def _write(
        self, script: Script, session_id: str, epoch: int, owner: str, *arguments: Field
    ) -> int:
        answer = await self._run(script, session_id, epoch, owner, *arguments)
        outcome = _outcome(session_id, epoch, answer)
        if isinstance(outcome, errors.OutriderError):
            raise outcome
        return outcome

    def _lease(self, owner: str) -> tuple[str, str]:
        key = f"{self._key_prefix}lease:{{{owner}}}"
        return key, f"{key}:wanted"

    async def _record(self, session_id: str, answer: Sequence[Any]) -> store.SessionRecord | None:
        """Reads the record that an answer of `_LOAD` or `_TAKE_OVER` describes. Returns None if the
        tokens were replaced meanwhile, or if Redis has lost the last tokens."""
        match answer:
            case [b"missing", _]:
                raise store.not_found(session_id)
            case [b"changed", _]:
                raise store.contended(session_id)
        pairs, *extents = answer
        fields: dict[bytes, bytes] = dict(zip(pairs[::2], pairs[1::2], strict=True))
        lineage = [fields.get(b"epoch"), fields.get(b"owner"), fields.get(b"rewrite", b"")]
        key, *strings = self._keys(session_id)
        contents: list[bytes] = []
        for string, (first, past) in zip(strings, extents, strict=True):
            parts: list[bytes] = []
            for start in range(first, past, limits.RECORD_PART_BYTES):
                stop = min(start + limits.RECORD_PART_BYTES, past)
                call = (key, string), (start, stop - 1)
                part = await self._scripts.run(_READ_PART, call)
                if part[0] == b"missing":
                    raise store.not_found(session_id)
                if part[:-1] != lineage or len(part[-1]) != stop - start:
                    return None
                parts.append(part[-1])
            contents.append(b"".join(parts))
        shared = None
        if digest := fields.get(b"shared", b"").decode():
            text = await self._scripts.run(_READ_SHARED, ((self._shared_key(digest),), ()))
            if not text:
                raise errors.DataLoss(f"parameters of session {session_id} are not stored any more")
            shared = store.SharedText(digest, text.decode())
        tokens, logprobs = contents
        decode = partial(decode_record, session_id, fields, tokens, logprobs, shared)
        if sum(map(len, contents)) <= limits.RECORD_INLINE_BYTES:
            return decode()
        return await asyncio.to_thread(decode)

    def _keys(self, session_id: str) -> tuple[str, str, str]:
        key = f"{self._key_prefix}session:{{{session_id}}}"
        return key, f"{key}:tokens", f"{key}:logprobs"


def _groups(appends: Sequence[store.Append]) -> Iterator[list[store.Append]]:
    """Divides appends among runs of the script. Each run is stored or refused as a whole when the
    connection breaks, and keeps other clients of Redis waiting."""
    some, num_bytes = list[store.Append](), 0
    for append in appends:
        size = TOKEN_BYTES * len(append.token_ids) + len(append.logprobs)
        if some and num_bytes + size > limits.APPEND_BYTES_MAX:
            yield some
            some, num_bytes = [], 0
        some.append(append)
        num_bytes += size
    if some:
        yield some


def _outcome(session_id: str, epoch: int, answer: Any) -> int | errors.OutriderError:
    match answer:
        case int() | errors.OutriderError():
            return answer
        case [b"missing", _]:
            reason = f"session {session_id} is not stored any more; it cannot be continued"
            return errors.DataLoss(reason)
        case [b"stale", int(stored_epoch)]:
            return errors.StaleEpoch(
                f"session {session_id} has a new owner: the session's epoch is {stored_epoch}, "
                f"and the epoch of this write is {epoch}"
            )
    return errors.InvariantError(f"Redis gave an unknown answer for session {session_id}")


TOKEN_BYTES = 4
_OPENED = TypeAdapter(tuple[str, int, Rule, str, int])
"""The field `opened`, which never changes: tenant, seed, rule, parameters, prompt length."""
_CACHES = TypeAdapter(tuple[store.CacheState, store.CacheState])
_COUNTERS = TypeAdapter(store.Counters)


def _progress(of: store.SessionRecord | store.Append) -> list[Field]:
    return [
        b"prefix_digest",
        str(of.prefix_digest),
        b"caches",
        _CACHES.serializer.to_json((of.draft, of.target)),
        b"counters",
        _COUNTERS.serializer.to_json(of.counters),
    ]


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def decode_record(
    session_id: str,
    fields: Mapping[bytes, bytes],
    tokens: bytes,
    logprobs: bytes,
    shared: store.SharedText | None,
) -> store.SessionRecord:
    """Decodes a session's hash, tokens and log-probabilities. Raises `DataLoss` if the tokens are
    not complete, or if the form of the data is unknown."""
    try:
        tenant, seed, rule, parameters, prompt_length = _OPENED.validate_json(fields[b"opened"])
        token_ids = struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)
        draft, target = _CACHES.validate_json(fields[b"caches"])
        reason = fields[b"finish_reason"].decode()
        record = store.SessionRecord(
            session_id,
            tenant,
            fields[b"owner"].decode(),
            seed,
            rule,
            parameters,
            prompt_length,
            token_ids,
            int(fields[b"prefix_digest"]),
            int(fields[b"epoch"]),
            draft,
            target,
            _COUNTERS.validate_json(fields[b"counters"]),
            logprobs.decode(),
            store.FinishReason(reason) if reason else None,
            shared,
        )
    except (KeyError, ValueError, struct.error) as error:
        reason = f"session {session_id} is stored in an unknown form: {error}"
        raise errors.DataLoss(reason) from error
    reason = f"the stored tokens of session {session_id} do not match their digest"
    if len(token_ids) < prompt_length:
        reason = (
            f"session {session_id} has {len(token_ids)} of the {prompt_length} tokens of its prompt"
        )
    elif TokenSequence(token_ids).digest() == record.prefix_digest:
        return record
    raise errors.DataLoss(f"{reason}; the session cannot be continued")
