"""Length control: how many draft tokens (K) each round asks for. Pure: it learns from finished
rounds and chooses the length of the next one.

The length of a round is fixed when the previous round begins. At that moment no token of the round
has been drawn, neither here nor by a target or draft that works ahead. So the choice does not
depend on the round's random numbers, and sampling stays exact under every rule. Sessions that share
a seed get fixed lengths (`LengthControls.open`). docs/exactness.md has the proof.

| phase of a session | K | ends when |
| --- | --- | --- |
| drafting | the best by expected tokens and expected time | plain decoding is better |
| plain | 0; the target runs ahead of the coordinator | drafting is better |

Expectations may be wrong, so three kinds of trial test them, for one or a few rounds:

| trial | when |
| --- | --- |
| drafting | in a plain phase, or instead of one when a session begins |
| the largest K, which shows what every smaller K would have brought | when K is chosen |
| plain decoding | while almost nothing is known about how long it takes |

A trial runs once a budget covers its expected loss in tokens. The budget grows by a small share of
the tokens that all sessions commit. So hopeless choices are tried rarely, and uncertain ones soon.
"""

from __future__ import annotations

import math
from bisect import bisect
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from coordinator.draft_length.acceptance import DepthAverages, SiblingAverage, observed
from coordinator.draft_length.policy import (
    LengthPolicy,
    PlayedRound,
    RoundLength,
    siblings_beside,
)
from coordinator.draft_length.round_cost import SECONDS_MIN, Load, RoundCosts
from outrider.limits import DRAFTED_SEEDS_MAX
from outrider.messages import ReplicaDescription
from outrider.speculation.sampling_params import Rule

MEMORY_ROUNDS = 48.0
"""After this many more rounds of its session, a round's weight has fallen to 1/e."""
SHARED_MEMORY_ROUNDS = 512.0
"""Like `MEMORY_ROUNDS`, for the averages over all sessions."""
PRIOR_ROUNDS = 12.0
"""The averages over all sessions weigh as much as this many rounds of a session."""
SHARED_PRIOR_ROUNDS = 12.0
"""The initial assumptions weigh as much as this many rounds of all sessions."""
CHOICE_ROUNDS = 4
"""Rounds with a draft from one choice of K to the next."""
FIRST_LOOKS = 4
"""First rounds of all sessions that ask for the largest K whatever it costs."""
PLAIN_GAIN = 0.03
"""A drafting session begins a plain phase only if plain decoding is faster by this share."""
PLAIN_ROUNDS = 16
"""Length of a session's first plain phase. Each further one is twice as long ..."""
PLAIN_ROUNDS_MAX = 128
"""... up to this length."""
GAIN_ROUNDS = 32
"""Within this many rounds, faster drafting must make up for the cost of starting it."""
TRIAL_SHARE = 0.01
"""Share of all committed tokens that trials may cost."""
CREDIT_TOKENS = 8.0
"""Trial budget of a new coordinator, in tokens ..."""
CREDIT_TOKENS_MAX = 16.0
"""... and the most that it can save up."""
PROMPT_SIZES = (128, 512, 2048)
"""Bounds between classes of prompt lengths, in tokens."""
PLAIN_TRIED_BELOW = 1.5
"""Plain decoding is tried if drafting is expected to be less than this many times as fast ..."""
PLAIN_TRIED_ROUNDS = 6
"""... for this many rounds, the first of which is not timed."""
PLAIN_KNOWN_ROUNDS = 2.0
"""The time of a plain round counts as known while the measured ones have this much weight."""
DRAFT_BUDGET_MIN_S = 0.02
"""Least time to draw a proposal: processes that share cores are not always scheduled on time."""
TIMES_KNOWN_ROUNDS = 16
"""If sessions learn from look-ups in plain rounds, the time of drafted rounds counts as known after
this many of them ..."""
TIMES_RARITY = 4.0
"""... and then a trial costs this many times its expected loss, at most a full budget."""


class Experience:
    """What the sessions of one rule have shown, also by prompt length, as answers often copy from
    long prompts."""

    def __init__(self) -> None:
        self.averages = DepthAverages(SHARED_MEMORY_ROUNDS, SHARED_PRIOR_ROUNDS)
        self.by_size = [
            DepthAverages(SHARED_MEMORY_ROUNDS, PRIOR_ROUNDS, self.averages)
            for _ in range(len(PROMPT_SIZES) + 1)
        ]
        self.siblings = SiblingAverage(SHARED_MEMORY_ROUNDS, PRIOR_ROUNDS)
        self._left = CREDIT_TOKENS
        """Trial budget: tokens that trials may still lose."""
        self._looks = 0

    def first_look(self) -> bool:
        """Whether this round is one of the first, which ask for the largest K at any cost."""
        self._looks += 1
        return self._looks <= FIRST_LOOKS

    def earn(self, num_tokens: float) -> None:
        self._left = min(self._left + TRIAL_SHARE * num_tokens, CREDIT_TOKENS_MAX)

    def pays(self, num_tokens: float) -> bool:
        """Spends the expected loss of a trial, if the budget covers it."""
        if num_tokens > self._left:
            return False
        self._left -= max(0.0, num_tokens)
        return True


class Learned:
    """What sessions share: round costs for all, acceptance by rule and prompt length.

    All of it, times too, depends on how many draft tokens were accepted. Under rules whose random
    numbers are keyed by the round, a session with a repeated seed has the random numbers of an
    earlier one, whose results must not influence its lengths. So it neither reads this nor adds to
    it (proof: docs/exactness.md)."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.by_rule = {rule: Experience() for rule in Rule}


class _KnownSeeds:
    """Seeds of sessions with any draft, under rules whose random numbers are keyed by the round."""

    def __init__(self) -> None:
        self.running: dict[int, LengthControl] = {}
        """The first session of each seed, while it runs."""
        self.times_forgotten = 0
        self._seeds: set[int] = set()

    def __contains__(self, seed: int) -> bool:
        return seed in self._seeds

    def make_room(self) -> None:
        """Forgets the seeds of ended sessions if there is no room for one more."""
        if len(self._seeds) >= max(DRAFTED_SEEDS_MAX, len(self.running) + 1):
            self._seeds = set(self.running)
            self.times_forgotten += 1

    def add(self, seed: int, first: LengthControl) -> None:
        self._seeds.add(seed)
        self.running[seed] = first


class LengthControls:
    """Creates length controls for one coordinator's sessions, or for those with a drafter on
    trial."""

    def __init__(
        self,
        target: ReplicaDescription,
        draft: ReplicaDescription | None,
        run_ahead_rounds: int,
        *,
        delays: bool = False,
        watches: bool = False,
    ) -> None:
        """`run_ahead_rounds` bounds how far the target may run ahead. With `delays`, draft and
        coordinator share the target's cores and so delay it. With `watches`, sessions learn from
        look-ups in plain rounds (`note_watched`), so drafting is tried only to measure times."""
        self._target = target
        self._draft = draft
        self._delays = delays
        self.watches = watches
        self.run_ahead_rounds = run_ahead_rounds
        self.load = Load()
        self._seeds = _KnownSeeds()
        self._learned: tuple[int, Learned] | None = None
        """The value of `times_forgotten` when learning began, and what was learned."""

    @property
    def learned(self) -> Learned:
        """What new sessions read and extend. Dropped when seeds are forgotten: the next session
        with such a seed counts as its first, and must not read what earlier ones showed."""
        num_times = self._seeds.times_forgotten
        if self._learned is None or self._learned[0] != num_times:
            self._learned = num_times, self._nothing_learned(self.load)
        return self._learned[1]

    @property
    def costs(self) -> RoundCosts:
        return self.learned.costs

    def of_another(self, drafter: ReplicaDescription) -> LengthControls:
        """Controls for sessions with another drafter (a draft, or a target that drafts). They share
        load and seeds with this object, but learn separately."""
        found = copy(self)
        found._learned = None
        if drafter.drafts_itself:
            found._target = drafter
        else:
            found._draft = drafter
        return found

    def hear_load(
        self, num_targets: int, num_elsewhere: int, draft: ReplicaDescription | None
    ) -> None:
        """Updates the number of targets, of sessions that other coordinators run on them, and the
        draft. The times of a draft with other weights are learned from scratch."""
        self.load.num_targets = max(1, num_targets)
        self.load.num_elsewhere = num_elsewhere
        known = self._draft
        if draft is not None and (known is None or draft.weights != known.weights):
            self._draft = draft
            self.costs.meet_draft(draft.step_costs)

    def open(
        self,
        rule: Rule,
        seed: int,
        num_draft_tokens: int,
        prompt_length: int,
        siblings_max: int = 0,
    ) -> LengthControl:
        """Begins a session that asks for at most `num_draft_tokens` a round, with at most
        `siblings_max` siblings each. If random numbers are keyed by the round, a repeated seed
        fixes the lengths of this session and of a running one with this seed."""
        self.load.num_sessions += 1
        bounds = (num_draft_tokens, prompt_length, siblings_max)
        if rule.absolute_noise:
            return LengthControl(self, self.learned, rule, *bounds)
        if seed in self._seeds:
            first = self._seeds.running.get(seed)
            if first is not None:
                first.fix()
            repeated = LengthControl(self, self._nothing_learned(Load()), rule, *bounds)
            repeated.fix()
            return repeated
        self._seeds.make_room()
        first = LengthControl(self, self.learned, rule, *bounds, seed)
        self._seeds.add(seed, first)
        return first

    def close(self, seed: int | None) -> None:
        """Ends a session; `seed` is None unless it was the first session of that seed."""
        self.load.num_sessions -= 1
        if seed is not None:
            self._seeds.running.pop(seed, None)

    def _nothing_learned(self, load: Load) -> Learned:
        target, draft = self._target, None if self._draft is None else self._draft.step_costs
        costs = RoundCosts(
            target.step_costs, draft, target.max_num_seqs, load,
            drafting_delays=self._delays or target.drafts_itself, messages_delay=self._delays,
        )  # fmt: skip
        return Learned(costs)


@dataclass(frozen=True, slots=True)
class _Option:
    """A possible length of a round, and what to expect of it."""

    num_draft_tokens: int
    num_tokens: float = 1.0
    """Tokens committed, minus the tokens that other sessions lose."""
    seconds: float = 0.0
    siblings: tuple[int, ...] = ()
    draft_budget_s: float = math.inf

    @property
    def rate(self) -> float:
        return max(0.0, self.num_tokens) / max(self.seconds, SECONDS_MIN)


_PLAIN = _Option(0)
"""A round of a plain phase."""
_FIRST = _Option(0)
"""The first round of a session that drafts: it does not wait for a proposal."""


class LengthControl(LengthPolicy):
    """Chooses the lengths of one session's rounds by their expected tokens and time."""

    def __init__(
        self,
        controls: LengthControls,
        learned: Learned,
        rule: Rule,
        num_draft_tokens: int,
        prompt_length: int,
        siblings_max: int,
        seed: int | None = None,
    ) -> None:
        """Reads and adds to `learned`. `close` returns `seed` to `controls`."""
        experience = learned.by_rule[rule]
        of_size = experience.by_size[bisect(PROMPT_SIZES, prompt_length)]
        self._controls = controls
        self._costs = learned.costs
        self._experience = experience
        self._averages = DepthAverages(MEMORY_ROUNDS, PRIOR_ROUNDS, of_size)
        self._shared_averages = (of_size, experience.averages)
        self._siblings_max = siblings_max
        self._bound = num_draft_tokens
        self._seed = seed
        self._choice: _Option | None = None
        """Length of the next rounds with a draft; None = not chosen yet."""
        self._look: _Option | None = None
        """Length of the next round if that tries the largest K, else None."""
        self._until_choice = 0
        """Rounds with a draft until the next choice."""
        self._num_missed = 0
        """Tokens that the draft has to read before it can propose any."""
        self._phase = PLAIN_ROUNDS
        """Rounds of the next plain phase."""
        self._plain_left = 0
        """Rounds of the plain phase that are certain to come."""
        self._plain_ends = False
        """Whether the plain phase ends with them."""
        self._fixed: _Option | None = None
        """Length of all rounds planned from now on; None = it is chosen."""
        self._current: _Option | None = None
        """The round that was chosen last."""
        self._num_asked = 0
        """Its K, which is smaller near the end of a completion."""
        self._follows_plain = False
        """Whether the round before `_current` was plain. If both are, the target did not wait for
        the coordinator."""
        self._next: tuple[_Option, int] | None = None
        """The round after `_current`, and how many plain rounds are certain to follow it."""
        self._context = prompt_length
        self._ended_at: float | None = None
        if self._bound > 0:
            if self._costs.drafting_delays:
                self._num_missed = prompt_length
            drafted, plain = self._options()
            if not self._drafting_is_due(_best(drafted), plain):
                self._begin_plain()
        # A draft reads the prompt while the target does, and may take longer.
        self._num_missed = prompt_length

    def fix(self) -> None:
        """Fixes K at the best value so far, for all rounds that are not planned yet, except those
        of a plain phase that are certain to come. From now on nothing is learned from this session,
        and no time limit bounds drafting."""
        if self._fixed is None:
            drafted, plain = self._options()
            self._fixed = _Option(_best([plain, *drafted]).num_draft_tokens)
            if self._current is None:
                self._plain_left = 0  # The target was not told to run ahead yet.

    def choose(self, index: int, num_left: int) -> RoundLength:
        """See `LengthPolicy`. The first round has no proposal: waiting for one would delay it."""
        length, run_ahead = self._next or self._settled(_FIRST)
        self._follows_plain = self._current is _PLAIN
        self._current = length
        self._next = self._plan()
        following, _ = self._next
        self._num_asked = num_asked = min(length.num_draft_tokens, num_left - 1)
        return RoundLength(
            num_asked,
            min(run_ahead, num_left - 1),
            length.siblings[:num_asked],
            max(0, min(following.num_draft_tokens, num_left - 2)),
            length.draft_budget_s,
            following.siblings,
            is_timed=self._fixed is None,
        )

    def note(self, played: PlayedRound) -> None:
        """Takes effect from the round after the next one, which is planned already."""
        current = self._current
        if current is None or self._fixed is not None:
            return
        before, self._ended_at = self._ended_at, played.ended_at
        self._context = played.context
        if before is None:
            return  # The first round includes the prompt.
        costs = self._costs
        round_s = max(0.0, played.ended_at - before - played.next_draft_s)
        costs.note_load(played, round_s)
        if self._bound > 0:
            self._experience.earn(played.num_tokens)
        if current is _PLAIN:
            self._num_missed += played.num_tokens
            self._averages.fade()
            if self._follows_plain:
                costs.note_plain(round_s, played.context)
        elif played.num_asked > 0:
            costs.note_drafted(played, round_s, is_typical=self._num_missed == 0)
            if self._siblings_max > 0:
                self._experience.siblings.note(*played.siblings)
            self.note_watched(played.num_asked, played.survival)
        elif played.draft_s > 0 and self._num_missed == 0:
            costs.note_late(self._num_asked, played.draft_s)
        if current is not _PLAIN and (played.num_asked > 0 or played.draft_s > 0):
            self._num_missed = 0  # From here on a late proposal counts as slow drafting.

    def note_watched(self, num_asked: int, survival: tuple[float, ...]) -> None:
        if self._fixed is None:
            counts = observed(num_asked, survival)
            for averages in (self._averages, *self._shared_averages):
                averages.note(counts)

    def close(self) -> None:
        self._controls.close(self._seed)

    def _plan(self) -> tuple[_Option, int]:
        if self._bound > 0 and self._fixed is None:
            self._look = None
            if self._plain_left > 0:
                self._plan_plain()
            elif self._until_choice > 0:
                self._until_choice -= 1
            else:
                self._choose_again()
        return self._settled(self._fixed or self._look or self._choice or _FIRST)

    @property
    def plans_plain(self) -> bool:
        return self._bound == 0 or self._plain_left > 0 or self._fixed == _PLAIN

    def _settled(self, drafted: _Option) -> tuple[_Option, int]:
        """The next round: `drafted`, or one of a plain phase. And how many plain rounds certainly
        follow."""
        if not self.plans_plain:
            return drafted, 0
        run_ahead = self._controls.run_ahead_rounds
        if self._plain_left > 0:
            self._plain_left -= 1
            run_ahead = min(run_ahead, self._plain_left)
        return _PLAIN, run_ahead

    def _plan_plain(self) -> None:
        """Decides whether the plain phase goes on, early enough for the target to run ahead."""
        if self._plain_ends or self._plain_left > self._controls.run_ahead_rounds:
            return
        drafted, plain = self._options()
        self._plain_ends = self._drafting_is_due(_best(drafted), plain)
        if not self._plain_ends:
            self._begin_plain()

    def _drafting_is_due(self, drafted: _Option, plain: _Option) -> bool:
        """Whether drafting is faster by enough to make up for what the draft must read first, or a
        trial is due."""
        costs, experience = self._costs, self._experience
        each = drafted.seconds * plain.rate - drafted.num_tokens
        num_rounds = CHOICE_ROUNDS if each > 0 else GAIN_ROUNDS
        lost = num_rounds * each + costs.reading_lost(plain.seconds, self._num_missed)
        if lost < 0:
            return True
        if self._controls.watches and costs.num_drafted >= TIMES_KNOWN_ROUNDS:
            return experience.pays(max(lost, min(TIMES_RARITY * lost, CREDIT_TOKENS_MAX)))
        return experience.pays(lost)

    def _choose_again(self) -> None:
        """Chooses K from the next round on, or begins a plain phase."""
        drafted, plain = self._options()
        best, largest = _best(drafted), drafted[-1]
        is_first = self._choice is None
        self._choice, self._until_choice = best, CHOICE_ROUNDS - 1
        if is_first:
            self._look = largest if self._experience.first_look() else None
        elif plain.rate > (1.0 + PLAIN_GAIN) * best.rate:
            self._begin_plain()
        elif self._tries_plain(best, plain):
            self._plain_left, self._plain_ends = PLAIN_TRIED_ROUNDS, True
            self._choice, self._until_choice = None, 0
        else:
            lost = best.rate * largest.seconds - largest.num_tokens
            looks = self._experience.first_look() or self._experience.pays(lost)
            self._look = largest if looks else None

    def _tries_plain(self, drafted: _Option, plain: _Option) -> bool:
        """Whether to decode plainly for a few rounds to measure how long that takes."""
        if self._costs.plain.weight >= PLAIN_KNOWN_ROUNDS:
            return False
        lost = PLAIN_TRIED_ROUNDS * (plain.seconds * drafted.rate - plain.num_tokens)
        return drafted.rate < PLAIN_TRIED_BELOW * plain.rate and self._experience.pays(lost)

    def _begin_plain(self) -> None:
        """Begins a plain phase, or extends the current one."""
        self._plain_left += self._phase
        self._plain_ends = False
        self._phase = min(2 * self._phase, PLAIN_ROUNDS_MAX)
        self._choice, self._until_choice = None, 0

    def _options(self) -> tuple[list[_Option], _Option]:
        """The options K = 1, 2, ..., and plain decoding.

        The time limit of a proposal is its usual time plus what its accepted tokens would take in
        plain decoding, so a draft that becomes slow costs at most twice what it saves."""
        costs = self._costs
        forecast = costs.forecast(self._bound, self._context)
        prospects = self._averages.prospects(self._bound)
        gained = (prospects.committed - prospects.proposed * forecast.token_lost).cumsum()
        taken_s = (prospects.proposed * forecast.token_s).cumsum()
        siblings = [siblings_beside(k + 1, self._siblings_max) for k in range(self._bound)]
        if self._siblings_max:
            num_beside = np.array([one[0] if one else 0 for one in siblings])
            chance = self._experience.siblings.chance
            gained += (num_beside > 0) * chance * prospects.refused.cumsum()
            gained -= num_beside * (prospects.proposed * forecast.row_lost).cumsum()
            taken_s += num_beside * (prospects.proposed * forecast.row_s).cumsum()
        tokens = (gained + 1.0 - forecast.round_lost).tolist()
        times, draft_times = (taken_s + forecast.round_s).tolist(), forecast.draft_s.tolist()
        options = list[_Option]()
        for num, seconds, beside, draft_s in zip(tokens, times, siblings, draft_times, strict=True):
            budget_s = math.inf
            if costs.are_known:
                worth_s = max(0.0, num - 1.0) * forecast.plain_s
                budget_s = max(DRAFT_BUDGET_MIN_S, draft_s + worth_s)
            options.append(_Option(len(options) + 1, num, seconds, beside, budget_s))
        return options, replace(_PLAIN, seconds=forecast.plain_s)


def _best(options: list[_Option]) -> _Option:
    return max(options, key=lambda option: option.rate)
