"""What finding out more may cost, and how quickly lengths follow what is found. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TRIAL_GAIN: Final = 1.2
"""Drafting goes on after a trial that was so many times as fast as plain decoding, whatever is
expected: a few rounds do not change an average ..."""
TRIAL_ROUNDS: Final = 12
"""... up to so many rounds of it."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How quickly lengths follow what is measured, and what finding out may cost."""

    memory_rounds: float = 48.0
    """A session's round weighs 1 / e after so many more."""
    shared_memory_rounds: float = 512.0
    """The same for the averages over all sessions."""
    prior_rounds: float = 12.0
    """Rounds of a session that weigh as much as those averages ..."""
    shared_prior_rounds: float = 12.0
    """... and rounds of all sessions as what is assumed where nothing is known."""
    first_looks: int = 4
    """Rounds of all sessions that ask for all they may: one shows what every K would bring."""
    young_rounds: int = 64
    """Rounds of all sessions up to which K is chosen anew in each ..."""
    choice_rounds: int = 4
    """... and of one session, with a draft, between two choices from then on."""
    gain_rounds: int = 32
    """Rounds in which drafting that is quicker must bring what beginning it costs."""
    switch_gain: float = 0.02
    """K changes only for a choice that is better by this share ..."""
    plain_gain: float = 0.03
    """... and a session that drafts decodes plainly only where that is by this one."""
    plain_rounds: int = 16
    """Rounds after which a session's plain phase may end; then twice as many each time ..."""
    plain_rounds_max: int = 128
    """... up to this."""
    trial_share: float = 0.01
    """Trials may cost so many of all tokens that are committed ..."""
    credit_tokens: float = 8.0
    """... beside these, with which a coordinator begins ..."""
    credit_tokens_max: float = 16.0
    """... and of which it keeps so many."""
    plain_beginnings: int = 7
    """One in so many sessions that drafting promises nothing drafts at its beginning anyway ..."""
    beginning_tokens: float = 4.0
    """... where that costs so few tokens; one in twice as many where it costs twice as many."""
    repaid: float = 4.0
    """A trial of drafting that is gone on with pays for so many like it."""


TUNING: Final = Tuning()


class ExplorationBudget:
    """What the sessions of one rule may spend on finding out more: tokens, a share of all that they
    commit."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._left = tuning.credit_tokens
        self._looks = 0
        self._begun_plain = 0
        """Sessions since the last one that began with a draft."""

    def first_look(self) -> bool:
        """Whether a round is one of the first, which ask for all they may at whatever cost."""
        self._looks += 1
        return self._looks <= self._tuning.first_looks

    def earn(self, num_tokens: float) -> None:
        """So many were committed."""
        self._add(self._tuning.trial_share * num_tokens)

    def pays(self, num_tokens: float) -> bool:
        """Spends what a trial is expected to lose, if that is there."""
        if num_tokens > self._left:
            return False
        self._left -= max(0.0, num_tokens)
        return True

    def begins(self, num_tokens: float) -> bool:
        """The same for a session's beginning, but that one in so many is tried in any case: it may
        be about another thing than those before it; one in more, where it is expected to lose more
        than little."""
        self._begun_plain += 1
        rarity = max(1.0, num_tokens / self._tuning.beginning_tokens)
        is_due = self._begun_plain >= rarity * self._tuning.plain_beginnings
        begins = self.pays(num_tokens) or is_due
        self._begun_plain = 0 if begins else self._begun_plain
        return begins

    def repay(self, num_tokens: float) -> None:
        """A trial that was expected to lose so many has shown that the rest of them pay."""
        self._add(self._tuning.repaid * num_tokens)

    def _add(self, num_tokens: float) -> None:
        self._left = min(self._left + num_tokens, self._tuning.credit_tokens_max)


class Drafting:
    """Of one session: rounds with a draft since the last plain phase."""

    __slots__ = ("_num_tokens", "_seconds", "lost", "num_paid", "num_rounds")

    def __init__(self, lost: float = 0.0, num_paid: int = 0) -> None:
        self.lost = lost
        """Tokens that trying was expected to cost, while it is a trial ..."""
        self.num_paid = num_paid
        """... and the rounds for which that was paid."""
        self.num_rounds = 0
        self._num_tokens = 0.0
        """Of all but the first, for which the draft had to read what it missed ..."""
        self._seconds = 0.0
        """... and what they took."""

    def note(self, num_tokens: float, seconds: float) -> None:
        """A round was played, whose tokens are told less those that others lost."""
        self.num_rounds += 1
        if self.num_rounds > 1:
            self._num_tokens += num_tokens
            self._seconds += seconds

    def beats(self, rate: float) -> bool:
        """Whether the first few were by far quicker than this, in tokens a second."""
        is_short = self.num_rounds <= TRIAL_ROUNDS
        return is_short and self._num_tokens > TRIAL_GAIN * rate * self._seconds
