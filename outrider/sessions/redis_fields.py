"""How a session lies in Redis: the fields of its hash, and its tokens as uint32 LE."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from outrider.errors import DataLoss
from outrider.sessions.state import FIRST_EPOCH
from outrider.sessions.store import (
    Append,
    CacheState,
    Counters,
    Finish,
    FinishReason,
    NewSession,
    SessionRecord,
    SessionState,
)
from outrider.speculation.sampling_params import Rule
from outrider.tokens import TokenSequence

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


def new_session_fields(session: NewSession) -> list[Field]:
    """Fields and values of a session as it is opened, without its lease."""
    return [
        "epoch", FIRST_EPOCH,
        "owner", session.owner,
        "tenant", session.tenant,
        "state", SessionState.RUNNING.value,
        "finish_reason", "",
        "seed", session.seed,
        "rule", session.rule.value,
        "parameters", session.parameters,
        "prompt_length", len(session.prompt_ids),
        "prefix_digest", TokenSequence(session.prompt_ids).digest(),
        *_cache_fields(CacheState(), CacheState()),
        *_counter_fields(Counters()),
    ]  # fmt: skip


def append_fields(append: Append) -> list[Field]:
    """Fields and values that an append sets."""
    return [
        "prefix_digest", append.prefix_digest,
        *_cache_fields(append.draft, append.target),
        *_counter_fields(append.counters),
    ]  # fmt: skip


def finish_fields(finish: Finish) -> list[Field]:
    """Fields and values of a session's end."""
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
