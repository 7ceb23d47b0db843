"""The state of one session at its owner, the coordinator that runs it: how many tokens are decided,
how many are stored, and how many may be shown to the client.

    prompt_length <= showable_length <= length, the number of decided tokens
    acknowledged_length <= showable_length; they are equal unless the store has lost tokens

The owner decides tokens, sends `next_append()` to the store, and passes the store's answer to
`acknowledge()`. If the store has lost the session's last tokens, the answer is a smaller length,
and the owner sends the lost tokens again. They stay showable, because the client may have them."""

from collections.abc import Sequence
from dataclasses import replace

from outrider.errors import InvariantError, OutriderError, check
from outrider.foundation.tokens import TokenSequence
from outrider.limits import APPEND_TOKENS_MAX
from outrider.sessions import store


class Session:
    """The tokens of one session, and how many of them are stored. Not thread-safe."""

    def __init__(self, record: store.SessionRecord) -> None:
        check(record.finish_reason is None, "resumed a finished session")
        self.record = replace(record, token_ids=(), logprobs="", parameters="")
        """The session's record without tokens and parameters. Only fields that never change are up
        to date."""
        self.session_id, self.epoch = record.session_id, record.epoch
        self.prompt_length = record.prompt_length
        self.tokens = TokenSequence(record.token_ids)
        """All decided tokens, prompt first. Only `decide` appends to them."""
        self.counters = record.counters
        self.draft = record.draft
        self.target = record.target
        self.logprobs = record.logprobs.split("\n")[:-1]
        """One JSON line for each token after the prompt, or no lines."""
        self.acknowledged_length = len(self.tokens)
        """Number of tokens that the store held when it last answered."""
        self.showable_length = len(self.tokens)
        """The largest number of tokens that the store has held."""
        self.finish_reason: store.FinishReason | None = None
        """None while the session runs. After the end, the store may still lack the last tokens."""
        self.error: OutriderError | None = None
        self.check_integrity()

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_uncommitted(self) -> int:
        return len(self.tokens) - self.acknowledged_length

    @property
    def has_news(self) -> bool:
        """Whether there are tokens to send to the store."""
        return self.error is None and self.num_uncommitted > 0

    def decide(
        self,
        token_ids: Sequence[int],
        counters: store.Counters,
        *,
        draft: store.CacheState | None = None,
        target: store.CacheState | None = None,
        logprobs: Sequence[str] = (),
    ) -> None:
        """Appends the tokens of one outcome. `counters` count the whole session. If `draft` or
        `target` is None, the session's earlier value stays. `logprobs` has one line for each token,
        or is empty in all calls."""
        self._check_running("decided tokens of")
        check(len(token_ids) > 0, "an outcome without tokens")
        num_outputs = self.length + len(token_ids) - self.prompt_length
        check(
            len(self.logprobs) + len(logprobs) in (0, num_outputs),
            "log-probabilities for some tokens but not for all",
        )
        self.tokens.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.counters = counters
        self.draft = draft or self.draft
        self.target = target or self.target

    def next_append(self) -> store.Append | None:
        """Returns an append of at most `APPEND_TOKENS_MAX` tokens that the store lacks, or None if
        the store has all. Until the next `acknowledge`, all appends start at the same token."""
        if not self.has_news:
            return None
        start = self.acknowledged_length
        end = min(self.length, start + APPEND_TOKENS_MAX)
        first_line = max(start - self.prompt_length, 0)
        lines = self.logprobs[first_line : max(end - self.prompt_length, 0)]
        record = self.record
        return store.Append(
            session_id=record.session_id,
            epoch=record.epoch,
            owner=record.owner,
            expected_length=start,
            token_ids=tuple(self.tokens.ids[start:end]),
            prefix_digest=self.tokens.digest(end),
            draft=self.draft,
            target=self.target,
            counters=self.counters,
            logprobs="".join(line + "\n" for line in lines),
            more_follow=end < self.showable_length,
        )

    def ending(self) -> store.Finish:
        """Returns the message that ends this session in the store."""
        record = self.record
        if self.finish_reason is None:
            raise InvariantError(f"session {record.session_id} ends without a reason")
        return store.Finish(
            session_id=record.session_id,
            epoch=record.epoch,
            owner=record.owner,
            length=self.length,
            reason=self.finish_reason,
            counters=self.counters,
        )

    def acknowledge(self, stored_length: int) -> None:
        """Records that the store holds `stored_length` tokens. If the store has lost tokens, this
        number may be smaller than before, and even smaller than the prompt's length."""
        check(self.error is None, "the store acknowledged a lost session")
        if not 0 <= stored_length <= self.length:
            raise InvariantError(
                f"the store holds {stored_length} tokens of a session that has {self.length}"
            )
        self.acknowledged_length = stored_length
        self.showable_length = max(self.showable_length, stored_length)

    def finish(self, reason: store.FinishReason) -> None:
        """Ends the session. `next_append` still returns the tokens that the store lacks."""
        self._check_running("finished")
        self.finish_reason = reason

    def supersede(self, error: OutriderError) -> None:
        """Marks the session as lost: another coordinator took it over (`StaleEpoch`), or it is no
        longer stored (`DataLoss`). A lost session sends nothing more to the store, and shows only
        tokens that were stored."""
        check(self.error is None, "superseded a lost session")
        self.error = error

    def check_integrity(self) -> None:
        """Raises `InvariantError` if an inequality of the module's docstring does not hold."""
        check(self.epoch >= store.FIRST_EPOCH, f"epoch {self.epoch}")
        prompt, stored, showable = (
            self.prompt_length,
            self.acknowledged_length,
            self.showable_length,
        )
        check(
            0 < prompt <= showable <= self.length and 0 <= stored <= showable,
            f"prompt {prompt}, stored {stored}, showable {showable}, all {self.length}",
        )
        num_outputs = self.length - self.prompt_length
        check(
            len(self.logprobs) in (0, num_outputs),
            f"{len(self.logprobs)} log-probabilities for {num_outputs} tokens",
        )

    def _check_running(self, action: str) -> None:
        if ended := self.error or self.finish_reason:
            raise InvariantError(f"{action} a session that is over: {ended}")
