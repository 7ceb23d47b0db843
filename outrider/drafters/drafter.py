"""What every drafter looks like to the draft service and to the coordinator."""

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
    """The time that a round gives its draft, on the clock of the process that drafts.

    A drafter asks before each draw, of a token and its siblings together, whether to make it, and
    proposes everything that it has drawn. So the length of a proposal depends on the time and on
    the tokens that are proposed, and never on a token that was drawn and dropped: it is a stopping
    time, which docs/exactness.md needs. May be used by several threads."""

    def __init__(
        self, ends_at: float = math.inf, clock: Callable[[], float] = lambda: -math.inf
    ) -> None:
        """`ends_at` is a time of `clock`, both in seconds; without them there is no bound."""
        self.ends_at = ends_at
        self.has_cut = False
        """Whether a draw was not allowed: no later one is."""
        self._clock = clock
        self._has_drawn = self._is_told = False
        self._lock = threading.Lock()

    @classmethod
    def after(
        cls, budget_us: int, clock: Callable[[], float], now: float | None = None
    ) -> DraftDeadline:
        """So many microseconds from `now` on, by default what the clock says; 0 = no bound."""
        if budget_us == 0:
            return NO_DEADLINE
        return cls((clock() if now is None else now) + budget_us / 1e6, clock)

    def allows_draw(self) -> bool:
        """Whether the next token may be drawn. True is a promise: the token is proposed."""
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
        """Allows no draw any more, if none was made: then True, once, for the caller that tells
        so."""
        with self._lock:
            if self._has_drawn or self._is_told:
                return False
            self.has_cut = self._is_told = True
            return True


NO_DEADLINE = DraftDeadline()
"""Every draw may be made."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for up to `num_draft_tokens` tokens after the committed ones of one session."""

    session_id: str
    """Names what a drafter may have kept of this session; the answer does not depend on it."""
    tenant: str
    """Whose session it is: what a drafter keeps of finished sessions is for their tenant alone."""
    token_ids: Sequence[int]
    """All committed tokens, prompt first; read only, and only during the call."""
    prompt_length: int
    num_draft_tokens: int
    """K, 0..`limits.NUM_DRAFT_TOKENS_MAX`."""
    sampling: SamplingParams
    rule: Rule
    noise: RoundNoise
    """The round's numbers; drafters without a distribution of their own draw none."""
    siblings: tuple[int, ...] = ()
    """Candidates that are wanted beside the first, second, ... token of the proposal, 0 behind
    them; a drafter that has none proposes a chain. None with penalties, which count tokens, or
    under block."""
    features: Features | None = None
    """What a head makes of its target's layers at some committed tokens, which its target sends;
    None where there is nothing new, and for drafters that do not read it."""
    allowed: Allowed | None = None
    """What may follow the committed tokens, by the session's grammar; None = anything, or nobody
    here knows."""
    digests: TokenSequence | None = None
    """The first of `token_ids`, or all, where their digests are known: whoever kept a prefix then
    need not compare it token by token. Read only, and only during the call."""
    deadline: DraftDeadline = field(default=NO_DEADLINE, compare=False)
    """Asked before each draw; look-ups, which draw nothing and take next to no time, do not ask."""


class Drafter(Protocol):
    """Guesses what a target will write. A guess is never wrong, only refused.

    A proposal depends on the request's committed tokens, parameters and noise, and beyond these at
    most on what finished sessions of the same tenant were answered. It depends on no token that was
    drafted and not committed, this round's or another's, and not on the noise of its own session's
    rounds but through their committed tokens: what decides which tokens are drafted, and how many,
    must say nothing of the numbers that they are tested with. How many may depend on the time and
    on the tokens that are proposed, if it is decided before each draw. So the answers of a session
    with the same seed are no help, unless noise is keyed by the absolute position, where no drafted
    token has a say in what is committed.

    Where such answers arrive between two calls, a round that is asked for twice may be proposed two
    different drafts. Either is as exact: a coordinator verifies one proposal a round, and the first
    verdict on it stands.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request, in order; of K tokens or fewer, none included. At most
        one request a session. Under rules with `needs_q`, `q` has an entry for each token."""
        ...

    def release(self, session_id: str) -> None:
        """Forgets what was kept of the session; unknown ones are ignored."""
        ...
