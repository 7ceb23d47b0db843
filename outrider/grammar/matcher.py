"""Computes which tokens may follow a session's tokens, by the session's grammar.

If a text can continue in only one way, a mask allows only the token with which the tokenizer would
begin this continuation. The grammar also accepts other tokens that begin this continuation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from outrider.errors import BadRequest, Incompatible, OutriderError, check
from outrider.grammar.compiler import Grammar, Grammars
from outrider.grammar.token_mask import TokenMask
from outrider.limits import FOLLOWED_AT_ONCE, MASK_S_MAX, MATCHERS_MAX
from outrider.newest import Newest

_USED_UP = "it needs too many states"


class PrefixMatcher:
    """Follows one completion. This class, not the grammar, handles end tokens, because the grammar
    only tells whether the text may end."""

    def __init__(self, grammar: Grammar, grammars: Grammars) -> None:
        """If the grammar is *used up* (has no states left), `grammars` replaces it."""
        self.grammar = grammar
        self._grammars = grammars
        self._matcher: LLMatcher = grammar.start.deep_copy()
        self._is_broken = False
        """Whether the grammar's matcher has failed and must be rebuilt."""
        self._is_ahead = False
        """Whether the next mask is for a position after draft tokens."""
        self._tokens: list[int] = []
        """The tokens up to the current state, all of which are allowed."""
        self._num_fed = 0
        """The number of `_tokens` before the first end token. The grammar has consumed these
        tokens."""

    def ask_ahead(self, is_ahead: bool) -> None:
        """Sets whether the next calls of `stand` and `mask` are for a position after draft tokens.
        Raises `Incompatible` if the grammar has been too slow after draft tokens."""
        self._is_ahead = is_ahead
        if is_ahead and self.grammar in self._grammars.slow_ahead:
            raise Incompatible(f"{self.grammar.constraint.kind}: is too slow after draft tokens")

    def stand(self, length: int, token_ids: Sequence[int]) -> int:
        """Keeps the first `length` of the current tokens, then adds `token_ids` up to the first
        token that the grammar does not allow. Returns the number of `token_ids` that were added.
        Raises `Incompatible` if the grammar takes too many states or too long."""
        tokens = self._tokens
        check(length <= len(tokens), f"{length} of {len(tokens)} tokens cannot be kept")
        common = 0
        for token_id, there in zip(token_ids, tokens[length:], strict=False):
            if token_id != there:
                break
            common += 1
        self._back_to(length + common)
        num_legal = common + self._consume(token_ids[common:])
        if num_legal < len(token_ids) and self._mend():
            num_legal += self._consume(token_ids[num_legal:])
            if num_legal < len(token_ids) and self.grammar.is_used_up():
                raise self._too_hard(_USED_UP)
        return num_legal

    def mask(self) -> TokenMask:
        """The tokens that may come next. Raises `Incompatible` if no token may come next, or if the
        grammar takes too many states or too long."""
        if self._num_fed < len(self._tokens):
            return self.grammar.tokenizer.eos_mask
        began = self._grammars.clock()
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._mend():
            mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._too_hard()
        self._check_time(began, 1)
        bits = np.frombuffer(mask, dtype=np.uint8)
        if not bits.any():
            raise self._too_hard("no token can follow")
        return TokenMask(bits)

    def _consume(self, token_ids: Sequence[int]) -> int:
        """Adds `token_ids` up to the first illegal token. Returns the number of added tokens."""
        tokenizer, num_legal = self.grammar.tokenizer, 0
        ends = tokenizer.eos_token_ids
        if self._num_fed == len(self._tokens):
            words = []
            for token_id in token_ids:
                if token_id in ends or token_id >= tokenizer.tokens.vocab_size:
                    break
                words.append(token_id)
            num_legal = self._feed(words)
            self._tokens += words[:num_legal]
            self._num_fed += num_legal
            may_end = num_legal == len(words) < len(token_ids) and self._matcher.is_accepting()
            if not may_end:
                return num_legal
        for token_id in token_ids[num_legal:]:
            if token_id not in ends:
                break
            self._tokens.append(token_id)
            num_legal += 1
        return num_legal

    def _feed(self, words: Sequence[int]) -> int:
        """Feeds `words` to the grammar up to the first illegal token. Returns the number fed."""
        if not words:
            return 0
        began = self._grammars.clock()
        num_legal = int(self._matcher.try_consume_tokens(list(words)))
        self._check_time(began, len(words))
        return num_legal

    def _back_to(self, length: int) -> None:
        del self._tokens[length:]
        back = self._num_fed - length
        self._num_fed = min(self._num_fed, length)
        if back > 0 and not self._is_broken:
            self._is_broken = not self._matcher.rollback(back) or self._matcher.is_error()
        if self._is_broken and not self._start_over() and not self._mend():
            raise self._too_hard()

    def _mend(self) -> bool:
        """If the grammar is used up, replaces the grammar and returns True. Raises `Incompatible`
        if the constraint gets no new grammar, or if the matcher has failed for another reason."""
        if self.grammar.is_used_up():
            try:
                self.grammar = self._grammars.renewed(self.grammar)
            except OutriderError as error:
                raise self._too_hard(error.message) from error
            if not self._start_over():
                raise self._too_hard(_USED_UP)
            return True
        if self._matcher.is_error():
            raise self._too_hard()
        return False

    def _start_over(self) -> bool:
        """Rebuilds the state with a new matcher. Returns whether the matcher accepts the tokens."""
        self._matcher = self.grammar.start.deep_copy()
        words = self._tokens[: self._num_fed]
        self._is_broken = self._feed(words) < len(words)
        return not self._is_broken

    def _check_time(self, began: float, num_tokens: int) -> None:
        """Reports a grammar that took too long, because all sessions of the step had to wait.
        Raises `Incompatible` if the constraint is now refused."""
        allowed = MASK_S_MAX * -(-num_tokens // FOLLOWED_AT_ONCE)
        if self._grammars.clock() - began <= allowed:
            return
        if self._is_ahead:
            self._grammars.slow_ahead.add(self.grammar)
            return
        try:
            self._grammars.note_slow(self.grammar)
        except BadRequest as error:
            raise self._too_hard(error.reason) from error

    def _too_hard(self, reason: str = "") -> Incompatible:
        self._is_broken = True
        said = " ".join((reason or self._matcher.get_error() or "it is too hard").split())[:200]
        kind, num_tokens = self.grammar.constraint.kind, self._num_fed
        return Incompatible(f"{kind}: cannot be followed after {num_tokens} tokens: {said}")


class Followed:
    """Implements `Allowed`."""

    __slots__ = ("_committed", "_length", "_matcher")

    def __init__(
        self, matcher: PrefixMatcher, length: int, committed: tuple[int, ...] = ()
    ) -> None:
        """The committed tokens are the matcher's first `length` tokens, and then `committed`."""
        self._matcher = matcher
        self._length = length
        self._committed = committed

    def after(self, drafted: Sequence[int]) -> TokenMask | None:
        tokens = (*self._committed, *drafted)
        self._matcher.ask_ahead(len(drafted) > 0)
        if self._matcher.stand(self._length, tokens) < len(tokens):
            return None
        return self._matcher.mask()

    def behind(self, committed: Sequence[int]) -> Followed:
        return Followed(self._matcher, self._length, (*self._committed, *committed))


class Matchers:
    """The matchers of a replica's sessions. Keeps the `MATCHERS_MAX` most recently used matchers.
    Builds other matchers again. Only the thread that runs steps may use this object."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: Newest[str, PrefixMatcher] = Newest(MATCHERS_MAX)

    def follow(
        self, session_id: str, compiled: Grammar | OutriderError, completion: Sequence[int]
    ) -> Followed:
        """Tells which tokens may follow a session's completion. The result is valid until the next
        call for this session. `compiled` is what `Grammars.find` has returned. Raises
        `Incompatible` if the constraint is refused, or does not allow the completion."""
        matcher = self._matchers.pop(session_id, None)
        if isinstance(compiled, OutriderError):
            raise Incompatible(compiled.message) from compiled
        refused = self._grammars.find(compiled.digest, compiled.tenant)
        if isinstance(refused, OutriderError):
            raise Incompatible(refused.message) from refused
        if matcher is None or matcher.grammar.key != compiled.key:
            matcher = PrefixMatcher(compiled, self._grammars)
        matcher.ask_ahead(False)
        num_legal = matcher.stand(0, completion)
        if num_legal < len(completion):
            kind = compiled.constraint.kind
            raise Incompatible(f"{kind}: does not allow token {num_legal} of the completion")
        self._matchers[session_id] = matcher
        return Followed(matcher, len(completion))

    def release(self, session_id: str) -> None:
        """Forgets a session. Ignores unknown sessions."""
        self._matchers.pop(session_id, None)
