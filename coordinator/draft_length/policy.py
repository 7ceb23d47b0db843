"""The planned length of a round, and the results of a finished round."""

import math
from typing import NamedTuple

from outrider.values import value


@value(frozen=True, slots=True)
class RoundLength:
    """The planned K of a round, and what follows from it."""

    num_draft_tokens: int
    run_ahead: int
    """Number of rounds after this round that certainly have no proposal. The target may run these
    rounds without waiting."""
    next_max: int = 0
    """Largest K of the next round. A target with a head drafts this many tokens together with this
    round's verdict."""
    draft_budget_s: float = math.inf
    """Time limit of this round's proposal. The configured limit of drafting applies, too."""
    is_timed: bool = True
    """Whether a time limit may stop the drafting for this round and, on the target, for the next.
    False if another session uses or has used the same seed. Times may then depend on the random
    numbers of this round, so a time limit could bias the output."""


class DraftedBeside(NamedTuple):
    """Drafting by a target in the same step as a verdict."""

    num_tokens: int
    """Number of drafted tokens. The round may use fewer."""
    seconds: float
    work_s: float
    """This session's share of `seconds`."""


@value(frozen=True, slots=True)
class PlayedRound:
    """Acceptance and times of a finished round."""

    num_asked: int
    """`Drafted.num_asked`. From a round with 0, length control learns only that the wait `draft_s`
    brought no proposal."""
    survival: tuple[float, ...]
    """[K]: the chances that at least 1, 2, ... draft tokens were accepted, from
    `outrider.speculation.accept_reject.survival`."""
    num_tokens: int
    """Number of tokens that the round committed."""
    context: int
    """Length of the session when the round began, in tokens."""
    draft_s: float
    target_s: float
    """Time in the target's queue and step, without drafting for the next round."""
    ended_at: float
    """Time at which the round ended, on a clock that all rounds share."""
    queue_s: float = 0.0
    """The part of `target_s` spent in the queue."""
    beside: DraftedBeside | None = None
    next_draft_s: float = 0.0
    """Time in which the target drafted for the next round."""
    work_s: float = 0.0
    """This proposal's share of the computing time of the draft replica."""
