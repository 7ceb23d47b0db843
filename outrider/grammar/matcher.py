"""Computes which tokens may follow a session's tokens, by the session's grammar.

If a text can continue in only one way, a mask allows only the token with which the tokenizer would
begin this continuation. `PrefixMatcher.replace_from` also accepts other tokens that begin it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, count, takewhile
from operator import ne

import numpy as np
from llguidance import LLMatcher

from outrider import limits
from outrider.errors import BadRequest, Incompatible, OutriderError, check
from outrider.foundation.bounded_dict import BoundedDict
from outrider.grammar.compiler import Grammar, Grammars
from outrider.grammar.token_mask import TokenMask

_USED_UP = "needs too many lexer states"


class PrefixMatcher:
    """The state of a grammar after the tokens of a completion. This class handles end tokens, too,
    because the grammar only tells whether the text may end."""

    def __init__(self, grammar: Grammar, grammars: Grammars) -> None:
        """If the grammar is *used up* (has no lexer states left), `grammars` replaces it."""
        self.grammar = grammar
        self._grammars = grammars
        self._matcher: LLMatcher = grammar.start.deep_copy()
        self._is_broken = False  # whether the grammar's matcher has failed and must be rebuilt
        self._is_ahead = False  # whether `_tokens` has draft tokens
        self._tokens: list[int] = []  # the tokens up to the current state, all of which are allowed
        self._num_fed = 0
        """The number of `_tokens` that the grammar has consumed: those before an end token."""

    def replace_from(self, length: int, token_ids: Sequence[int], is_ahead: bool = False) -> int:
        """Keeps the first `length` of the current tokens, then adds `token_ids` up to the first
        token that the grammar does not allow. Returns the number of added tokens. `is_ahead` says
        whether `token_ids` has draft tokens. Raises `Incompatible` if the grammar needs too many
        states or too much time. Also raises it for draft tokens if earlier ones took too long."""
        self._is_ahead = is_ahead
        if is_ahead and self.grammar in self._grammars.slow_ahead:
            raise Incompatible(f"{self.grammar.constraint.kind}: is too slow for draft tokens")
        num_held = len(self._tokens)
        check(length <= num_held, f"{length} of {num_held} tokens cannot be kept")
        differences = compress(count(), map(ne, token_ids, self._tokens[length:]))
        common = next(differences, min(len(token_ids), num_held - length))
        self._back_to(length + common)
        num_legal = common + self._consume(token_ids[common:])
        if num_legal < len(token_ids) and self._renew_grammar():
            num_legal += self._consume(token_ids[num_legal:])
            if num_legal < len(token_ids) and self.grammar.is_used_up():
                raise self._too_hard(_USED_UP)
        return num_legal

    def mask(self) -> TokenMask:
        """The tokens that may come next. Raises `Incompatible` if no token may come next, or if the
        grammar needs too many states or too much time."""
        if self._num_fed < len(self._tokens):
            return self.grammar.tokenizer.eos_mask
        began = self._grammars.clock()
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._renew_grammar():
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
        ends, vocab_size = tokenizer.eos_token_ids, tokenizer.tokens.vocab_size
        if self._num_fed == len(self._tokens):
            words = [*takewhile(lambda v: v not in ends and v < vocab_size, token_ids)]
            num_legal = self._feed(words)
            self._tokens += words[:num_legal]
            self._num_fed += num_legal
            may_end = num_legal == len(words) < len(token_ids) and self._matcher.is_accepting()
            if not may_end:
                return num_legal
        added = [*takewhile(ends.__contains__, token_ids[num_legal:])]
        self._tokens += added
        return num_legal + len(added)

    def _feed(self, words: list[int]) -> int:
        """Feeds `words` to the grammar up to the first illegal token. Returns the number fed."""
        if not words:
            return 0
        began = self._grammars.clock()
        num_legal = int(self._matcher.try_consume_tokens(words))
        self._check_time(began, len(words))
        return num_legal

    def _back_to(self, length: int) -> None:
        del self._tokens[length:]
        back = self._num_fed - length
        self._num_fed = min(self._num_fed, length)
        if back > 0 and not self._is_broken:
            self._is_broken = not self._matcher.rollback(back) or self._matcher.is_error()
        if self._is_broken and not self._start_over() and not self._renew_grammar():
            raise self._too_hard()

    def _renew_grammar(self) -> bool:
        """If the grammar is used up, replaces the grammar and returns True. Raises `Incompatible`
        if the constraint gets no new grammar, or if the matcher has failed for another reason."""
        if not self.grammar.is_used_up():
            if self._matcher.is_error():
                raise self._too_hard()
            return False
        try:
            self.grammar = self._grammars.renewed(self.grammar)
        except BadRequest as error:
            raise self._too_hard(error.reason) from error
        if not self._start_over():
            raise self._too_hard(_USED_UP)
        return True

    def _start_over(self) -> bool:
        """Rebuilds the state with a new matcher. Returns whether the matcher accepts the tokens."""
        self._matcher = self.grammar.start.deep_copy()
        words = self._tokens[: self._num_fed]
        self._is_broken = self._feed(words) < len(words)
        return not self._is_broken

    def _check_time(self, began: float, num_tokens: int) -> None:
        """If the grammar took so long that it delayed the step, records this in `Grammars`. Raises
        `Incompatible` if `Grammars` now refuses the constraint."""
        allowed = limits.MASK_S_MAX * -(-num_tokens // limits.FOLLOWED_AT_ONCE)
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
        message = reason or self._matcher.get_error() or "the reason is unknown"
        message = " ".join(message.split())[:200]
        kind, num_tokens = self.grammar.constraint.kind, self._num_fed
        return Incompatible(f"{kind}: cannot be applied after {num_tokens} tokens: {message}")


@dataclass(frozen=True, slots=True, eq=False)
class AllowedByGrammar:
    """An `AllowedTokens` (`token_mask.py`) that asks a grammar which tokens may follow."""

    matcher: PrefixMatcher
    length: int
    """The committed tokens are the matcher's first `length` tokens, and then `committed`."""
    committed: tuple[int, ...] = ()

    def mask_after(self, drafted: Sequence[int]) -> TokenMask | None:
        tokens = (*self.committed, *drafted)
        if self.matcher.replace_from(self.length, tokens, is_ahead=len(drafted) > 0) < len(tokens):
            return None
        return self.matcher.mask()

    def advanced(self, committed: Sequence[int]) -> AllowedByGrammar:
        return replace(self, committed=(*self.committed, *committed))


class Matchers:
    """The matchers of a replica's sessions. Keeps the `MATCHERS_MAX` most recently used matchers,
    and rebuilds others on demand. Only the thread that runs steps may use this object."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: BoundedDict[str, PrefixMatcher] = BoundedDict(limits.MATCHERS_MAX)

    def allowed_tokens(
        self, session_id: str, compiled: Grammar | OutriderError, completion: Sequence[int]
    ) -> AllowedByGrammar:
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
        num_legal = matcher.replace_from(0, completion)
        if num_legal < len(completion):
            kind = compiled.constraint.kind
            raise Incompatible(f"{kind}: does not allow token {num_legal} of the completion")
        self._matchers[session_id] = matcher
        return AllowedByGrammar(matcher, len(completion))

    def release(self, session_id: str) -> None:
        """Forgets a session. Ignores unknown sessions."""
        self._matchers.pop(session_id, None)
