"""Lengths of rounds as values, and who chooses them. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from outrider.limits import TREE_TOKENS_MAX
from outrider.values import value

from .acceptance import NO_SIBLINGS, SiblingChances


@value(frozen=True, slots=True)
class RoundLength:
    """What a round is to be."""

    num_draft_tokens: int
    """K: how many draft tokens are asked for."""
    run_ahead: int
    """Rounds after this one that are sure to have no proposal: the target need not wait."""
    siblings: tuple[int, ...] = ()
    """Candidates that are asked for beside the first, second, ... draft token."""
    next_max: int = 0
    """Draft tokens that the next round asks for, or fewer where the completion ends: a target which
    drafts itself is to have them by then. 0 where that round is sure to have none: then a draft
    that reads features is sent none either."""
    draft_budget_s: float = math.inf
    """How long its proposal is worth drawing for, beside what bounds every wait."""
    next_siblings: tuple[int, ...] = ()
    """Candidates that the next round asks for beside its draft tokens."""
    is_timed: bool = True
    """Whether times may bound the drafting for this round, or for the next one where the target
    drafts that with this one's verdict: not where they may tell of the round's own numbers."""


class DraftedBeside(NamedTuple):
    """Drafting that a target did in one step with a verdict."""

    num_tokens: int
    """Drafted, of which a round may leave some out."""
    seconds: float
    work_s: float
    """This session's part of them."""


@value(frozen=True, slots=True)
class PlayedRound:
    """A round with a verdict."""

    num_asked: int
    """K that its proposal was drafted for, or the tokens that there was time for; 0 = none was, or
    a look-up filled in, of which nothing is learned but how long a first token was waited for in
    vain."""
    survival: tuple[float, ...]
    """Of the proposed tokens, see `outrider.speculation.accept_reject.survival`."""
    num_tokens: int
    """Committed."""
    context: int
    """Tokens that the session had when it began."""
    draft_s: float
    """Wait for the proposal."""
    target_s: float
    """The target's queue and step."""
    ended_at: float
    """Time of a clock that all rounds share, s."""
    queue_s: float = 0.0
    """What of `target_s` it waited for a step to begin."""
    num_siblings: int = 0
    """Tokens beside those of `survival` that were proposed."""
    siblings: SiblingChances = NO_SIBLINGS
    """What came of them."""
    beside: DraftedBeside | None = None
    """Where its proposal came with the verdict before: what it took there ..."""
    next_draft_s: float = 0.0
    """... and what the next round's took beside this one's, which is not of `target_s`."""
    work_s: float = 0.0
    """What a draft did for this proposal alone, where it did not come with the verdict."""


class LengthPolicy:
    """Chooses the lengths of one session's rounds."""

    listens = True
    """Whether it is told of rounds."""

    @property
    def begins_plain(self) -> bool:
        """Whether no draft is wanted for a while from the first round on."""
        raise NotImplementedError

    def choose(self, index: int, num_left: int) -> RoundLength:
        """The next round: its place in the session, and how many tokens may still follow, one of
        which is the target's. What was noted of the round before has no say beyond `num_left`:
        a target or a draft that works ahead may have drawn tokens of this round by then."""
        raise NotImplementedError

    def note(self, played: PlayedRound) -> None:
        """The round that was chosen last has been played."""

    def note_watched(self, num_asked: int, survival: tuple[float, ...]) -> None:
        """Where nothing was drafted, so many tokens would have been asked for; `survival` is as of
        a `PlayedRound`."""

    def close(self) -> None:
        """The session ends."""


class FixedLength(LengthPolicy):
    """Asks for the same number of tokens in every round; listens to nothing."""

    listens = False

    def __init__(self, num_draft_tokens: int, run_ahead_rounds: int, siblings: int = 0) -> None:
        """So many `siblings` are asked for beside each of them, as far as a tree may be large."""
        self._num_draft_tokens = num_draft_tokens
        siblings = min(siblings, TREE_TOKENS_MAX // max(1, num_draft_tokens) - 1)
        self._beside = (siblings,) if siblings else ()
        self._run_ahead_rounds = run_ahead_rounds if num_draft_tokens == 0 else 0

    @property
    def begins_plain(self) -> bool:
        return self._num_draft_tokens == 0

    def choose(self, index: int, num_left: int) -> RoundLength:
        num = min(self._num_draft_tokens, num_left - 1) if index > 0 else 0
        num_next = max(0, min(self._num_draft_tokens, num_left - 2))
        return RoundLength(
            num, min(self._run_ahead_rounds, num_left - 1), self._beside * num, num_next,
            next_siblings=self._beside * num_next,
        )  # fmt: skip
