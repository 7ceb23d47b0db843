"""What the sessions of one coordinator learn from each other, and which sessions may. Pure.

All that is learned depends on how many draft tokens were accepted: averages of acceptance do, and
so do tokens a round, rows a step and times, since contexts and batches grow with the tokens. Under
rules whose noise is keyed by the round, a session with a known seed has the numbers of an earlier
one. It must choose no length by what those numbers did there, so it reads none of this and adds
nothing. docs/exactness.md has the proof.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Final, Protocol

from outrider.limits import DRAFTED_SEEDS_MAX
from outrider.speculation.sampling_params import Rule

from .acceptance_rate import DepthAverages
from .exploration_budget import ExplorationBudget, Tuning
from .round_cost import RoundCosts
from .siblings import SiblingAverages

PROMPT_SIZES: Final = (128, 512, 2048)
"""Tokens from which on a prompt is one of the next size."""


class Experience:
    """What sessions of one rule, with prompts of about one length, have shown: a long prompt often
    has what its answer copies."""

    def __init__(self, tuning: Tuning, of_rule: DepthAverages, trials: ExplorationBudget) -> None:
        """`of_rule` are the averages over prompts of any length, which share their `trials`."""
        self.averages = DepthAverages(tuning.shared_memory_rounds, tuning.prior_rounds, of_rule)
        self.siblings = SiblingAverages(tuning.shared_memory_rounds, tuning.prior_rounds)
        self.trials = trials
        self._young_rounds = tuning.young_rounds
        self._of_rule = of_rule

    @property
    def is_young(self) -> bool:
        """Whether little was shown yet, with prompts of any length."""
        return self._of_rule.num_rounds < self._young_rounds

    def note(self, num_asked: int, survival: Sequence[float]) -> None:
        """See `DepthAverages.note`."""
        self.averages.note(num_asked, survival)
        self._of_rule.note(num_asked, survival)


class Learned:
    """Everything that sessions share: round costs for all, acceptance by rule and prompt size."""

    def __init__(self, costs: RoundCosts, tuning: Tuning) -> None:
        self.costs = costs
        self._experience = {rule: _by_prompt_size(tuning) for rule in Rule}

    def experience(self, rule: Rule, prompt_length: int) -> Experience:
        """That of sessions with such prompts."""
        return self._experience[rule][bisect(PROMPT_SIZES, prompt_length)]


class Fixable(Protocol):
    """A session's length control."""

    def fix(self) -> None:
        """Lengths are constant from the next round that is planned on."""
        ...


class SeedsInUse:
    """Seeds that sessions had under rules whose noise is keyed by the round."""

    def __init__(self) -> None:
        self._seeds: set[int] = set()
        self.running: dict[int, Fixable] = {}
        """The first session of each seed, while it runs."""

    @property
    def is_full(self) -> bool:
        """Whether seeds must be forgotten before the next one is added, and with them all that
        their sessions have told: a session with a forgotten seed is a first one again."""
        return len(self._seeds) >= max(DRAFTED_SEEDS_MAX, len(self.running) + 1)

    def knows(self, seed: int) -> bool:
        """Whether a session had it."""
        return seed in self._seeds

    def add(self, seed: int, first: Fixable) -> None:
        """Its first session begins."""
        self._seeds.add(seed)
        self.running[seed] = first

    def forget(self) -> None:
        """Keeps the seeds of sessions that run."""
        self._seeds = set(self.running)


def _by_prompt_size(tuning: Tuning) -> list[Experience]:
    of_rule = DepthAverages(tuning.shared_memory_rounds, tuning.shared_prior_rounds)
    trials = ExplorationBudget(tuning)
    return [Experience(tuning, of_rule, trials) for _ in range(len(PROMPT_SIZES) + 1)]
