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

    A drafter checks the limit before each draw (a token with its siblings), and proposes everything
    that it has drawn. So the length of a proposal depends on the time and on proposed tokens, never
    on a token that was drawn and dropped. That length is a stopping time, as docs/exactness.md
    requires. Thread-safe.
    """

    def __init__(
        self, ends_at: float = math.inf, clock: Callable[[], float] = lambda: -math.inf
    ) -> None:
        """`ends_at` is a time of `clock`, both in seconds; by default there is no limit."""
        self.ends_at = ends_at
        self.has_cut = False
        """Whether a draw was refused; all later ones are refused, too."""
        self._clock = clock
        self._has_drawn = self._is_told = False
        self._lock = threading.Lock()

    @classmethod
    def after(
        cls, budget_us: int, clock: Callable[[], float], now: float | None = None
    ) -> DraftDeadline:
        """`budget_us` microseconds after `now` (default: the clock's time); 0 = no limit."""
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
        """Refuses all further draws if none has been made. Only the first call that does so returns
        True, so that one caller reports it."""
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
    """Identifies what a drafter may have kept of this session; the answer does not depend on it."""
    tenant: str
    """The session's tenant: what is kept of finished sessions is used for this tenant alone."""
    token_ids: Sequence[int]
    """All committed tokens, prompt first; read only, and only during the call."""
    prompt_length: int
    num_draft_tokens: int
    """K, 0..`limits.NUM_DRAFT_TOKENS_MAX`."""
    sampling: SamplingParams
    rule: Rule
    noise: RoundNoise
    """The round's noise; drafters without a distribution do not use it."""
    siblings: tuple[int, ...] = ()
    """Number of further candidates for each position of the proposal; missing entries are 0. A
    drafter without candidates proposes a chain. Empty under the rule block, and with penalties, as
    these count the tokens of a chain."""
    features: Features | None = None
    """Hidden states that the target sends to a head, for some committed tokens; None if there are
    no new ones, and for drafters that do not use them."""
    allowed: Allowed | None = None
    """What may follow the committed tokens by the session's grammar; None = everything, or unknown
    here."""
    digests: TokenSequence | None = None
    """The first tokens of `token_ids` with their digests, as far as these are known; a drafter can
    compare the prefix that it keeps by digest. Read only, and only during the call."""
    deadline: DraftDeadline = field(default=NO_DEADLINE, compare=False)
    """Checked before each draw, except by look-ups, which draw nothing and take next to no time."""


class Drafter(Protocol):
    """Predicts what a target will write. A wrong guess is rejected and does no harm.

    A proposal may depend on the request's committed tokens, parameters and noise, and on the
    answers of finished sessions of the same tenant. It must not depend on a token that was drafted
    and not committed, in this round or another. Nor may it depend on the noise of the
    session's own rounds, except through their committed tokens: what decides which tokens are
    drafted, and how many, must be independent of the numbers that test them. The number of tokens
    may depend on the time and on proposed tokens, if it is decided before each draw. So answers of
    a session with the same seed must not be used, except where noise is keyed by the absolute
    position: there, drafts do not influence what is committed.

    If answers of other sessions arrive between two calls, a round that is asked for twice may get
    two different proposals. Both are exact: a coordinator verifies one proposal a round, and the
    first verdict on it stands.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request, in order, of at most K tokens. At most one request a
        session. Under rules with `needs_q`, `q` has an entry for each token."""
        ...

    def release(self, session_id: str) -> None:
        """Forgets what was kept of the session; unknown sessions are ignored."""
        ...
