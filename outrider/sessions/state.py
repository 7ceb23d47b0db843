"""One session as its owner sees it: what is decided, what is stored, what may be shown.

    prompt_length <= showable_length <= length          (all tokens decided so far)
    acknowledged_length <= showable_length              (equal, unless the store lost its tail)

Pure: no clock, no store. The owner decides tokens, sends `next_append()` to the store and tells the
answer to `acknowledge()`. A store that lost its tail answers with a shorter length; the owner sends
the rest again, and what was shown stays shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from outrider.errors import InvariantError, OutriderError, check
from outrider.limits import APPEND_TOKENS_MAX, TOKEN_ID_MAX
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

FIRST_EPOCH = 1
"""Epoch of a session as it is opened."""


class OwnedState(StrEnum):
    """Where a session stands with its owner."""

    RUNNING = "running"
    """Tokens are decided."""
    FINISHED = "finished"
    """No more tokens will be decided; the last ones may not be stored yet."""
    LOST = "lost"
    """Somebody else's, or gone: nothing is sent to the store any more."""


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """What never changes while one owner has a session."""

    session_id: str
    tenant: str
    owner: str
    epoch: int
    seed: int
    rule: Rule
    prompt_length: int


class Session:
    """The tokens of one session and how far they are stored. Not safe for several threads."""

    __slots__ = (
        "_acknowledged_length",
        "_error",
        "_finish_reason",
        "_logprobs",
        "_showable_length",
        "_state",
        "counters",
        "draft",
        "identity",
        "target",
        "tokens",
    )

    def __init__(
        self,
        identity: SessionIdentity,
        token_ids: Sequence[int],
        *,
        counters: Counters = Counters(),  # noqa: B008 (frozen)
        draft: CacheState = CacheState(),  # noqa: B008
        target: CacheState = CacheState(),  # noqa: B008
        logprobs: Sequence[str] = (),
    ) -> None:
        """A running session whose `token_ids` are all stored; see `opened` and `resumed`.
        `logprobs` holds one JSON line per token after the prompt, or nothing."""
        self.identity = identity
        self.tokens = TokenSequence(token_ids)
        """All decided tokens, prompt first. Grown by `decide` only."""
        self.counters = counters
        self.draft = draft
        self.target = target
        self._logprobs = list(logprobs)
        self._acknowledged_length = len(self.tokens)
        self._showable_length = len(self.tokens)
        self._state = OwnedState.RUNNING
        self._finish_reason: FinishReason | None = None
        self._error: OutriderError | None = None
        self.check_integrity()

    @classmethod
    def opened(cls, new: NewSession) -> Session:
        """The session that `SessionStore.open` has just stored."""
        identity = SessionIdentity(
            new.session_id, new.tenant, new.owner, FIRST_EPOCH, new.seed, new.rule,
            len(new.prompt_ids),
        )  # fmt: skip
        return cls(identity, new.prompt_ids)

    @classmethod
    def resumed(cls, record: SessionRecord) -> Session:
        """The running session that `SessionStore.take_over` has just given to `record.owner`."""
        check(record.state is SessionState.RUNNING, "a finished session is not resumed")
        identity = SessionIdentity(
            record.session_id, record.tenant, record.owner, record.epoch, record.seed,
            record.rule, record.prompt_length,
        )  # fmt: skip
        return cls(
            identity,
            record.token_ids,
            counters=record.counters,
            draft=record.draft,
            target=record.target,
            logprobs=record.logprobs.split("\n")[:-1],
        )

    @property
    def session_id(self) -> str:
        """32 hexadecimal digits."""
        return self.identity.session_id

    @property
    def epoch(self) -> int:
        """The owner's epoch."""
        return self.identity.epoch

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.identity.prompt_length

    @property
    def length(self) -> int:
        """All decided tokens, prompt included."""
        return len(self.tokens)

    @property
    def acknowledged_length(self) -> int:
        """Tokens that the store holds, as far as its last answer told."""
        return self._acknowledged_length

    @property
    def showable_length(self) -> int:
        """Tokens that have been stored at some time, so may be shown. Never falls."""
        return self._showable_length

    @property
    def num_uncommitted(self) -> int:
        """Decided tokens that the store lacks."""
        return len(self.tokens) - self._acknowledged_length

    @property
    def state(self) -> OwnedState:
        """Running, finished or lost."""
        return self._state

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs, and if it was lost before it ended."""
        return self._finish_reason

    @property
    def error(self) -> OutriderError | None:
        """Why it is lost; None unless it is."""
        return self._error

    @property
    def logprobs(self) -> Sequence[str]:
        """One JSON line per token after the prompt, or nothing; stale after `decide`."""
        return self._logprobs

    def decide(
        self,
        token_ids: Sequence[int],
        counters: Counters,
        *,
        draft: CacheState | None = None,
        target: CacheState | None = None,
        logprobs: Sequence[str] = (),
    ) -> None:
        """Appends the tokens of one outcome. `counters` are the session's so far; None keeps what
        is recorded of a side. `logprobs` holds one JSON line per token, always or never."""
        check(self._state is OwnedState.RUNNING, f"decided tokens for a {self._state} session")
        check(len(token_ids) > 0, "an outcome without tokens")
        check(
            all(0 <= token_id <= TOKEN_ID_MAX for token_id in token_ids),
            f"decided tokens {token_ids}; a token id is 0..{TOKEN_ID_MAX}",
        )
        check(
            len(self._logprobs) + len(logprobs)
            in (0, self.length + len(token_ids) - self.prompt_length),
            "log-probabilities for some tokens but not for all",
        )
        check(not any("\n" in line for line in logprobs), "log-probabilities of several lines")
        self.tokens.extend(token_ids)
        self._logprobs.extend(logprobs)
        self.counters = counters
        self.draft = self.draft if draft is None else draft
        self.target = self.target if target is None else target

    def next_append(self) -> Append | None:
        """What the store lacks, up to `APPEND_TOKENS_MAX` tokens; None if it lacks nothing or the
        session is lost. Changes nothing: asked again before an answer, it holds the same and
        whatever has been decided since."""
        if self._state is OwnedState.LOST or self.num_uncommitted == 0:
            return None
        start = self._acknowledged_length
        end = min(self.length, start + APPEND_TOKENS_MAX)
        first_line = max(start - self.prompt_length, 0)
        lines = self._logprobs[first_line : max(end - self.prompt_length, 0)]
        return Append(
            session_id=self.identity.session_id,
            epoch=self.identity.epoch,
            owner=self.identity.owner,
            expected_length=start,
            token_ids=tuple(self.tokens.ids[start:end]),
            prefix_digest=self.tokens.digest(end),
            draft=self.draft,
            target=self.target,
            counters=self.counters,
            logprobs="".join(line + "\n" for line in lines),
            more_follow=end < self._showable_length,
        )

    def ending(self) -> Finish:
        """The end of a finished session."""
        if self._finish_reason is None:
            raise InvariantError(f"session {self.session_id} ends without a reason")
        return Finish(
            session_id=self.identity.session_id,
            epoch=self.identity.epoch,
            owner=self.identity.owner,
            length=self.length,
            reason=self._finish_reason,
            counters=self.counters,
        )

    def acknowledge(self, stored_length: int) -> None:
        """The store holds `stored_length` tokens of this session: fewer than before, even of the
        prompt, if it lost its tail."""
        check(self._state is not OwnedState.LOST, "the store acknowledged a lost session")
        check(
            0 <= stored_length <= self.length,
            f"the store holds {stored_length} tokens of a session that has {self.length}",
        )
        self._acknowledged_length = stored_length
        self._showable_length = max(self._showable_length, stored_length)

    def finish(self, reason: FinishReason) -> None:
        """No more tokens will be decided. What the store lacks is still to be sent."""
        check(self._state is OwnedState.RUNNING, f"finished a {self._state} session")
        self._state = OwnedState.FINISHED
        self._finish_reason = reason

    def supersede(self, error: OutriderError) -> None:
        """The session is another owner's (`StaleEpoch`) or gone (`DataLoss`). Tokens that were
        not stored will never be shown."""
        check(self._state is not OwnedState.LOST, "superseded a lost session")
        self._state = OwnedState.LOST
        self._error = error

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless the inequalities of the module's docstring hold."""
        check(self.epoch >= FIRST_EPOCH, f"epoch {self.epoch}")
        check(
            0 < self.prompt_length <= self._showable_length <= self.length,
            f"prompt {self.prompt_length}, showable {self._showable_length}, all {self.length}",
        )
        check(
            0 <= self._acknowledged_length <= self._showable_length,
            f"stored {self._acknowledged_length}, showable {self._showable_length}",
        )
        num_outputs = self.length - self.prompt_length
        check(
            len(self._logprobs) in (0, num_outputs),
            f"{len(self._logprobs)} log-probabilities for {num_outputs} tokens",
        )
        check((self._error is not None) == (self._state is OwnedState.LOST), "error and state")
        if self._state is not OwnedState.LOST:
            finished = self._state is OwnedState.FINISHED
            check((self._finish_reason is not None) == finished, "finish reason and state")
