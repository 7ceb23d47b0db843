"""The interface of drafters, which draft service, target service and coordinator call."""

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

    A drafter checks the limit before it draws each token with its siblings, and proposes all tokens
    that it has drawn. So the length of a proposal depends on the time and on proposed tokens, never
    on a token that was drawn and dropped. Such a length is a stopping time, as the proof in
    docs/exactness.md requires. Thread-safe.
    """

    def __init__(
        self, ends_at: float = math.inf, clock: Callable[[], float] = lambda: -math.inf
    ) -> None:
        """`ends_at` is a time of `clock`, in seconds. By default there is no limit."""
        self.ends_at = ends_at
        self.has_cut = False
        """Whether a draw was refused. After one refusal, all later draws are refused."""
        self._clock = clock
        self._has_drawn = self._is_told = False
        self._lock = threading.Lock()

    @classmethod
    def after(
        cls, budget_us: int, clock: Callable[[], float], now: float | None = None
    ) -> DraftDeadline:
        """A limit `budget_us` microseconds after `now`; 0 = no limit. `now` is by default the time
        of `clock`."""
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
        """If no token has been drawn, refuses all draws from now on. The first call that does so
        returns True, so that its caller reports an empty proposal. All other calls return False."""
        with self._lock:
            if self._has_drawn or self._is_told:
                return False
            self.has_cut = self._is_told = True
            return True


NO_DEADLINE = DraftDeadline()
"""Allows every draw."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for up to `num_draft_tokens` tokens after the committed tokens of a session."""

    session_id: str
    """A drafter may cache data of the session under this id. The cache must not change proposals.
    """
    tenant: str
    """A drafter may copy from answers of finished sessions, but only of the same tenant."""
    token_ids: Sequence[int]
    """All committed tokens, prompt first. A drafter must not change this sequence, nor read it
    after `propose` has returned."""
    prompt_length: int
    num_draft_tokens: int
    """K, 0..`limits.NUM_DRAFT_TOKENS_MAX`."""
    sampling: SamplingParams
    rule: Rule
    noise: RoundNoise
    """The round's random numbers, with which a model's tokens are drawn. Look-ups draw nothing."""
    siblings: tuple[int, ...] = ()
    """Number of siblings beside each token of the spine; missing entries are 0. A drafter may
    propose a chain instead. Empty under the rule block and with penalties, which support only
    chains."""
    features: Features | None = None
    """Hidden states of committed tokens, which the target has sent for a head. None if there are no
    new hidden states, or if the drafter reads none."""
    allowed: Allowed | None = None
    """Tokens that the session's grammar allows after the committed tokens. None if there is no
    grammar, or if this process does not know it."""
    digests: TokenSequence | None = None
    """A prefix of `token_ids` with known digests. A drafter compares it with a cached prefix
    without reading all tokens. It must not be changed, nor be read after `propose` has returned."""
    deadline: DraftDeadline = field(default=NO_DEADLINE, compare=False)
    """Drafters with a model check this time limit before each draw. Look-ups ignore the limit,
    because they take only microseconds."""


class Drafter(Protocol):
    """Predicts what a target will write. Wrong guesses are rejected, so they change no output.

    A proposal may depend on the request's committed tokens, parameters and noise, and on the
    answers of finished sessions of the same tenant. It must not depend on tokens that were drafted
    but not committed, in this round or another.

    Draft tokens and their number must be independent of the random numbers that test them. So the
    noise of the session's earlier rounds may influence a proposal only through committed tokens.
    If noise is keyed by the round, answers of sessions with the same seed must not influence a
    proposal. If noise is keyed by the absolute position, such answers may influence a proposal,
    because drafts then do not influence what is committed. Before each draw, a drafter may decide
    by the time and by the tokens proposed so far whether to continue.

    If another session ends between two calls for one round, the calls may return different
    proposals. The output is still exact, because a coordinator lets the target verify only one
    proposal in a round, and uses the first verdict.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Returns one proposal for each request, in order. No two requests are for the same
        session. A proposal's spine has at most K tokens. If the request's rule `needs_q`, the
        proposal's `q` has an entry for each token of the spine. The siblings of a token share its
        entry."""
        ...

    def release(self, session_id: str) -> None:
        """Frees the data of a session that has ended or left. Ignores unknown sessions."""
        ...
