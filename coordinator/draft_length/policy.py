"""The planned length of a round, and the results of a finished round."""

import math
from typing import NamedTuple

from outrider.foundation.values import value


@value(frozen=True, slots=True)
class RoundLength:
    """What length control has planned for a round."""

    num_draft_tokens: int
    run_ahead: int
    """Number of rounds after this round that certainly have no proposal, or whose proposals come
    from the target's look-up or head and certainly have the same K. The target may run these rounds
    without waiting for the coordinator."""
    next_max: int = 0
    """Largest possible K of the next round. A target with a head drafts this many tokens in the
    step that gives this round's verdict."""
    draft_budget_s: float = math.inf
    """Time limit of this round's proposal. The configured limit of drafting also applies."""
    is_timed: bool = True
    """Whether a time limit may stop drafting for this round, or a head's drafting for the next
    round. False if another session uses or has used the same seed, and so the same random numbers.
    Whether a limit stops drafting may depend on these numbers, and this could bias the output."""
    min_chance: float = 0.0
    """The chance of acceptance from which a draft token gains more tokens than its row costs. A
    look-up drafts no token with a lower chance."""


class DraftedBeside(NamedTuple):
    """A target's drafting for a round, in the step that gave the previous round's verdict."""

    num_tokens: int
    """Number of drafted tokens. The round may use fewer."""
    seconds: float
    work_s: float
    """This session's share of `seconds`."""


@value(frozen=True, slots=True)
class RoundResult:
    """Acceptance and times of a finished round."""

    num_asked: int
    """See `Drafted.num_asked`. If this is 0 and `draft_s` > 0, the draft did not answer in time."""
    survival: tuple[float, ...]
    """[number of proposed tokens]: the chances that at least 1, 2, ... draft tokens were accepted,
    as computed by `outrider.speculation.accept_reject.survival`."""
    num_tokens: int
    """Number of tokens that the round committed."""
    context: int
    """Length of the session when the round began, in tokens."""
    draft_s: float
    """Time for which the round waited for its proposal."""
    target_s: float
    """Time in the target's queue and step, minus the time of drafting for the next round."""
    ended_at: float
    """Time at which the round ended, on a clock that all rounds share."""
    queue_s: float = 0.0
    """The part of `target_s` spent in the queue."""
    beside: DraftedBeside | None = None
    next_draft_s: float = 0.0
    """Time in which the target drafted for the next round."""
    work_s: float = 0.0
    """This proposal's share of the computing time of the draft replica."""
    ran_ahead: bool = False
    """Whether the target ran the round without a request for it."""
