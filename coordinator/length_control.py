"""How many draft tokens each round asks for. Pure: told of rounds, and asked for the next.

The choice depends on rounds that were verified and on times. It never depends on a proposal, or on
noise, of the round that it is made for: so it is exact under every rule (docs/exactness.md).

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

from outrider.limits import DRAFTED_SEEDS_MAX
from outrider.messages import ReplicaDescription
from outrider.speculation.sampling import Rule

from .depth_averages import DepthAverages
from .lengths import PlayedRound, RoundLength
from .round_costs import SECONDS_MIN, Forecast, RoundCosts
from .siblings import SIBLINGS_OF_A_ROUND_MAX, Shaper, SiblingAverages
from .trials import TUNING, Drafting, Trials, Tuning

PROMPT_SIZES: Final = (128, 512, 2048)
"""Tokens from which on a prompt is one of the next size."""
PLAIN_TRIED_BELOW: Final = 1.5
"""Plain decoding is tried where drafting is expected to be less than so many times as fast ..."""
PLAIN_TRIED_ROUNDS: Final = 6
"""... for so many rounds, of which the first is not timed."""
PLAIN_KNOWN_ROUNDS: Final = 2.0
"""What it takes is known while rounds of it weigh so much."""
PATIENCE_MIN_S: Final = 0.02
"""A proposal is drawn for so long at least: processes that share cores are not always on time."""
NEW_LOAD_LOST: Final = 1.0
"""Tokens that a round with a draft may lose where the load is another one than was measured."""


class Experience:
    """What sessions of one rule, with prompts of about one length, have shown: a long prompt often
    has what its answer copies."""

    def __init__(self, tuning: Tuning, of_rule: DepthAverages, trials: Trials) -> None:
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


class LengthControls:
    """What the sessions of one coordinator learn from each other.

    Times are shared by all. Acceptance is shared by sessions of one rule; but under rules whose
    noise is keyed by the round, only by the first session of each seed: what another one were told
    of the first would be about its own noise.
    """

    def __init__(
        self,
        target: ReplicaDescription,
        draft: ReplicaDescription | None,
        run_ahead_rounds: int,
        tuning: Tuning = TUNING,
        *,
        drafting_delays: bool = False,
    ) -> None:
        """`run_ahead_rounds` bounds how far the target may be ahead; `drafting_delays` as for
        `RoundCosts`."""
        self._has_draft = draft is not None
        draft_costs = None if draft is None else draft.step_costs
        self.costs = RoundCosts(
            target.step_costs, draft_costs, target.max_num_seqs, drafting_delays=drafting_delays
        )
        self.run_ahead_rounds = run_ahead_rounds
        self.tuning = tuning
        self._shared = {rule: self._nothing_shown() for rule in Rule}
        """By the length of prompts, see `_size`."""
        self._seeds: set[int] = set()
        """Seeds that a session had under a rule whose noise is keyed by the round ..."""
        self._running_seeds: set[int] = set()
        """... and those of them whose first session runs."""

    def hear_load(
        self, num_targets: int, num_elsewhere: int, draft: ReplicaDescription | None
    ) -> None:
        """How many targets there are now, how many sessions other coordinators run with them, and
        the first draft, once there is one."""
        self.costs.num_targets = max(1, num_targets)
        self.costs.num_elsewhere = num_elsewhere
        if draft is not None and not self._has_draft:
            self._has_draft = True
            self.costs.meet_draft(draft.step_costs)

    def open(
        self,
        rule: Rule,
        seed: int,
        num_draft_tokens: int,
        prompt_length: int,
        siblings_max: int = 0,
    ) -> LengthControl:
        """A session begins, which asks for so many draft tokens at most, and for so many siblings
        beside one."""
        self.costs.num_sessions += 1
        experience = self._shared[rule][_size(prompt_length)]
        if num_draft_tokens == 0 or rule.absolute_noise:
            return LengthControl(self, experience, num_draft_tokens, prompt_length, siblings_max)
        if seed in self._seeds:
            own = self._nothing_shown(alone=True)[0]
            return LengthControl(self, own, num_draft_tokens, prompt_length, siblings_max)
        self._remember(seed)
        experience = self._shared[rule][_size(prompt_length)]
        return LengthControl(self, experience, num_draft_tokens, prompt_length, siblings_max, seed)

    def close(self, first_of: int | None) -> None:
        """A session has ended: the first of this seed, if that matters."""
        self.costs.num_sessions -= 1
        if first_of is not None:
            self._running_seeds.discard(first_of)

    def _nothing_shown(self, *, alone: bool = False) -> list[Experience]:
        tuning = self.tuning
        of_rule = DepthAverages(tuning.shared_memory_rounds, tuning.shared_prior_rounds)
        trials = Trials(tuning, alone=alone)
        return [Experience(tuning, of_rule, trials) for _ in range(len(PROMPT_SIZES) + 1)]

    def _remember(self, seed: int) -> None:
        """Where seeds have to be forgotten, so is what their sessions have told."""
        if len(self._seeds) >= DRAFTED_SEEDS_MAX:
            self._seeds = set(self._running_seeds)
            for rule in Rule:
                if not rule.absolute_noise:
                    self._shared[rule] = self._nothing_shown()
        self._seeds.add(seed)
        self._running_seeds.add(seed)


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
        """Tokens a second."""
        return max(0.0, self.num_tokens) / max(self.seconds, SECONDS_MIN)


class LengthControl:
    """Chooses the lengths of one session's rounds by what they are expected to bring."""

    def __init__(
        self,
        controls: LengthControls,
        experience: Experience,
        num_draft_tokens: int,
        prompt_length: int,
        siblings_max: int,
        first_of: int | None = None,
    ) -> None:
        """`experience` is what to begin with and to add to; so many siblings a token may have.
        `first_of` goes back to `controls` in the end."""
        tuning = controls.tuning
        self._controls = controls
        self._experience = experience
        self._siblings_max = siblings_max
        self._siblings = SiblingAverages(
            tuning.memory_rounds, tuning.prior_rounds, experience.siblings
        )
        self._trials = experience.trials
        self._bound = num_draft_tokens
        self._first_of = first_of
        self._tuning = tuning
        self._averages = DepthAverages(
            tuning.memory_rounds, tuning.prior_rounds, experience.averages
        )
        self._num_draft_tokens = 0
        """K; 0 = not chosen yet."""
        self._beside: tuple[int, ...] = ()
        """Siblings that go with it ..."""
        self._patience_s = math.inf
        """... and how long such a round waits for its proposal."""
        self._num_asked = 0
        """K of the round that was chosen last."""
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
        self._is_plain = False
        """Whether the round that was chosen last is one of a plain phase."""
        self._followed = False
        """Whether the round before was one, too: the target then did not wait for this one."""
        self._context = prompt_length
        self._ended_at: float | None = None
        if self._bound > 0:
            if controls.costs.drafting_delays:
                self._num_missed = prompt_length
            drafted, plain = self._options()
            if not self._drafting_is_due(_best(drafted), plain, self._trials.begins):
                self._begin_plain(self._next_phase())
        # Where it drafts, the draft reads the prompt beside the target, and may need longer.
        self._num_missed = prompt_length

    @property
    def begins_plain(self) -> bool:
        """See `LengthPolicy.begins_plain`."""
        return self._bound == 0 or self._plain_left > 0

    @property
    def listens(self) -> bool:
        """See `LengthPolicy.listens`."""
        return True

    def choose(self, index: int, num_left: int) -> RoundLength:
        """See `LengthPolicy.choose`. The first round has no draft, for which it would wait."""
        if self._bound > 0 and index > 0:
            self._plan()
        self._followed = self._is_plain
        self._is_plain = self._bound == 0 or self._plain_left > 0
        if not self._is_plain:
            num_draft_tokens, siblings = self._num_draft_tokens, self._beside
            if self._looks is not None:
                num_draft_tokens, siblings = self._bound, self._looks
            next_max = min(self._longest_next(num_draft_tokens), num_left - 2)
            self._num_asked = num_draft_tokens = min(num_draft_tokens, num_left - 1)
            return RoundLength(
                num_draft_tokens, 0, siblings[:num_draft_tokens], max(0, next_max), self._patience_s
            )
        run_ahead = min(self._controls.run_ahead_rounds, num_left - 1)
        if self._bound > 0:
            self._plain_left -= 1
            run_ahead = min(run_ahead, self._plain_left)
        drafts_next = self._plain_ends and self._plain_left == 0
        next_max = min(self._longest_next(0), num_left - 2) if drafts_next else 0
        return RoundLength(0, run_ahead, next_max=max(0, next_max))

    def _longest_next(self, num_draft_tokens: int) -> int:
        """What the next round may come to ask for, behind one of so many tokens: where it is chosen
        anew one more than that, or than would be chosen now. A target that drafts itself is asked
        for as many before that is settled, and may take a step for each."""
        if self._until_choice > 0 and not self._experience.is_young:
            return num_draft_tokens
        likely = num_draft_tokens or _best(self._options()[0]).num_draft_tokens
        return min(self._bound, likely + 1)

    def note(self, played: PlayedRound) -> None:
        """See `LengthPolicy.note`."""
        before, self._ended_at = self._ended_at, played.ended_at
        self._context = played.context
        if before is None:
            return  # The first round runs the prompt.
        costs = self._controls.costs
        round_s = max(0.0, played.ended_at - before - played.next_draft_s)
        num_proposed = len(played.survival)
        num_rows = 1 + num_proposed + played.num_siblings
        costs.note_load(num_rows, played.num_tokens, round_s, played.target_s)
        if self._bound > 0:
            self._trials.earn(played.num_tokens)
        if self._is_plain:
            self._num_missed += played.num_tokens
            self._averages.fade(1)
            if self._followed:
                costs.note_plain(round_s, played.context)
            else:
                costs.note_first_plain(round_s)
        elif played.num_asked > 0:
            draft_s = None if self._num_missed > 0 else played.draft_s
            rest_s = round_s - played.draft_s - played.target_s
            num_drafted, work_s = num_proposed, played.work_s
            if played.beside is not None:
                draft_s, num_drafted = played.beside.seconds, played.beside.num_tokens
                work_s = played.beside.work_s
            costs.note_drafted(
                num_proposed, draft_s, played.target_s, rest_s, played.context,
                played.num_siblings, num_drafted, work_s,
            )  # fmt: skip
            self._siblings.note(played.siblings)
            self._experience.siblings.note(played.siblings)
            lost = costs.lost_in(num_rows - 1, draft_s or 0.0, work_s, played.context)
            self._drafting.note(played.num_tokens - lost, round_s + played.next_draft_s)
            self._averages.note(played.num_asked, played.survival)
            self._experience.note(played.num_asked, played.survival)
            self._num_missed = 0
        elif played.draft_s > 0:
            self._drafting.note(played.num_tokens, round_s)
            if self._num_missed == 0:
                costs.note_late(self._num_asked, played.draft_s)
            self._num_missed = 0  # No excuse for another one.

    def close(self) -> None:
        """See `LengthPolicy.close`."""
        self._controls.close(self._first_of)

    def _plan(self) -> None:
        """What the next round is to be."""
        if self._plain_left > 0:
            self._plan_plain()
        elif self._until_choice > 0 and not self._experience.is_young:
            self._until_choice -= 1
            self._looks = None
        else:
            self._choose_again()

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
        costs, tuning = self._controls.costs, self._tuning
        each = drafted.seconds * plain.rate - drafted.num_tokens
        if costs.load_is_new:
            each = max(each, NEW_LOAD_LOST)
        num_rounds = tuning.choice_rounds if each > 0 else tuning.gain_rounds
        lost = num_rounds * each + costs.detour_lost(plain.seconds, self._num_missed)
        if lost < 0:
            return True
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
        if is_first or self._drafting.num_rounds < self._drafting.num_paid:
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
        self._patience_s = self._patience(current if self._looks is None else drafted[-1], plain)

    def _patience(self, drafted: _Option, plain: _Option) -> float:
        """How long a proposal is drawn for: until as much time has been lost, beyond what it takes
        as a rule, as its tokens would take without it. So a draft that has become slow costs no
        more than twice what it brings, whenever that is."""
        if not self._controls.costs.are_known:
            return math.inf
        worth_s = max(0.0, drafted.num_tokens - 1.0) * plain.seconds
        return max(PATIENCE_MIN_S, drafted.draft_s + worth_s)

    def _plain_is_due(self, drafted: _Option, plain: _Option) -> bool:
        """Whether drafting has lost, and not only against what was expected of it."""
        enough = 1.0 + self._tuning.plain_gain
        return plain.rate > enough * drafted.rate and not self._drafting.beats(plain.rate)

    def _tries_plain(self, drafted: _Option, plain: _Option) -> bool:
        """Whether to decode plainly for a while, so that what that takes is known."""
        if self._controls.costs.plain_rounds_known >= PLAIN_KNOWN_ROUNDS:
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
        costs = self._controls.costs
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


def _size(prompt_length: int) -> int:
    """Which of the sizes a prompt has."""
    return bisect(PROMPT_SIZES, prompt_length)


def _best(options: Iterable[_Option]) -> _Option:
    """The quickest, of several the shortest."""
    return max(options, key=lambda option: option.rate)
