"""The request that a drafter answers with a proposal: a `DraftRequest` with a `DraftDeadline`.

A proposal may depend on the request's committed tokens, parameters and random numbers (`noise`),
and on answers of the tenant's finished sessions. It must not depend on uncommitted draft tokens.
Before each draw, a drafter may stop, depending on the time and on the tokens drawn so far.

Draft tokens and their number must be independent of the random numbers that test the tokens. So
under the rules token and block, a proposal must not depend on answers of other sessions with the
same seed, which had the same random numbers. Coupled and greedy do not need this, because under
them, committed tokens never depend on proposals."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.drafters.features import Features
from outrider.foundation.tokens import TokenSequence
from outrider.grammar.token_mask import AllowedTokens
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams


class DraftDeadline:
    """The time limit of a round's draft. A drafter checks it before each draw, and proposes all
    tokens that it has drawn. So the length of a proposal never depends on a token that was drawn
    and dropped, as the proof in docs/exactness.md requires. Thread-safe."""

    def __init__(
        self, ends_at: float = math.inf, clock: Callable[[], float] = lambda: -math.inf
    ) -> None:
        """`ends_at` is a time of `clock`, in seconds."""
        self.ends_at = ends_at
        self.has_cut = False
        """Whether a draw was refused. After a refusal, all later draws are refused too."""
        self._clock = clock
        self._has_drawn = self._is_told = False
        self._lock = threading.Lock()

    @classmethod
    def after(
        cls, budget_us: int, clock: Callable[[], float], now: float | None = None
    ) -> DraftDeadline:
        """A limit `budget_us` microseconds (0 = no limit) after `now` (None = the current time)."""
        if budget_us == 0:
            return NO_DEADLINE
        return cls((clock() if now is None else now) + budget_us / 1e6, clock)

    def allows_draw(self) -> bool:
        """Whether the next token may be drawn. After True, the token must be drawn and proposed."""
        if self.ends_at == math.inf:
            return True
        with self._lock:
            self.has_cut = self.has_cut or self._clock() >= self.ends_at
            self._has_drawn = self._has_drawn or not self.has_cut
            return not self.has_cut

    @property
    def is_over(self) -> bool:
        return self._clock() >= self.ends_at

    def close_undrawn(self) -> bool:
        """If no token has been drawn, refuses all draws from now on. The first call that does this
        returns True, and its caller must report an empty proposal. Other calls return False."""
        with self._lock:
            if self._has_drawn or self._is_told:
                return False
            self.has_cut = self._is_told = True
            return True


NO_DEADLINE = DraftDeadline()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for up to `num_draft_tokens` tokens after the committed tokens of a session."""

    session_id: str
    """A drafter may cache data under this id, but the data must not change proposals."""
    tenant: str
    token_ids: Sequence[int]
    """All committed tokens, prompt first. After the drafter's answer, the sequence may change."""
    prompt_length: int
    num_draft_tokens: int
    sampling: SamplingParams
    rule: Rule
    noise: RoundNoise
    features: Features | None = None
    """New features of committed tokens, for a head."""
    allowed: AllowedTokens | None = None
    """The tokens that may follow. None = all tokens, or unknown to this process."""
    digests: TokenSequence | None = None
    """A prefix of `token_ids` with known digests, for a quick comparison with a cached prefix. Like
    `token_ids`, it may change after the drafter's answer."""
    deadline: DraftDeadline = field(default=NO_DEADLINE, compare=False)
    """Look-ups ignore the deadline, because they take only microseconds."""
    min_chance: float = 0.0
    """A look-up ends its proposal before the chance that all its tokens are accepted falls below
    this value, as far as the look-up can tell. Other drafters ignore it."""
