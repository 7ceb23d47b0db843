"""The interface of drafters for the draft service and the coordinator."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.grammar.token_mask import Allowed
from outrider.hidden_states import Features
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokens import TokenSequence


class DraftDeadline:
    """The time limit of a round's draft, on the clock of the drafting process.

    A drafter checks the limit before each draw (a token with its siblings), and proposes all tokens
    that it has drawn. So the length of a proposal depends on the time and on proposed tokens, never
    on a token that was drawn and dropped. docs/exactness.md requires such a length, a stopping
    time. Thread-safe.
    """

    def __init__(
        self, ends_at: float = math.inf, clock: Callable[[], float] = lambda: -math.inf
    ) -> None:
        """`ends_at` is a time of `clock`, in seconds. By default there is no limit."""
        self.ends_at = ends_at
        self.has_cut = False
        """Whether a draw was refused. Then all later ones are refused, too."""
        self._clock = clock
        self._has_drawn = self._is_told = False
        self._lock = threading.Lock()

    @classmethod
    def after(
        cls, budget_us: int, clock: Callable[[], float], now: float | None = None
    ) -> DraftDeadline:
        """A limit `budget_us` microseconds after `now` (default: the clock's time); 0 = none."""
        if budget_us == 0:
            return NO_DEADLINE
        return cls((clock() if now is None else now) + budget_us / 1e6, clock)

    def allows_draw(self) -> bool:
        """Whether the next token may be drawn. After True the token must be proposed."""
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
        """Refuses all draws if none has been made. Returns whether this call was the first to do
        so, so that only one caller reports an empty proposal."""
        with self._lock:
            if self._has_drawn or self._is_told:
                return False
            self.has_cut = self._is_told = True
            return True


NO_DEADLINE = DraftDeadline()
"""Allows every draw."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for up to `num_draft_tokens` tokens after the committed ones of one session."""

    session_id: str
    """A drafter may keep data of this session under this id. The answer does not depend on them."""
    tenant: str
    """Data of finished sessions are used for sessions of the same tenant alone."""
    token_ids: Sequence[int]
    """All committed tokens, prompt first. Must not be changed, nor be read after the call."""
    prompt_length: int
    num_draft_tokens: int
    """K, 0..`limits.NUM_DRAFT_TOKENS_MAX`."""
    sampling: SamplingParams
    rule: Rule
    noise: RoundNoise
    """The round's noise. Look-ups do not draw with it."""
    siblings: tuple[int, ...] = ()
    """Number of siblings beside each token of the spine; missing entries are 0. A drafter may
    propose a chain instead. Empty under the rule block, and with penalties, as these count the
    tokens of a chain."""
    features: Features | None = None
    """Hidden states of some committed tokens, which the target sends to a head. None if there are
    no new ones, and for drafters that do not use them."""
    allowed: Allowed | None = None
    """What may follow the committed tokens by the session's grammar; None = every token, or the
    grammar is not known to this process."""
    digests: TokenSequence | None = None
    """The first tokens of `token_ids`, as many as have known digests. By these a drafter can
    compare a prefix that it keeps. Must not be changed, nor be read after the call."""
    deadline: DraftDeadline = field(default=NO_DEADLINE, compare=False)
    """Drafters check this before each draw, except for look-ups, which take some microseconds."""


class Drafter(Protocol):
    """Predicts what a target will write. Wrong guesses are rejected and do no harm.

    A proposal may depend on the request's committed tokens, parameters and noise, and on the
    answers of finished sessions of the same tenant. It must not depend on a token that was drafted
    and not committed, in this round or another. The choice of draft tokens, and of their number,
    must be independent of the random numbers that test them. So a proposal must not depend on the
    noise of the session's earlier rounds, except through their committed tokens, nor on answers of
    a session with the same seed. The latter are allowed if noise is keyed by the absolute position,
    as drafts then do not influence what is committed. The number of tokens may depend on the time
    and on proposed tokens, if it is decided before each draw.

    If answers of other sessions arrive between two calls for one round, the calls may return
    different proposals. Both are exact: a coordinator verifies one proposal in a round, and uses
    the first verdict on it.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request, in order, of at most K tokens. The requests are for
        different sessions. Under rules with `needs_q`, `q` has an entry for each group of
        siblings."""
        ...

    def release(self, session_id: str) -> None:
        """Forgets what was kept of the session. Ignores unknown sessions."""
        ...
