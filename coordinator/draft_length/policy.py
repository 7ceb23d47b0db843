"""The length of a round, and what a finished round showed. Pure."""

import math
from typing import NamedTuple

from outrider.values import value


@value(frozen=True, slots=True)
class RoundLength:
    """What a round asks for."""

    num_draft_tokens: int
    """K, the number of draft tokens to ask for."""
    run_ahead: int
    """Rounds after this one that certainly have no proposal, so the target need not wait."""
    siblings: tuple[int, ...] = ()
    """Siblings to ask for at the place of the first, second, ... draft token."""
    next_max: int = 0
    """K of the next round. Near the completion's end it is less, as fewer tokens are left. A target
    that drafts for itself draws the next round's tokens with this round's verdict. 0 if the next
    round has no proposal; then the target sends no hidden states for the draft."""
    draft_budget_s: float = math.inf
    """Longest wait that the proposal is worth. The configured limit of drafting applies too."""
    next_siblings: tuple[int, ...] = ()
    """Siblings that the next round asks for."""
    is_timed: bool = True
    """Whether a time limit may stop drafting early: drafting for this round, and the target's own
    drafting for the next one. False if times may depend on the round's own random numbers."""


class DraftedBeside(NamedTuple):
    """Drafting that a target did in the same step as a verdict."""

    num_tokens: int
    """Tokens drafted, of which a round may use fewer."""
    seconds: float
    work_s: float
    """The part of `seconds` that was for this session."""


@value(frozen=True, slots=True)
class PlayedRound:
    """What a finished round showed."""

    num_asked: int
    """K that the proposal was drafted for, or if time ran out, the number of tokens drawn. 0 if
    nothing was drafted, or if a look-up filled in for a drafter that was late or not ready. Length
    control then learns only that `draft_s` was a wait in vain."""
    survival: tuple[float, ...]
    """[K]: the chances that at least 1, 2, ... draft tokens of the proposal (in a tree, of the
    spine) were accepted, from `outrider.speculation.accept_reject.survival`."""
    num_tokens: int
    """Tokens committed."""
    context: int
    """Length of the session when the round began, in tokens."""
    draft_s: float
    """Wait for the proposal."""
    target_s: float
    """Time in the target's queue and step."""
    ended_at: float
    """When the round ended, s, on a clock that all rounds share."""
    queue_s: float = 0.0
    """The part of `target_s` spent in the queue."""
    num_siblings: int = 0
    """Siblings proposed, besides the tokens of `survival`."""
    sibling_taken: bool | None = None
    """Whether a sibling of the first refused draft token was accepted. None if no draft token with
    siblings was refused."""
    beside: DraftedBeside | None = None
    """The drafting of its proposal, if that came with the verdict before."""
    next_draft_s: float = 0.0
    """Time that the target drafted for the next round, not part of `target_s`."""
    work_s: float = 0.0
    """Time that a draft replica computed for this proposal alone."""


def fitting(siblings: tuple[int, ...], room: int) -> tuple[int, ...]:
    """`siblings` by place, cut from the end to at most `room` in all."""
    kept: list[int] = []
    for num in siblings:
        kept.append(max(0, min(num, room)))
        room -= kept[-1]
    return tuple(kept) if any(kept) else ()
