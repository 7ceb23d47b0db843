"""Which K, rule and fan-out to deploy, and with how many drafts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outrider.errors import check
from outrider.planning.replay import Rounds
from outrider.planning.round_times import Load, LookAheadPlan, ServiceTimes
from outrider.speculation.sampling_params import Rule

GAIN_MIN: Final = 0.005
"""What is larger or does more is chosen where it is faster by this share."""
REPLICAS_LOSS_MAX: Final = 0.05
"""What fewer drafts may cost of the speed with one for each session."""
FAN_OUTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Outcomes worked out ahead that are looked at."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to draft, replayed over the texts."""

    rule: Rule
    num_draft_tokens: int
    rounds: Rounds
    hit_rates: tuple[float, ...] = ()
    """With 1, 2, ... outcomes worked out ahead; empty where the drafter cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way to decode, and what it is expected to bring."""

    rule: Rule
    num_draft_tokens: int
    """K; 0 = plain decoding."""
    look_ahead: int
    """Fan-out: outcomes of a round worked out ahead; 0 = the draft is waited for."""
    draft_replicas: int
    """For each target replica; 0 for plain decoding."""
    tokens_per_second: float
    """Of all sessions of a target replica together, prompts included."""
    speedup: float
    """Over plain decoding of as many sessions."""
    tokens_per_round: float
    hit_rate: float | None
    """Share of the rounds whose proposal is there before they begin; None without look-ahead."""
    proposed_per_round: float = 0.0
    """Draft tokens, mean over the rounds with a draft ..."""
    steps_per_round: float = 0.0
    """... and steps of its model: fewer than K where a look-up proposes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to deploy."""

    chosen: Option
    """Plain decoding where no draft pays."""
    plain: Option
    options: tuple[Option, ...]
    """The faster of waiting and looking ahead for each rule and K that was looked at, with the
    drafts it needs."""


class Chooser:
    """Compares ways to decode the same texts under one load."""

    def __init__(
        self,
        times: ServiceTimes,
        load: Load,
        prompt_tokens: Sequence[int],
        plain: Rounds,
        plain_rule: Rule,
    ) -> None:
        """`prompt_tokens` [texts] are read at each text's beginning; `plain` are the rounds without
        a draft. `load` says nothing of drafts."""
        check(len(prompt_tokens) == plain.num_texts > 0, "each text has a prompt")
        self._times = times
        self._load = load
        self._first_s = times.first_seconds(prompt_tokens)
        plain_s = times.plain_seconds(plain, load)
        self._plain_rate = self._rate(plain, plain_s)
        self._plain = Option(
            rule=plain_rule,
            num_draft_tokens=0,
            look_ahead=0,
            draft_replicas=0,
            tokens_per_second=self._plain_rate,
            speedup=1.0,
            tokens_per_round=plain.tokens_per_round,
            hit_rate=None,
        )

    def choose(self, candidates: Iterable[Candidate]) -> Choice:
        """The fastest of them and of plain decoding; of about equals the first."""
        options = tuple(self._best(self._ways(candidate)) for candidate in candidates)
        return Choice(self.best(options), self._plain, options)

    def best(self, options: Iterable[Option]) -> Option:
        """The fastest of them and of plain decoding; of about equals the first."""
        return self._best([self._plain, *options])

    def once_more(self, option: Option, rounds: Rounds) -> Option:
        """The same way to decode, over other rounds."""
        rates = (option.hit_rate or 0.0,) * option.look_ahead
        candidate = Candidate(option.rule, option.num_draft_tokens, rounds, rates)
        return self._option(candidate, option.look_ahead, option.draft_replicas)

    def _ways(self, candidate: Candidate) -> Iterator[Option]:
        yield self._with_replicas(candidate, 0)
        for fan_out in FAN_OUTS:
            if fan_out <= len(candidate.hit_rates):
                yield self._with_replicas(candidate, fan_out)

    def _with_replicas(self, candidate: Candidate, fan_out: int) -> Option:
        """With as few drafts as cost little speed; none for a look-up."""
        if self._times.draft is None:
            return self._option(candidate, fan_out, 0)
        most = 1 if self._times.shares_device else self._load.sessions
        best = self._option(candidate, fan_out, most)
        least = best.tokens_per_second * (1 - REPLICAS_LOSS_MAX)
        fewer = (self._option(candidate, fan_out, number) for number in range(1, most))
        return next((option for option in fewer if option.tokens_per_second >= least), best)

    def _option(self, candidate: Candidate, fan_out: int, draft_replicas: int) -> Option:
        load = replace(self._load, draft_replicas=max(1, draft_replicas))
        rounds, hit_rate = candidate.rounds, None
        if fan_out == 0:
            seconds = self._times.drafted_seconds(rounds, load)
        else:
            hit_rate = candidate.hit_rates[fan_out - 1]
            plan = LookAheadPlan(candidate.num_draft_tokens, fan_out, hit_rate)
            seconds = self._times.look_ahead_seconds(rounds, load, plan)
        rate = self._rate(rounds, seconds)
        return Option(
            rule=candidate.rule,
            num_draft_tokens=candidate.num_draft_tokens,
            look_ahead=fan_out,
            draft_replicas=draft_replicas,
            tokens_per_second=rate,
            speedup=rate / self._plain_rate,
            tokens_per_round=rounds.tokens_per_round,
            hit_rate=hit_rate,
            proposed_per_round=rounds.proposed_per_round,
            steps_per_round=rounds.steps_per_round,
        )

    def _rate(self, rounds: Rounds, seconds: float) -> float:
        all_s = self._first_s + seconds
        check(0 < all_s < math.inf, "rounds take time")
        return self._load.sessions * rounds.num_tokens / all_s

    def _best(self, options: Iterable[Option]) -> Option:
        best: Option | None = None
        for option in options:
            if best is None or option.tokens_per_second > best.tokens_per_second * (1 + GAIN_MIN):
                best = option
        check(best is not None, "there is nothing to choose from")
        return best  # type: ignore[return-value]
