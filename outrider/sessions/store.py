"""The session store's protocol and its values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from outrider.errors import DataLoss, OutriderError, SessionNotFound, Unavailable
from outrider.limits import TAKE_OVER_RETRY_MS
from outrider.speculation.sampling_params import Rule
from outrider.tokens import TokenSequence
from outrider.values import value

FIRST_EPOCH = 1
"""Epoch of a newly opened session."""


class FinishReason(StrEnum):
    """Why a session ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@value(frozen=True, slots=True)
class CacheState:
    """What one side (draft or target) caches of a session."""

    replica: str = ""
    cached_length: int = 0


NOTHING_CACHED = CacheState()


@value(frozen=True, slots=True)
class Counters:
    """Counters that continue after a resumption."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


NOTHING_COUNTED = Counters()


@value(frozen=True, slots=True)
class Append:
    """Tokens to append to a session under its epoch, if it has `expected_length` tokens."""

    session_id: str
    epoch: int
    owner: str
    expected_length: int
    token_ids: tuple[int, ...]
    prefix_digest: int
    """Digest of all tokens after the append."""
    draft: CacheState
    target: CacheState
    counters: Counters
    logprobs: str = ""
    """JSON lines for these tokens if the request asked for log-probabilities."""
    more_follow: bool = False
    """Whether the store once had tokens after these. If it has lost the owner's take-over, readers
    get the former owner's tokens until an append without this."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a session with `length` tokens, under its epoch."""

    session_id: str
    epoch: int
    owner: str
    length: int | None
    """At least 1, prompt included; None = the session ends with the stored tokens."""
    reason: FinishReason
    counters: Counters


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as it is stored."""

    session_id: str
    tenant: str
    owner: str
    """The coordinator that runs it."""
    seed: int
    rule: Rule
    parameters: str
    """JSON, opaque to the store: all that is needed to continue the request."""
    prompt_length: int
    token_ids: tuple[int, ...]
    prefix_digest: int
    epoch: int = FIRST_EPOCH
    draft: CacheState = NOTHING_CACHED
    target: CacheState = NOTHING_CACHED
    counters: Counters = NOTHING_COUNTED
    logprobs: str = ""
    """A JSON line per token after the prompt, or nothing."""
    finish_reason: FinishReason | None = None
    """None while it runs."""

    @classmethod
    def new(
        cls,
        session_id: str,
        tenant: str,
        owner: str,
        seed: int,
        rule: Rule,
        parameters: str,
        prompt_ids: tuple[int, ...],
    ) -> Self:
        """A newly opened session."""
        return cls(
            session_id, tenant, owner, seed, rule, parameters, len(prompt_ids), prompt_ids,
            TokenSequence(prompt_ids).digest(),
        )  # fmt: skip


def released(owner: str) -> str:
    """The owner's name in sessions that `owner` has released. No process has it, so any coordinator
    may take them over."""
    return f"{owner} (released)"


class SessionStore(Protocol):
    """Keeps sessions, and leases of their owners. Every method may raise `StoreUnavailable`; it may
    then have taken effect or not. Each can be repeated.

    A session has one owner under one epoch, which each take-over raises by one. An owner's writes
    (`append`, `finish`, `release`) name both, and the store compares them with its own:

      - Lower epoch: a former owner's write. `StaleEpoch`, and nothing changes.
      - Same epoch, other owner: the store lost a take-over and then gave its epoch again.
        `StaleEpoch`, and nothing changes.
      - Same epoch and owner: the write is carried out.
      - Higher epoch: the store lost the take-over that gave it. The session is this owner's again
        and runs, even if it was finished. The stored tokens may be a former owner's, so its length
        counts as 0, and the owner sends all tokens again. An append without `Append.more_follow`
        puts them in place of the old ones. Until then readers get the old ones, and the session
        cannot be finished with a length.
    """

    async def open(self, session: SessionRecord) -> None:
        """Creates a session from `SessionRecord.new`. Repeating this with the same owner changes
        nothing. Raises `InvariantError` if another session has the id."""

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        """Appends to many sessions in one round trip. Returns for each the stored length
        afterwards, or an error. If the length is not expected_length + len(token_ids), nothing was
        appended: a shorter store lost its tail (the owner sends it again from there), a longer one
        has the tokens already. `StaleEpoch`: see above. `DataLoss`: no such session. An append
        without tokens asks for the length."""

    async def hold_lease(self, owner: str) -> Mapping[str, bool]:
        """Renews the lease: for a while, no other owner can take over any session of this one.
        Returns the ids of those that others asked for in vain since the last call, each with
        whether it is to be cancelled. The owner then cancels these, and releases those that it does
        not run."""

    async def end_lease(self, owner: str) -> None:
        """Ends the lease: others may take over this owner's sessions at once."""

    async def release(self, session_id: str, epoch: int, owner: str) -> None:
        """Releases a session that no longer runs: its owner becomes `released(owner)`, which has no
        lease; its epoch stays. A finished session is unchanged, even if `epoch` is lower. Raises
        `StaleEpoch` (also if it is released already) and `DataLoss`."""

    async def take_over(
        self,
        seen: SessionRecord,
        owner: str,
        on_sent: Callable[[], None] = lambda: None,
        cancels: bool = False,
    ) -> SessionRecord:
        """Makes `owner` the owner under epoch + 1, if the session is still as `load` returned it
        (`seen`), and its owner's lease has run out (or it is the same owner). Returns a finished
        session unchanged. Raises `NotFound`, `DataLoss`, and `Unavailable`: if another coordinator
        took it over since, or if the lease still runs, with its remaining time. `hold_lease` then
        tells that owner of the request, and with `cancels` to cancel the session.

        `on_sent` is called when the lease has run out, just before the session may change. After
        that, a cancellation or an error other than `NotFound` and `Unavailable` itself (a subclass
        is another error) leaves open whether the session was taken over. Unless the caller
        continues it, it must `release` it under epoch + 1, which also invalidates a take-over under
        way."""

    async def finish(self, finish: Finish) -> int:
        """Marks the session finished if its stored length is `finish.length`, or if that is None.
        Returns the stored length as `append` does: if tokens are missing, the owner appends them
        and finishes again, so no answer is recorded as finished without its tail. A finished
        session is unchanged and expires. Raises `StaleEpoch` (see above), `DataLoss`."""

    async def load(self, session_id: str) -> SessionRecord:
        """Reads a session. Raises `NotFound`."""

    async def claim_key(self, key: str, value: str = "", replaces: str = "") -> str:
        """Stores a value under a key that has none, or has the value `replaces`. Returns the key's
        value; empty = none. Without a value, only reads. Keeps a value for at least as long as a
        session that is opened now."""

    async def close(self) -> None:
        """Closes connections; stored sessions stay."""


def not_found(session_id: str) -> SessionNotFound:
    """There is no such session, or it is another tenant's."""
    return SessionNotFound(f"there is no session {session_id}")


def contended(session_id: str) -> Unavailable:
    """Another coordinator took the session over between two calls of a take-over."""
    return Unavailable(
        f"session {session_id} was taken over meanwhile; try again",
        retry_after_ms=TAKE_OVER_RETRY_MS,
    )


def verified(record: SessionRecord) -> SessionRecord:
    """The record, if its tokens are complete; else raises `DataLoss`."""
    length = len(record.token_ids)
    if length < record.prompt_length:
        raise DataLoss(
            f"session {record.session_id} has {length} of the {record.prompt_length} tokens of "
            f"its prompt; it cannot be continued"
        )
    if TokenSequence(record.token_ids).digest() != record.prefix_digest:
        raise DataLoss(
            f"the stored tokens of session {record.session_id} do not match their digest; "
            f"it cannot be continued"
        )
    return record
