"""The interface of the session store, and the values that its methods take and return."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from outrider.errors import OutriderError, SessionNotFound, Unavailable
from outrider.foundation.tokens import TokenSequence
from outrider.foundation.values import value
from outrider.limits import TAKE_OVER_RETRY_MS
from outrider.speculation.sampling_params import Rule

FIRST_EPOCH = 1


class FinishReason(StrEnum):
    """Why a session has ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@value(frozen=True, slots=True)
class CacheState:
    """A replica that caches a session, and the number of cached tokens."""

    replica: str = ""
    cached_length: int = 0


NOTHING_CACHED = CacheState()


@value(frozen=True, slots=True)
class Counters:
    """Counters of a session. A coordinator that takes the session over continues them."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_drafts: int = 0
    """Number of rounds with draft tokens."""


NOTHING_COUNTED = Counters()


@value(frozen=True, slots=True)
class Append:
    """Tokens to append to a session that has `expected_length` tokens."""

    session_id: str
    epoch: int
    owner: str
    expected_length: int
    token_ids: tuple[int, ...]
    prefix_digest: int
    """Digest of the session's prompt and answer, including `token_ids`."""
    draft: CacheState
    target: CacheState
    counters: Counters
    logprobs: str = ""
    """JSON lines for these tokens if the request asked for log-probabilities."""
    more_follow: bool = False
    """True if the next append, like this one, repeats tokens that the store once acknowledged. An
    owner sends all tokens again if the store has lost the owner's take-over. Readers get the old
    tokens until an append with `more_follow` false is stored."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a session that has `length` tokens."""

    session_id: str
    epoch: int
    owner: str
    length: int | None
    """Number of tokens, prompt included, at least 1; None = the number of stored tokens."""
    reason: FinishReason
    counters: Counters


@dataclass(frozen=True, slots=True)
class SharedText:
    """A text that several sessions of a tenant have in common. The store keeps it once."""

    digest: str
    text: str

    @classmethod
    def of(cls, tenant: str, text: str) -> Self:
        """Tenants share no texts, so the store's answers reveal nothing about other tenants."""
        content = f"{tenant}\n{text}".encode()
        return cls(hashlib.blake2b(content, digest_size=16).hexdigest(), text)


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The memory of the store in bytes, `used` of `most`. `most` is 0 if it is unknown."""

    used: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as it is stored."""

    session_id: str
    tenant: str
    owner: str
    """Name of the coordinator that runs the session."""
    seed: int
    rule: Rule
    parameters: str
    """JSON with all that is needed to continue the request, but for what `shared` has. The store
    does not parse this JSON."""
    prompt_length: int
    token_ids: tuple[int, ...]
    prefix_digest: int
    epoch: int = FIRST_EPOCH
    draft: CacheState = NOTHING_CACHED
    target: CacheState = NOTHING_CACHED
    counters: Counters = NOTHING_COUNTED
    logprobs: str = ""
    """A JSON line for each token after the prompt, or nothing."""
    finish_reason: FinishReason | None = None
    shared: SharedText | None = None
    """JSON of further parameters, which other sessions may have, too."""

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
        shared: SharedText | None = None,
    ) -> Self:
        """Returns the record of a new session."""
        return cls(
            session_id,
            tenant,
            owner,
            seed,
            rule,
            parameters,
            len(prompt_ids),
            prompt_ids,
            TokenSequence(prompt_ids).digest(),
            shared=shared,
        )


def released(owner: str) -> str:
    """Returns the name that replaces `owner` in released sessions. No process has this name, and no
    lease belongs to it, so any coordinator may take the sessions over."""
    return f"{owner} (released)"


class SessionStore(Protocol):
    """Keeps sessions, and the leases of their owners. Every method may raise `StoreUnavailable`,
    whether or not the call has taken effect. Repeating a call does no harm.

    A session has one owner and one epoch. Each take-over raises the epoch by one. An owner's writes
    (`append`, `finish`, `release`) state owner and epoch. The store compares these with the stored
    owner and epoch:

      - Same epoch and owner: the write is carried out.
      - Lower epoch (a former owner), or same epoch and other owner (the store lost a take-over, and
        later gave the epoch to another owner): the write raises `StaleEpoch` and changes nothing.
      - Higher epoch: the store lost the take-over that gave this epoch. The store gives the session
        to this owner again, and a finished session becomes unfinished. The stored tokens may be a
        former owner's, so the stored length counts as 0, and the owner sends all tokens again. The
        first append without `Append.more_follow` replaces the old tokens by the new ones. Until
        then readers get the old tokens, and a `finish` with a length does not finish the session.
    """

    async def open(self, session: SessionRecord) -> None:
        """Stores a new session. If the same owner has stored it already, changes nothing. Raises
        `InvariantError` if another session has the same id."""

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        """Appends to many sessions in one round trip. Returns for each session the stored length
        afterwards, or an error: `StaleEpoch`, or `DataLoss` if the session is not stored. If the
        length is less than expected_length + len(token_ids), nothing was appended, and the owner
        sends the missing tokens again. If it is greater, nothing was appended, because the store
        has the tokens already. An append without tokens only asks for the length."""

    async def renew(self, sessions: Sequence[SessionRecord]) -> None:
        """Lets sessions live on that have had no append for some time. An unfinished session
        expires if it is neither appended to nor renewed. Finished sessions stay unchanged."""

    async def memory(self) -> StoreMemory:
        """Tells how full the store is."""

    async def hold_lease(self, owner: str) -> Mapping[str, bool]:
        """Renews the owner's lease. While the lease lasts, no other owner can take over a session
        of this owner. Returns the sessions that others have tried to take over since the last
        call: id -> whether the owner should cancel the session. The owner should release any of
        these sessions that it does not run."""

    async def end_lease(self, owner: str) -> None:
        """Ends the owner's lease, so that others may take over the owner's sessions at once."""

    async def release(self, session_id: str, epoch: int, owner: str) -> None:
        """Makes `released(owner)` the owner of a session that no longer runs. The epoch stays the
        same. A finished session stays unchanged, even if its epoch is below `epoch`. Raises
        `DataLoss` if the session is not stored, and `StaleEpoch` if it has another owner, or is
        released already."""

    async def take_over(
        self,
        seen: SessionRecord,
        owner: str,
        on_sent: Callable[[], None] = lambda: None,
        cancels: bool = False,
    ) -> SessionRecord:
        """Makes `owner` the owner of a session, under epoch + 1. `seen` is the record that `load`
        returned. Returns a finished session unchanged. Raises `NotFound` or `DataLoss`, and raises
        `Unavailable` if the session's epoch or owner has changed since `load`. While the lease of
        another owner lasts, raises `Unavailable` with the remaining time. The next `hold_lease`
        then reports the attempt to that owner. With `cancels`, the attempt asks the owner to
        cancel the session.

        `on_sent` is called just before the session may change. If the call is cancelled afterwards,
        or raises `DataLoss` or `StoreUnavailable`, the session may have been taken over. A caller
        that does not continue the session must then `release` it under epoch + 1. The release also
        invalidates a take-over that is still under way."""

    async def finish(self, finish: Finish) -> int:
        """Marks the session as finished if its stored length is `finish.length`, or if
        `finish.length` is None. Returns the stored length. If tokens are missing, the owner appends
        them and calls this method again. A finished session stays unchanged. Raises `StaleEpoch`
        and `DataLoss`."""

    async def load(self, session_id: str) -> SessionRecord:
        """Reads a session. Raises `NotFound`."""

    async def claim_key(self, key: str, value: str = "", replaces: str = "") -> str:
        """If the key has no value or the value `replaces`, stores `value`. If `value` is empty,
        only reads. Returns the key's value, or an empty text if there is none. The store keeps a
        value for `KEY_TTL_S`. Each call restarts this time."""

    async def close(self) -> None:
        """Closes connections. Sessions stay stored."""


def not_found(session_id: str) -> SessionNotFound:
    """Returns the error for an unknown session or a session of another tenant."""
    return SessionNotFound(f"there is no session {session_id}")


def contended(session_id: str) -> Unavailable:
    """Returns the error of a call during which another coordinator took the session over."""
    return Unavailable(
        f"session {session_id} was taken over meanwhile; try again",
        retry_after_ms=TAKE_OVER_RETRY_MS,
    )
