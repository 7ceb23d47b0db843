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
from dataclasses import dataclass, replace

from coordinator.draft_length.acceptance import (
    SIBLINGS_OF_A_ROUND_MAX,
    DepthAverages,
    SiblingAverages,
    observed,
    shaped,
)
from coordinator.draft_length.policy import LengthPolicy, PlayedRound, RoundLength
from coordinator.draft_length.round_cost import SECONDS_MIN, Load, RoundCosts
from outrider.limits import DRAFTED_SEEDS_MAX
from outrider.messages import ReplicaDescription
from outrider.speculation.sampling_params import Rule

GAIN_ROUNDS = 32
"""Rounds in which drafting that is quicker must bring what beginning it costs."""
CREDIT_TOKENS_MAX = 16.0
"""A coordinator keeps so many that trials may cost."""
PLAIN_BEGINNINGS = 7
"""One in so many sessions that drafting promises nothing drafts at its beginning anyway ..."""
BEGINNING_TOKENS = 4.0
"""... where that costs so few tokens; one in twice as many where it costs twice as many."""
PROMPT_SIZES = (128, 512, 2048)
"""Tokens from which on a prompt is one of the next size."""
PLAIN_TRIED_BELOW = 1.5
"""Plain decoding is tried where drafting is expected to be less than so many times as fast ..."""
PLAIN_TRIED_ROUNDS = 6
"""... for so many rounds, of which the first is not timed."""
PLAIN_KNOWN_ROUNDS = 2.0
"""What it takes is known while rounds of it weigh so much."""
DRAFT_BUDGET_MIN_S = 0.02
"""A proposal is drawn for so long at least: processes that share cores are not always on time."""
TIMES_KNOWN_ROUNDS = 16
"""Where look-ups are compared in plain rounds, so many with a draft tell how long one takes ..."""
TIMES_RARITY = 4.0
"""... after which a trial is charged so many times what it may lose, or the whole account."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How quickly lengths follow what is measured."""

    memory_rounds: float = 48.0
    """A session's round weighs 1 / e after so many more."""
    shared_memory_rounds: float = 512.0
    """The same for the averages over all sessions."""
    prior_rounds: float = 12.0
    """Rounds of a session that weigh as much as those averages ..."""
    shared_prior_rounds: float = 12.0
    """... and rounds of all sessions as what is assumed where nothing is known."""
    choice_rounds: int = 4
    """Rounds of a session, with a draft, between two choices of K."""
    plain_rounds: int = 16
    """Rounds after which a session's plain phase may end; then twice as many each time ..."""
    plain_rounds_max: int = 128
    """... up to this."""
    first_looks: int = 4
    """Rounds of all sessions that ask for all they may: one shows what every K would bring."""
    young_rounds: int = 64
    """Rounds of all sessions up to which K is chosen anew in each."""
    switch_gain: float = 0.02
    """K changes only for a choice that is better by this share ..."""
    plain_gain: float = 0.03
    """... and a session that drafts decodes plainly only where that is by this one."""
    trial_share: float = 0.01
    """Trials may cost so many of all tokens that are committed ..."""
    credit_tokens: float = 8.0
    """... beside these, with which a coordinator begins ..."""


TUNING = Tuning()


class Experience:
    """What sessions of one rule have shown. A long prompt often has what its answer copies, so
    acceptance is averaged by the prompt's size, too."""

    def __init__(self, tuning: Tuning) -> None:
        memory = tuning.shared_memory_rounds
        self.averages = DepthAverages(memory, tuning.shared_prior_rounds)
        self.by_size = [
            DepthAverages(memory, tuning.prior_rounds, self.averages)
            for _ in range(len(PROMPT_SIZES) + 1)
        ]
        self.siblings = SiblingAverages(memory, tuning.prior_rounds)
        self._tuning = tuning
        self._left = tuning.credit_tokens
        """What trials may still lose, in tokens: a share of all that are committed."""
        self._looks = 0
        self._begun_plain = 0
        """Sessions since the last one that began with a draft."""

    def first_look(self) -> bool:
        """Whether a round is one of the first, which ask for all they may at whatever cost."""
        self._looks += 1
        return self._looks <= self._tuning.first_looks

    def earn(self, num_tokens: float) -> None:
        self._left = min(self._left + self._tuning.trial_share * num_tokens, CREDIT_TOKENS_MAX)

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
        rarity = max(1.0, num_tokens / BEGINNING_TOKENS)
        is_due = self._begun_plain >= rarity * PLAIN_BEGINNINGS
        begins = self.pays(num_tokens) or is_due
        self._begun_plain = 0 if begins else self._begun_plain
        return begins


class Learned:
    """What sessions share: round costs for all, acceptance by rule and prompt size.

    All of it depends on how many draft tokens were accepted: tokens a round, rows a step and times
    do, too, since contexts and batches grow with the tokens. Under rules whose noise is keyed by
    the round, a session with a known seed has the numbers of an earlier one. It must choose no
    length by what those numbers did there, so it reads none of this and adds nothing.
    docs/exactness.md has the proof."""

    def __init__(self, costs: RoundCosts, tuning: Tuning) -> None:
        self.costs = costs
        self.by_rule = {rule: Experience(tuning) for rule in Rule}


class _KnownSeeds:
    """Those that sessions had under rules whose noise is keyed by the round, whatever draft."""

    def __init__(self) -> None:
        self.running: dict[int, LengthControl] = {}
        """The first session of each seed, while it runs."""
        self.times_forgotten = 0
        self._seeds: set[int] = set()

    def __contains__(self, seed: int) -> bool:
        return seed in self._seeds

    def make_room(self) -> None:
        """Forgets those whose sessions have ended, where there are too many for one more."""
        if len(self._seeds) >= max(DRAFTED_SEEDS_MAX, len(self.running) + 1):
            self._seeds = set(self.running)
            self.times_forgotten += 1

    def add(self, seed: int, first: LengthControl) -> None:
        self._seeds.add(seed)
        self.running[seed] = first


class LengthControls:
    """The length controls of one coordinator's sessions, or of those with a draft on trial."""

    def __init__(
        self,
        target: ReplicaDescription,
        draft: ReplicaDescription | None,
        run_ahead_rounds: int,
        tuning: Tuning = TUNING,
        *,
        delays: bool = False,
        watches: bool = False,
    ) -> None:
        """`run_ahead_rounds` bounds how far the target may be ahead. It shares its cores with the
        draft and the coordinator if that `delays` it. If it `watches`, its sessions are told of
        look-ups in their plain rounds (`note_watched`): rounds with a draft are tried for their
        times alone."""
        self._target = target
        self._draft = draft
        self._delays = delays
        self.watches = watches
        self.run_ahead_rounds = run_ahead_rounds
        self.tuning = tuning
        self.load = Load()
        self._seeds = _KnownSeeds()
        self._learned: tuple[int, Learned] | None = None
        """Since how many times of forgetting, and what."""

    @property
    def learned(self) -> Learned:
        """What new sessions read and add to. A session with a forgotten seed is a first one again,
        so what its earlier one told goes with the seed."""
        num_times = self._seeds.times_forgotten
        if self._learned is None or self._learned[0] != num_times:
            self._learned = num_times, self._nothing_learned(self.load)
        return self._learned[1]

    @property
    def costs(self) -> RoundCosts:
        return self.learned.costs

    def of_another(self, draft: ReplicaDescription) -> LengthControls:
        """For sessions of another draft, which learn apart and share the load and the seeds."""
        found = LengthControls(
            self._target, draft, self.run_ahead_rounds, self.tuning, delays=self._delays,
            watches=self.watches,
        )  # fmt: skip
        found.load, found._seeds = self.load, self._seeds
        return found

    def hear_load(
        self, num_targets: int, num_elsewhere: int, draft: ReplicaDescription | None
    ) -> None:
        """How many targets there are now, how many sessions other coordinators run with them, and
        the first draft, once there is one. Of another one the times are learned anew."""
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
        `siblings_max` siblings beside each. Under rules whose noise is keyed by the round, a
        repeated seed fixes the lengths of this session and of the one that runs with that seed."""
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
        """Ends a session, the first of `seed` unless that is None."""
        self.load.num_sessions -= 1
        if seed is not None:
            self._seeds.running.pop(seed, None)

    def _nothing_learned(self, load: Load) -> Learned:
        target, draft = self._target, None if self._draft is None else self._draft.step_costs
        costs = RoundCosts(
            target.step_costs, draft, target.max_num_seqs, load,
            drafting_delays=self._delays or target.drafts_itself, messages_delay=self._delays,
        )  # fmt: skip
        return Learned(costs, self.tuning)


@dataclass(frozen=True, slots=True)
class _Option:
    """What a length promises."""

    num_draft_tokens: int
    num_tokens: float = 1.0
    """Expected, less those that other sessions lose."""
    seconds: float = 0.0
    siblings: tuple[int, ...] = ()
    """That it has beside its tokens."""
    draft_budget_s: float = math.inf

    @property
    def rate(self) -> float:
        return max(0.0, self.num_tokens) / max(self.seconds, SECONDS_MIN)


_PLAIN = _Option(0)
"""A round of a plain phase ..."""
_FIRST = _Option(0)
"""... and one without a draft for which it would have to wait."""


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
        tuning, experience = controls.tuning, learned.by_rule[rule]
        own = tuning.memory_rounds, tuning.prior_rounds
        of_size = experience.by_size[bisect(PROMPT_SIZES, prompt_length)]
        self._controls = controls
        self._tuning = tuning
        self._costs = learned.costs
        self._experience = experience
        self._averages = DepthAverages(*own, of_size)
        self._shared_averages = (of_size, experience.averages)
        self._siblings = SiblingAverages(*own, experience.siblings)
        self._siblings_max = siblings_max
        self._bound = num_draft_tokens
        self._seed = seed
        self._choice: _Option | None = None
        """What rounds with a draft ask for; None = not chosen yet."""
        self._look: _Option | None = None
        """What the next round asks for instead, if that is all it may."""
        self._until_choice = 0
        """Rounds with a draft until the next choice."""
        self._num_drafted = self._num_paid = 0
        """Rounds with a draft since the last plain phase, and as many as a trial paid for."""
        self._num_missed = 0
        """Tokens that the draft would have to read before it can propose any."""
        self._phase = tuning.plain_rounds
        """Rounds of the next plain phase."""
        self._plain_left = 0
        """Rounds of the plain phase that are sure to come."""
        self._plain_ends = False
        """Whether it ends with them."""
        self._fixed: _Option | None = None
        """What all rounds ask for that are planned from now on; None = it is chosen."""
        self._current: _Option | None = None
        """The round that was chosen last ..."""
        self._num_asked = 0
        """... its K, which is smaller near the end of a completion ..."""
        self._follows_plain = False
        """... whether the target did not wait for it ..."""
        self._next: tuple[_Option, int] | None = None
        """... and the one that follows it, with the plain ones that are sure to follow that."""
        self._context = prompt_length
        self._ended_at: float | None = None
        if self._bound > 0:
            if self._costs.drafting_delays:
                self._num_missed = prompt_length
            drafted, plain = self._options()
            if not self._drafting_is_due(_best(drafted), plain, begins=True):
                self._begin_plain()
        # Where it drafts, the draft reads the prompt beside the target, and may need longer.
        self._num_missed = prompt_length

    @property
    def begins_plain(self) -> bool:
        return self._plans_plain

    def fix(self) -> None:
        """From the next round that is planned on, asks for the K that promises most by now, behind
        the rounds that are sure to be plain. `note` makes no difference any more: neither what this
        session's rounds show nor how long they take is learned. From the next round that begins on,
        no time bounds the drafting."""
        if self._fixed is None:
            drafted, plain = self._options()
            best = _best([plain, *drafted])
            self._fixed = _Option(best.num_draft_tokens)
            if self._current is None:
                self._plain_left = 0  # Nothing was promised to the target yet.

    def choose(self, index: int, num_left: int) -> RoundLength:
        """The first round has no draft, for which it would wait."""
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
            self._experience.earn(played.num_tokens)
        if current is _PLAIN:
            self._num_missed += played.num_tokens
            self._averages.fade()
            if self._follows_plain:
                costs.note_plain(round_s, played.context)
        elif played.num_asked > 0:
            costs.note_drafted(played, round_s, is_typical=self._num_missed == 0)
            if self._siblings_max > 0:
                self._siblings.note(played.siblings)
                self._experience.siblings.note(played.siblings)
            self.note_watched(played.num_asked, played.survival)
        elif played.draft_s > 0 and self._num_missed == 0:
            costs.note_late(self._num_asked, played.draft_s)
        if current is not _PLAIN and (played.num_asked > 0 or played.draft_s > 0):
            self._num_drafted += 1
            self._num_missed = 0  # No excuse for a late one.

    def note_watched(self, num_asked: int, survival: tuple[float, ...]) -> None:
        if self._fixed is None:
            counts = observed(num_asked, survival)
            for averages in (self._averages, *self._shared_averages):
                averages.note(counts)

    def close(self) -> None:
        self._controls.close(self._seed)

    def _plan(self) -> tuple[_Option, int]:
        """Settles the next round."""
        if self._bound > 0 and self._fixed is None:
            self._look = None
            is_young = self._experience.averages.num_rounds < self._tuning.young_rounds
            if self._plain_left > 0:
                self._plan_plain()
            elif self._until_choice > 0 and not is_young:
                self._until_choice -= 1
            else:
                self._choose_again()
        return self._settled(self._fixed or self._look or self._choice or _FIRST)

    @property
    def _plans_plain(self) -> bool:
        return self._bound == 0 or self._plain_left > 0 or self._fixed == _PLAIN

    def _settled(self, drafted: _Option) -> tuple[_Option, int]:
        """The next round, `drafted` unless it is of a plain phase, and how many plain ones are sure
        to follow."""
        if not self._plans_plain:
            return drafted, 0
        run_ahead = self._controls.run_ahead_rounds
        if self._plain_left > 0:
            self._plain_left -= 1
            run_ahead = min(run_ahead, self._plain_left)
        return _PLAIN, run_ahead

    def _plan_plain(self) -> None:
        """Whether a plain phase goes on is settled before the target has to wait to hear of it."""
        if self._plain_ends or self._plain_left > self._controls.run_ahead_rounds:
            return
        drafted, plain = self._options()
        self._plain_ends = self._drafting_is_due(_best(drafted), plain)
        if not self._plain_ends:
            self._begin_plain()

    def _drafting_is_due(self, drafted: _Option, plain: _Option, begins: bool = False) -> bool:
        """Whether to draft: because that is quicker by enough for what the draft has to read, or to
        find out whether it is by now. `begins`: the session does."""
        costs, tuning, experience = self._costs, self._tuning, self._experience
        each = drafted.seconds * plain.rate - drafted.num_tokens
        num_rounds = tuning.choice_rounds if each > 0 else GAIN_ROUNDS
        lost = num_rounds * each + costs.reading_lost(plain.seconds, self._num_missed)
        self._num_drafted = self._num_paid = 0
        if lost < 0:
            return True
        self._num_paid = tuning.choice_rounds
        if self._controls.watches and costs.num_drafted >= TIMES_KNOWN_ROUNDS:
            return experience.pays(max(lost, min(TIMES_RARITY * lost, CREDIT_TOKENS_MAX)))
        return experience.begins(lost) if begins else experience.pays(lost)

    def _choose_again(self) -> None:
        """K of the rounds from the next one on, or the beginning of a plain phase."""
        drafted, plain = self._options()
        best, largest = _best(drafted), drafted[-1]
        current, is_first = best, self._choice is None
        if self._choice is not None:
            current = drafted[self._choice.num_draft_tokens - 1]
            if best.rate > current.rate * (1.0 + self._tuning.switch_gain):
                current = best
        self._choice, self._until_choice = current, self._tuning.choice_rounds - 1
        # One round with a draft is on its way.
        if is_first or self._num_drafted + 1 < self._num_paid:
            self._look = largest if self._experience.first_look() else None
        elif plain.rate > (1.0 + self._tuning.plain_gain) * current.rate:
            self._begin_plain()
        elif self._tries_plain(current, plain):
            self._plain_left, self._plain_ends = PLAIN_TRIED_ROUNDS, True
            self._choice, self._until_choice = None, 0
        else:
            lost = current.rate * largest.seconds - largest.num_tokens
            looks = self._experience.first_look() or self._experience.pays(lost)
            self._look = largest if looks else None

    def _tries_plain(self, drafted: _Option, plain: _Option) -> bool:
        """Whether to decode plainly for a while, so that what that takes is known."""
        if self._costs.plain.weight >= PLAIN_KNOWN_ROUNDS:
            return False
        lost = PLAIN_TRIED_ROUNDS * (plain.seconds * drafted.rate - plain.num_tokens)
        return drafted.rate < PLAIN_TRIED_BELOW * plain.rate and self._experience.pays(lost)

    def _begin_plain(self) -> None:
        """A plain phase begins, or the next one behind it."""
        self._plain_left += self._phase
        self._plain_ends = False
        self._phase = min(2 * self._phase, self._tuning.plain_rounds_max)
        self._choice, self._until_choice = None, 0

    def _options(self) -> tuple[list[_Option], _Option]:
        """What K = 1, 2, ... promise, and what plain decoding does.

        A proposal is drawn until as much time has been lost, beyond what it takes as a rule, as its
        tokens would take without it. So a draft that has become slow costs no more than twice what
        it brings, whenever that is."""
        costs = self._costs
        num_siblings = SIBLINGS_OF_A_ROUND_MAX if self._siblings_max else 0
        forecast = costs.forecast(self._bound, self._context, num_siblings)
        prospects = self._averages.prospects(self._bound)
        gained = (prospects.committed - prospects.proposed * forecast.token_lost).cumsum()
        taken_s = (prospects.proposed * forecast.token_s).cumsum()
        tokens = (gained + 1.0 - forecast.round_lost).tolist()
        promised = list(zip(tokens, (taken_s + forecast.round_s).tolist(), strict=True))
        found = shaped(promised, prospects, self._siblings, forecast, self._siblings_max)
        options = list[_Option]()
        for (siblings, num, seconds), draft_s in zip(found, forecast.draft_s.tolist(), strict=True):
            budget_s = math.inf
            if costs.are_known:
                worth_s = max(0.0, num - 1.0) * forecast.plain_s
                budget_s = max(DRAFT_BUDGET_MIN_S, draft_s + worth_s)
            options.append(_Option(len(options) + 1, num, seconds, siblings, budget_s))
        return options, replace(_PLAIN, seconds=forecast.plain_s)


def _best(options: list[_Option]) -> _Option:
    return max(options, key=lambda option: option.rate)
