"""How many draft tokens each round asks for. Pure: told of rounds, and asked for the next.

The length of a round is settled when the round before it begins. At that moment nothing of the
round has been drawn, neither here nor by a target or a draft that works ahead, so the choice is
independent of the round's noise and exact under every rule. Sessions that share a seed get fixed
lengths (`LengthControls.open`). docs/exactness.md has the proof.

| phase of a session | K | it ends |
| --- | --- | --- |
| drafting | the best by expected tokens and expected time | when plain decoding is better |
| plain | 0; the target runs ahead of the coordinator | when drafting is better |

What is expected may be wrong. Three trials find out, each for a few rounds:

| trial | of |
| --- | --- |
| in a plain phase, or instead of one when a session begins | drafting |
| in a round, of the largest K, which shows what all others would bring | more tokens |
| while next to nothing is known of its time | plain decoding |

Each is made once its expected loss, in tokens, can be paid from a small share of the tokens that
all sessions commit; so what seems hopeless is tried seldom, and what is uncertain soon.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.draft_length.acceptance import (
    SIBLINGS_OF_A_ROUND_MAX,
    DepthAverages,
    Shaper,
    SiblingAverages,
)
from coordinator.draft_length.policy import LengthPolicy, PlayedRound, RoundLength
from coordinator.draft_length.round_cost import SECONDS_MIN, Forecast, Load, RoundCosts
from outrider.limits import DRAFTED_SEEDS_MAX
from outrider.messages import ReplicaDescription
from outrider.speculation.sampling_params import Rule

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


PROMPT_SIZES: Final = (128, 512, 2048)
"""Tokens from which on a prompt is one of the next size."""
PLAIN_TRIED_BELOW: Final = 1.5
"""Plain decoding is tried where drafting is expected to be less than so many times as fast ..."""
PLAIN_TRIED_ROUNDS: Final = 6
"""... for so many rounds, of which the first is not timed."""
PLAIN_KNOWN_ROUNDS: Final = 2.0
"""What it takes is known while rounds of it weigh so much."""
DRAFT_BUDGET_MIN_S: Final = 0.02
"""A proposal is drawn for so long at least: processes that share cores are not always on time."""
TIMES_KNOWN_ROUNDS: Final = 16
"""Where acceptance is known without drafting, rounds that tell how long drafting takes ..."""
TIMES_RARITY: Final = 4.0
"""... after which a trial is charged so many times what it may lose, or the whole account."""
NEW_LOAD_LOST: Final = 1.0
"""Tokens that a round with a draft may lose where the load is another one than was measured."""


class Experience:
    """What sessions of one rule, with prompts of about one length, have shown: a long prompt often
    has what its answer copies. `of_rule` are the averages over prompts of any length."""

    def __init__(self, tuning: Tuning, of_rule: DepthAverages, trials: ExplorationBudget) -> None:
        self.averages = DepthAverages(tuning.shared_memory_rounds, tuning.prior_rounds, of_rule)
        self.siblings = SiblingAverages(tuning.shared_memory_rounds, tuning.prior_rounds)
        self.trials = trials
        self._young_rounds = tuning.young_rounds
        self._of_rule = of_rule

    @property
    def is_young(self) -> bool:
        return self._of_rule.num_rounds < self._young_rounds

    def note(self, num_asked: int, survival: Sequence[float]) -> None:
        self.averages.note(num_asked, survival)
        self._of_rule.note(num_asked, survival)


class Learned:
    """What sessions share: round costs for all, acceptance by rule and prompt size.

    All of it depends on how many draft tokens were accepted: tokens a round, rows a step and times
    do, too, since contexts and batches grow with the tokens. Under rules whose noise is keyed by
    the round, a session with a known seed has the numbers of an earlier one. It must choose no
    length by what those numbers did there, so it reads none of this and adds nothing.
    docs/exactness.md has the proof."""

    def __init__(self, costs: RoundCosts, tuning: Tuning) -> None:
        self.costs = costs
        self._experience: dict[Rule, list[Experience]] = {}
        for rule in Rule:
            of_rule = DepthAverages(tuning.shared_memory_rounds, tuning.shared_prior_rounds)
            trials = ExplorationBudget(tuning)
            self._experience[rule] = [
                Experience(tuning, of_rule, trials) for _ in range(len(PROMPT_SIZES) + 1)
            ]

    def experience(self, rule: Rule, prompt_length: int) -> Experience:
        return self._experience[rule][bisect(PROMPT_SIZES, prompt_length)]


class LengthControls:
    """The length controls of one coordinator's sessions."""

    def __init__(
        self,
        target: ReplicaDescription,
        draft: ReplicaDescription | None,
        run_ahead_rounds: int,
        tuning: Tuning = TUNING,
        *,
        drafting_delays: bool = False,
        messages_delay: bool = False,
        watches: bool = False,
    ) -> None:
        """`run_ahead_rounds` bounds how far the target may be ahead; `drafting_delays` and
        `messages_delay` are as for `RoundCosts`. If it `watches`, its sessions are told of
        look-ups in their plain rounds (`note_watched`), and rounds with a draft are tried for their
        times alone."""
        self._target = target
        self._draft = draft
        self._drafting_delays = drafting_delays
        self._messages_delay = messages_delay
        self.watches = watches
        self.run_ahead_rounds = run_ahead_rounds
        self.tuning = tuning
        self.load = Load()
        self._learned = self._nothing_learned(self.load)
        """What new sessions read and add to."""
        self._seeds: set[int] = set()
        """That sessions had under rules whose noise is keyed by the round."""
        self._running: dict[int, LengthControl] = {}
        """The first session of each seed, while it runs."""

    @property
    def costs(self) -> RoundCosts:
        return self._learned.costs

    def hear_load(
        self, num_targets: int, num_elsewhere: int, draft: ReplicaDescription | None
    ) -> None:
        """How many targets there are now, how many sessions other coordinators run with them, and
        the first draft, once there is one."""
        self.load.num_targets = max(1, num_targets)
        self.load.num_elsewhere = num_elsewhere
        if draft is not None and self._draft is None:
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
        `siblings_max` siblings beside each. Under rules whose noise is keyed by the round, a
        repeated seed fixes the lengths of this session and of the one that runs with that seed."""
        self.load.num_sessions += 1
        bounds = (num_draft_tokens, prompt_length, siblings_max)
        if rule.absolute_noise:
            return LengthControl(self, self._learned, rule, *bounds)
        if self._knows(seed):
            first = self._running.get(seed)
            if first is not None:
                first.fix()
            repeated = LengthControl(self, self._nothing_learned(Load()), rule, *bounds)
            repeated.fix()
            return repeated
        if len(self._seeds) >= max(DRAFTED_SEEDS_MAX, len(self._running) + 1):
            # A session with a forgotten seed is a first one again, so what they told goes, too.
            self._seeds = set(self._running)
            self._learned = self._nothing_learned(self.load)
        self._seeds.add(seed)
        self._running[seed] = LengthControl(self, self._learned, rule, *bounds, seed)
        return self._running[seed]

    def close(self, seed: int | None) -> None:
        """Ends a session, the first of `seed` unless that is None."""
        self.load.num_sessions -= 1
        if seed is not None:
            self._running.pop(seed, None)

    def _knows(self, seed: int) -> bool:
        return seed in self._seeds

    def _nothing_learned(self, load: Load) -> Learned:
        draft_costs = None if self._draft is None else self._draft.step_costs
        costs = RoundCosts(
            self._target.step_costs,
            draft_costs,
            self._target.max_num_seqs,
            load,
            drafting_delays=self._drafting_delays,
            messages_delay=self._messages_delay,
        )
        return Learned(costs, self.tuning)


@dataclass(frozen=True, slots=True)
class _Option:
    """What a length promises."""

    num_draft_tokens: int
    num_tokens: float
    """Expected, less those that other sessions lose."""
    seconds: float
    siblings: tuple[int, ...] = ()
    """That it has beside its tokens."""
    draft_s: float = 0.0
    """Of these, those until its proposal is there."""

    @property
    def rate(self) -> float:
        return max(0.0, self.num_tokens) / max(self.seconds, SECONDS_MIN)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A round whose length is settled, but for the tokens that may still follow."""

    num_draft_tokens: int
    siblings: tuple[int, ...]
    run_ahead: int
    """Rounds after it that are sure to be plain."""
    draft_budget_s: float
    is_plain: bool
    """Whether it belongs to a plain phase."""
    follows_plain: bool
    """Whether the round before it does, too: the target then did not wait for this one."""
    drafting: Drafting
    """Where a round with a draft is counted."""


class LengthControl(LengthPolicy):
    """Chooses the lengths of one session's rounds by what they are expected to bring."""

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
        """Reads and adds to `learned`. Gives `seed` back to `controls` in the end."""
        tuning = controls.tuning
        experience = learned.experience(rule, prompt_length)
        self._controls = controls
        self._costs = learned.costs
        self._experience = experience
        self._siblings_max = siblings_max
        self._siblings = SiblingAverages(
            tuning.memory_rounds, tuning.prior_rounds, experience.siblings
        )
        self._trials = experience.trials
        self._bound = num_draft_tokens
        self._seed = seed
        self._tuning = tuning
        self._averages = DepthAverages(
            tuning.memory_rounds, tuning.prior_rounds, experience.averages
        )
        self._num_draft_tokens = 0
        """K; 0 = not chosen yet."""
        self._beside: tuple[int, ...] = ()
        """Siblings that go with it ..."""
        self._draft_budget_s = math.inf
        """... and how long such a round waits for its proposal."""
        self._looks: tuple[int, ...] | None = None
        """The siblings of the next round, if that asks for all it may."""
        self._until_choice = 0
        """Rounds with a draft until the next choice."""
        self._drafting = Drafting()
        self._num_missed = 0
        """Tokens that the draft would have to read before it can propose any."""
        self._phase = tuning.plain_rounds
        """Rounds of the next plain phase."""
        self._plain_left = 0
        """Rounds of the plain phase that are sure to come."""
        self._plain_ends = False
        """Whether it ends with them."""
        self._fixed: int | None = None
        """K of all rounds that are planned from now on; None = it is chosen."""
        self._current: _Planned | None = None
        """The round that was chosen last ..."""
        self._num_asked = 0
        """... its K, which is smaller near the end of a completion ..."""
        self._next: _Planned | None = None
        """... and the one that follows it."""
        self._context = prompt_length
        self._ended_at: float | None = None
        if self._bound > 0:
            if self._costs.drafting_delays:
                self._num_missed = prompt_length
            drafted, plain = self._options()
            if not self._drafting_is_due(_best(drafted), plain, self._trials.begins):
                self._begin_plain(self._next_phase())
        # Where it drafts, the draft reads the prompt beside the target, and may need longer.
        self._num_missed = prompt_length

    @property
    def begins_plain(self) -> bool:
        return self._plans_plain()

    def fix(self) -> None:
        """From the next round that is planned on, asks for the K that promises most by now, behind
        the rounds that are sure to be plain. `note` makes no difference any more: neither what this
        session's rounds show nor how long they take is learned. From the next round that begins on,
        no time bounds the drafting."""
        if self._fixed is None:
            drafted, plain = self._options()
            self._fixed = _best((plain, *drafted)).num_draft_tokens
            if self._current is None:
                self._plain_left = 0  # Nothing was promised to the target yet.

    def choose(self, index: int, num_left: int) -> RoundLength:
        """See `LengthPolicy.choose`. The first round has no draft, for which it would wait."""
        current = self._next or self._planned(self._num_draft_tokens)
        self._current, self._next = current, self._plan(current)
        self._num_asked = num_asked = min(current.num_draft_tokens, num_left - 1)
        return RoundLength(
            num_asked,
            min(current.run_ahead, num_left - 1),
            current.siblings[:num_asked],
            max(0, min(self._next.num_draft_tokens, num_left - 2)),
            current.draft_budget_s,
            self._next.siblings,
            is_timed=self._fixed is None,
        )

    def note(self, played: PlayedRound) -> None:
        """What it changes is seen by rounds that are planned from now on: the next one already
        is."""
        current = self._current
        if current is None or self._fixed is not None:
            return
        before, self._ended_at = self._ended_at, played.ended_at
        self._context = played.context
        if before is None:
            return  # The first round runs the prompt.
        costs = self._costs
        round_s = max(0.0, played.ended_at - before - played.next_draft_s)
        costs.note_load(played, round_s)
        if self._bound > 0:
            self._trials.earn(played.num_tokens)
        if current.is_plain:
            self._num_missed += played.num_tokens
            self._averages.fade()
            if current.follows_plain:
                costs.note_plain(round_s, played.context)
            else:
                costs.note_first_plain(round_s)
        elif played.num_asked > 0:
            lost = costs.note_drafted(played, round_s, is_typical=self._num_missed == 0)
            self._siblings.note(played.siblings)
            self._experience.siblings.note(played.siblings)
            current.drafting.note(played.num_tokens - lost, round_s + played.next_draft_s)
            self._averages.note(played.num_asked, played.survival)
            self._experience.note(played.num_asked, played.survival)
            self._num_missed = 0
        elif played.draft_s > 0:
            current.drafting.note(played.num_tokens, round_s)
            if self._num_missed == 0:
                costs.note_late(self._num_asked, played.draft_s)
            self._num_missed = 0  # No excuse for another one.

    def note_watched(self, num_asked: int, survival: tuple[float, ...]) -> None:
        if self._fixed is None:
            self._averages.note(num_asked, survival)
            self._experience.note(num_asked, survival)

    def close(self) -> None:
        self._controls.close(self._seed)

    def _plan(self, before: _Planned) -> _Planned:
        if self._bound > 0 and self._fixed is None:
            if self._plain_left > 0:
                self._plan_plain()
            elif self._until_choice > 0 and not self._experience.is_young:
                self._until_choice -= 1
                self._looks = None
            else:
                self._choose_again()
        return self._planned(self._num_draft_tokens, before)

    def _plans_plain(self) -> bool:
        return self._bound == 0 or self._plain_left > 0 or self._fixed == 0

    def _planned(self, num_draft_tokens: int, before: _Planned | None = None) -> _Planned:
        """The next round as it is planned; the first one of a session has no draft."""
        is_plain, siblings, run_ahead = self._plans_plain(), self._beside, 0
        if is_plain:
            num_draft_tokens, siblings = 0, ()
            run_ahead = self._controls.run_ahead_rounds
            if self._plain_left > 0:
                self._plain_left -= 1
                run_ahead = min(run_ahead, self._plain_left)
        elif self._fixed is not None:
            num_draft_tokens, siblings = self._fixed if before else 0, ()
        elif self._looks is not None:
            num_draft_tokens, siblings = self._bound, self._looks
        return _Planned(
            num_draft_tokens,
            siblings,
            run_ahead,
            math.inf if is_plain or self._fixed is not None else self._draft_budget_s,
            is_plain,
            before is not None and before.is_plain,
            self._drafting,
        )

    def _plan_plain(self) -> None:
        """Whether a plain phase goes on is settled before the target has to wait to hear of it."""
        if self._plain_ends or self._plain_left > self._controls.run_ahead_rounds:
            return
        drafted, plain = self._options()
        self._plain_ends = self._drafting_is_due(_best(drafted), plain, self._trials.pays)
        if not self._plain_ends:
            self._plain_left += self._next_phase()

    def _drafting_is_due(
        self, drafted: _Option, plain: _Option, pays: Callable[[float], bool]
    ) -> bool:
        """Whether to draft: because that is quicker by enough for what the draft has to read, or to
        find out whether it is by now."""
        costs, tuning = self._costs, self._tuning
        each = drafted.seconds * plain.rate - drafted.num_tokens
        if costs.load_is_new:
            each = max(each, NEW_LOAD_LOST)
        num_rounds = tuning.choice_rounds if each > 0 else tuning.gain_rounds
        lost = num_rounds * each + costs.detour_lost(plain.seconds, self._num_missed)
        if lost < 0:
            return True
        if self._controls.watches and costs.num_drafted >= TIMES_KNOWN_ROUNDS:
            charged = min(TIMES_RARITY * lost, tuning.credit_tokens_max)
            pays, lost = self._trials.pays, max(lost, charged)
        if not pays(lost):
            return False
        self._drafting = Drafting(lost, self._tuning.choice_rounds)
        return True

    def _choose_again(self) -> None:
        """K of the rounds from the next one on, or the beginning of a plain phase."""
        drafted, plain = self._options()
        best = _best(drafted)
        tuning, is_first = self._tuning, self._num_draft_tokens == 0
        current = best if is_first else drafted[self._num_draft_tokens - 1]
        if best.rate > current.rate * (1.0 + tuning.switch_gain):
            current = best
        self._until_choice = tuning.choice_rounds - 1
        self._num_draft_tokens, self._beside = current.num_draft_tokens, current.siblings
        num_drafted = self._drafting.num_rounds + 1  # One is on its way.
        if is_first or num_drafted < self._drafting.num_paid:
            self._looks = drafted[-1].siblings if self._trials.first_look() else None
        elif self._plain_is_due(current, plain):
            self._begin_plain(self._next_phase())
        elif self._tries_plain(current, plain):
            self._begin_plain(PLAIN_TRIED_ROUNDS)
            self._plain_ends = True
        else:
            self._trials.repay(self._drafting.lost)
            self._drafting.lost = 0.0
            lost = current.rate * drafted[-1].seconds - drafted[-1].num_tokens
            looks = self._trials.first_look() or self._trials.pays(lost)
            self._looks = drafted[-1].siblings if looks else None
        self._draft_budget_s = self._timeouts(
            current if self._looks is None else drafted[-1], plain
        )

    def _timeouts(self, drafted: _Option, plain: _Option) -> float:
        """How long a proposal is drawn for: until as much time has been lost, beyond what it takes
        as a rule, as its tokens would take without it. So a draft that has become slow costs no
        more than twice what it brings, whenever that is."""
        if not self._costs.are_known:
            return math.inf
        worth_s = max(0.0, drafted.num_tokens - 1.0) * plain.seconds
        return max(DRAFT_BUDGET_MIN_S, drafted.draft_s + worth_s)

    def _plain_is_due(self, drafted: _Option, plain: _Option) -> bool:
        """Whether drafting has lost, and not only against what was expected of it."""
        enough = 1.0 + self._tuning.plain_gain
        return plain.rate > enough * drafted.rate and not self._drafting.beats(plain.rate)

    def _tries_plain(self, drafted: _Option, plain: _Option) -> bool:
        """Whether to decode plainly for a while, so that what that takes is known."""
        if self._costs.plain_rounds_known >= PLAIN_KNOWN_ROUNDS:
            return False
        lost = PLAIN_TRIED_ROUNDS * (plain.seconds * drafted.rate - plain.num_tokens)
        return drafted.rate < PLAIN_TRIED_BELOW * plain.rate and self._trials.pays(lost)

    def _next_phase(self) -> int:
        num_rounds, self._phase = self._phase, min(2 * self._phase, self._tuning.plain_rounds_max)
        return num_rounds

    def _begin_plain(self, num_rounds: int) -> None:
        self._plain_left = num_rounds
        self._plain_ends = False
        self._looks = None
        self._drafting = Drafting()
        self._num_draft_tokens = self._until_choice = 0

    def _options(self) -> tuple[list[_Option], _Option]:
        """What K = 1, 2, ... promise, and what plain decoding does."""
        num_siblings = SIBLINGS_OF_A_ROUND_MAX if self._siblings_max else 0
        costs = self._costs
        forecast: Forecast = costs.forecast(self._bound, self._context, num_siblings)
        prospects = self._averages.prospects(self._bound)
        shaper = Shaper(
            prospects, self._siblings.rates(), forecast.row_s, forecast.lost, self._siblings_max
        )
        options: list[_Option] = []
        num_tokens, lost, seconds = 1.0, forecast.draft_lost[0], forecast.round_s
        for depth in range(self._bound):
            proposed = prospects.proposed[depth]
            num_tokens += prospects.committed[depth]
            lost += proposed * (forecast.lost[depth] + forecast.draft_lost[depth + 1])
            seconds += proposed * forecast.token_s[depth]
            shape = shaper.shape(depth + 1, num_tokens - lost, seconds)
            options.append(
                _Option(
                    depth + 1,
                    num_tokens - lost + shape.num_tokens,
                    seconds + shape.seconds,
                    shape.siblings,
                    forecast.draft_s[depth],
                )
            )
        return options, _Option(0, 1.0, forecast.plain_s)


def _best(options: Iterable[_Option]) -> _Option:
    return max(options, key=lambda option: option.rate)
