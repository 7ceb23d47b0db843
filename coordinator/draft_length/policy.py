"""The length of a round, what a round showed, and the interface that chooses lengths. Pure."""

import math
from typing import NamedTuple

from outrider.limits import TREE_TOKENS_MAX
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
    """K of the next round, less near the completion's end, which a target that drafts for itself
    draws with this verdict. 0 if the next round has no proposal; then the draft gets no hidden
    states."""
    draft_budget_s: float = math.inf
    """Longest wait that the proposal is worth. The limit for every wait applies too."""
    next_siblings: tuple[int, ...] = ()
    """Siblings that the next round asks for."""
    is_timed: bool = True
    """Whether a time limit may cut short the drafting for this round, or of the next one with this
    verdict. False where times may depend on the round's own random numbers."""


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
    """K that the proposal was drafted for, or the tokens that there was time for. 0 if nothing was
    drafted or a look-up filled in: then only the time of the vain wait is learned."""
    survival: tuple[float, ...]
    """See `outrider.speculation.accept_reject.survival`; of the proposed tokens."""
    num_tokens: int
    """Tokens committed."""
    context: int
    """Length of the session when the round began, in tokens."""
    draft_s: float
    """Wait for the proposal."""
    target_s: float
    """The target's queue and step."""
    ended_at: float
    """When the round ended, s, on a clock that all rounds share."""
    queue_s: float = 0.0
    """The part of `target_s` spent in the queue."""
    num_siblings: int = 0
    """Siblings proposed, besides the tokens of `survival`."""
    siblings: tuple[float, float] = (0.0, 0.0)
    """What became of the siblings, see `sibling_chances`."""
    beside: DraftedBeside | None = None
    """The drafting of its proposal, if that came with the verdict before."""
    next_draft_s: float = 0.0
    """Time that the target drafted for the next round, not part of `target_s`."""
    work_s: float = 0.0
    """Time that a draft replica computed for this proposal alone."""


def siblings_beside(num_draft_tokens: int, siblings_max: int) -> tuple[int, ...]:
    """As many siblings for each draft token as the largest tree allows, up to `siblings_max`."""
    num = min(siblings_max, TREE_TOKENS_MAX // max(1, num_draft_tokens) - 1)
    return (num,) * num_draft_tokens if num else ()


def fitting(siblings: tuple[int, ...], room: int) -> tuple[int, ...]:
    """`siblings` by place, cut from the end to at most `room` in all."""
    kept: list[int] = []
    for num in siblings:
        kept.append(max(0, min(num, room)))
        room -= kept[-1]
    return tuple(kept) if any(kept) else ()


class LengthPolicy:
    """Chooses the lengths of one session's rounds."""

    listens = True
    """Whether it learns from rounds."""

    @property
    def plans_plain(self) -> bool:
        """Whether several rounds without a draft come next."""
        raise NotImplementedError

    def choose(self, index: int, num_left: int) -> RoundLength:
        """The length of round `index`; `num_left` more tokens fit the completion, the target's own
        one included. Independent of the last `note`: a target or draft that works ahead may already
        have drawn tokens of this round."""
        raise NotImplementedError

    def note(self, played: PlayedRound) -> None:
        """Takes what the round chosen last has shown."""

    def note_watched(self, num_asked: int, survival: tuple[float, ...]) -> None:
        """In a round without a draft, `num_asked` tokens were looked up for comparison; `survival`
        as in `PlayedRound`."""

    def close(self) -> None:
        """Call when the session ends."""


class FixedLength(LengthPolicy):
    """Asks for the same number of tokens in every round, and learns nothing."""

    listens = False

    def __init__(self, num_draft_tokens: int, run_ahead_rounds: int, siblings: int = 0) -> None:
        """Asks for up to `siblings` for each draft token, within the limit on trees."""
        self._num_draft_tokens = num_draft_tokens
        self._beside = siblings_beside(num_draft_tokens, siblings)
        self._run_ahead_rounds = run_ahead_rounds if num_draft_tokens == 0 else 0

    @property
    def plans_plain(self) -> bool:
        return self._num_draft_tokens == 0

    def choose(self, index: int, num_left: int) -> RoundLength:
        num = min(self._num_draft_tokens, num_left - 1) if index > 0 else 0
        num_next = max(0, min(self._num_draft_tokens, num_left - 2))
        return RoundLength(
            num, min(self._run_ahead_rounds, num_left - 1), self._beside[:num], num_next,
            next_siblings=self._beside[:num_next],
        )  # fmt: skip
