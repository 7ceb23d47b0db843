"""Length control: chooses how many draft tokens (K) each round asks for, from the results of
finished rounds. It uses no clock and no random numbers.

K of round r is fixed when round r - 1 begins. At that time, neither target nor draft has drawn a
token of round r, even if they work ahead. So K does not depend on the random numbers of round r,
and sampling stays exact under every rule (proof: docs/exactness.md).

While plain decoding is faster than drafting, a session is in a plain phase with K = 0. Exploration
(rounds with drafting, with the largest K or with plain decoding) tests whether the expected speeds
are right. It runs only if the exploration budget covers the tokens that it is expected to lose. The
budget grows by `EXPLORATION_SHARE` of the tokens that all sessions commit.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coordinator.draft_length.acceptance import DepthAverages, depth_counts
from coordinator.draft_length.policy import RoundLength, RoundResult
from coordinator.draft_length.round_cost import SECONDS_MIN, Load, RoundCosts
from outrider.interfaces.messages import ReplicaDescription
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import DRAFTED_SEEDS_MAX
from outrider.speculation.sampling_params import Rule

MEMORY_ROUNDS, SHARED_MEMORY_ROUNDS = 48.0, 512.0
"""`memory_rounds` of a session's `DepthAverages`, and of the averages that all sessions share."""
PRIOR_ROUNDS = 12.0
"""The prior of an average weighs as much as this many rounds."""
CHOICE_ROUNDS = 4
"""Number of drafting rounds (K > 0) after which K is chosen again."""
EARLY_ROUNDS = 8
"""If rounds run ahead, what follows the planned rounds is decided when this many of them are left,
so that the target need not wait. An earlier decision would know less."""
KEPT_LOSS = 0.02
"""If the target's look-up or head drafts, a new K ends the rounds that run ahead. So K is kept if
it loses at most this share of the rate of the best K and of plain decoding, and `KEPT_CHANCE`
holds."""
KEPT_CHANCE = 0.05
"""Largest difference between the best `RoundLength.min_chance` and that of a K that is kept."""
PLAIN_GAIN = 0.02
"""A drafting session begins a plain phase only if plain decoding is faster by this share."""
PLAIN_ROUNDS, PLAIN_ROUNDS_MAX = 16, 128
"""Number of rounds of a session's first plain phase. Each later phase is twice as long, up to
`PLAIN_ROUNDS_MAX`."""
GAIN_ROUNDS = 32
"""A session changes from plain decoding to drafting if this many drafting rounds gain more than the
change costs."""
EXPLORATION_SHARE = 0.01
"""Share of all committed tokens that exploration may lose."""
BUDGET_TOKENS, BUDGET_TOKENS_MAX = 8.0, 16.0
"""Initial and largest exploration budget of each rule, in tokens."""
PROMPT_SIZES = (128, 512, 2048)
"""Bounds between classes of prompt lengths, in tokens."""
PLAIN_TRIED_BELOW = 1.5
"""Plain decoding is tried only if drafting is expected to be less than this many times as fast."""
PLAIN_TRIED_ROUNDS = 6
"""Rounds of plain decoding as exploration. The first is not measured (see `_follows_plain`)."""
PLAIN_KNOWN_ROUNDS = 2.0
"""Plain decoding is not tried while measured plain rounds have at least this `CostLine.weight`."""
DRAFT_BUDGET_MIN_S = 0.02
"""Shortest time limit of a proposal. Processes that share cores may be scheduled late, so even a
fast draft would miss a shorter limit."""
NO_COSTS = StepCosts((1,), (0.0,))
"""Step costs of a target that reports none. All its steps then count as equally long."""
_ENDLESS = sys.maxsize


class Experience:
    """Average acceptance in the sessions with one rule, and their common exploration budget. Each
    class of prompt lengths has its own averages, because answers to long prompts often copy from
    the prompt."""

    def __init__(self) -> None:
        self.averages = DepthAverages(SHARED_MEMORY_ROUNDS, PRIOR_ROUNDS)
        self.by_size = [
            DepthAverages(SHARED_MEMORY_ROUNDS, PRIOR_ROUNDS, self.averages)
            for _ in range(len(PROMPT_SIZES) + 1)
        ]
        self._left = BUDGET_TOKENS

    def add_budget(self, num_tokens: float) -> None:
        self._left = min(self._left + EXPLORATION_SHARE * num_tokens, BUDGET_TOKENS_MAX)

    def spend(self, num_tokens: float) -> bool:
        """If the budget covers an expected loss of `num_tokens`, subtracts it and returns True."""
        if num_tokens > self._left:
            return False
        self._left -= max(0.0, num_tokens)
        return True


class Learned:
    """Round costs and acceptance, learned from all sessions. Both depend on these sessions' random
    numbers. Under the rules token and block, a session that repeats a seed has the random numbers
    of an earlier session. Its K must not depend on these numbers (proof: docs/exactness.md), so
    this session neither reads nor extends this object."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.by_rule = {rule: Experience() for rule in Rule}


class LengthControls:
    """Creates a length control for each session. A draft, or a target that drafts, is *on trial*
    while it gets only a share of the sessions. These sessions learn separately from the others."""

    def __init__(
        self,
        target: ReplicaDescription,
        draft: ReplicaDescription | None,
        run_ahead_rounds: int,
        *,
        delays: bool = False,
        adapts: bool = True,
    ) -> None:
        """`delays` says whether draft and coordinator slow the target down by using its cores. If
        `adapts` is false, every round asks for as many tokens as the request allows."""
        self._target = target
        self._draft = draft
        self._delays = delays
        self.adapts = adapts
        self.run_ahead_rounds = run_ahead_rounds
        self.load = Load()
        self._learned: dict[ReplicaDescription | None, Learned] = {}
        """Drafter on trial -> what its sessions learned. None -> what other sessions learned."""
        self._firsts: dict[int, LengthControl | None] = {}
        """Seed -> its first session under the rules token and block. None = the session ended."""

    def learned(self, tried: ReplicaDescription | None = None) -> Learned:
        """Returns what sessions of the drafter `tried` have learned; None = all other sessions."""
        if tried not in self._learned:
            self._learned[tried] = self._nothing_learned(tried, self.load)
        return self._learned[tried]

    @property
    def costs(self) -> RoundCosts:
        return self.learned().costs

    def update_load(
        self, num_targets: int, num_elsewhere: int, draft: ReplicaDescription | None
    ) -> None:
        """Updates the `load`. If the draft's weights have changed, forgets the measured times of
        the earlier draft."""
        self.load.num_targets = max(1, num_targets)
        self.load.num_elsewhere = num_elsewhere
        known = self._draft
        if draft is not None and (known is None or draft.weights != known.weights):
            self._draft = draft
            self.costs.set_draft(draft.step_costs)

    def open(
        self,
        rule: Rule,
        seed: int,
        num_draft_tokens: int,
        prompt_length: int,
        tried: ReplicaDescription | None = None,
    ) -> LengthControl:
        """Begins a session whose rounds ask for at most `num_draft_tokens` tokens. `tried` is the
        session's drafter if this drafter is on trial. Under the rules token and block, a session
        that repeats a seed gets a fixed K. So does the first session with this seed, if it still
        runs."""
        self.load.num_sessions += 1
        bounds = num_draft_tokens, prompt_length
        if rule.absolute_noise:
            return LengthControl(self, self.learned(tried), rule, *bounds)
        if seed in self._firsts:
            if (running := self._firsts[seed]) is not None:
                running.fix()
            nothing = self._nothing_learned(tried, Load())
            repeated = LengthControl(self, nothing, rule, *bounds)
            repeated.fix()
            return repeated
        if len(self._firsts) >= DRAFTED_SEEDS_MAX:
            # Forgets the seeds of ended sessions. A later session with such a seed counts as the
            # seed's first session. So what was learned until now must be forgotten, too.
            self._firsts = {
                known: control for known, control in self._firsts.items() if control is not None
            }
            self._learned.clear()
        first = LengthControl(self, self.learned(tried), rule, *bounds, seed)
        self._firsts[seed] = first
        return first

    def close(self, seed: int | None) -> None:
        """Ends a session. `seed` is None for a session that is not in `_firsts`."""
        self.load.num_sessions -= 1
        if seed is not None:
            self._firsts[seed] = None

    def _nothing_learned(self, tried: ReplicaDescription | None, load: Load) -> Learned:
        target, draft = self._target, self._draft
        if tried is not None and tried.drafts_itself:
            target = tried
        elif tried is not None:
            draft = tried
        table = None if draft is None else draft.step_costs
        costs = RoundCosts(
            target.step_costs or NO_COSTS,
            table,
            target.max_num_seqs,
            load,
            drafting_delays=self._delays or target.drafts_itself,
        )
        return Learned(costs)


@dataclass(frozen=True, slots=True)
class _Option:
    """A possible K of a round, with the results that are expected from it."""

    num_draft_tokens: int
    num_tokens: float = 1.0
    """Number of committed tokens, minus the tokens that this round costs other sessions."""
    seconds: float = 0.0
    draft_budget_s: float = math.inf
    min_chance: float = 0.0

    @property
    def rate(self) -> float:
        return max(0.0, self.num_tokens) / max(self.seconds, SECONDS_MIN)


class _Plan(NamedTuple):
    """Rounds that follow those that are planned."""

    option: _Option
    num_rounds: int = 0
    """Not set for a plain phase."""
    ends: bool = False
    """Whether drafting certainly follows these plain rounds."""


_PLAIN = _Option(0)
_FIRST = _Option(0)
"""The first round of a drafting session has no proposal, so that the first token comes sooner."""


class LengthControl:
    """Chooses K for the rounds of one session."""

    def __init__(
        self,
        controls: LengthControls,
        learned: Learned,
        rule: Rule,
        num_draft_tokens: int,
        prompt_length: int,
        seed: int | None = None,
    ) -> None:
        """`seed` is None for a session that is not in `LengthControls._firsts`."""
        experience = learned.by_rule[rule]
        of_size = experience.by_size[bisect(PROMPT_SIZES, prompt_length)]
        self._controls = controls
        self._costs = learned.costs
        self._experience = experience
        self._averages = DepthAverages(MEMORY_ROUNDS, PRIOR_ROUNDS, of_size)
        self._shared_averages = (of_size, experience.averages)
        self._bound = num_draft_tokens
        self._seed = seed
        self.adapts = True
        """Whether finished rounds influence K of later rounds."""
        self.is_timed = True
        """See `RoundLength.is_timed`."""
        self._num_missed = 0
        """Number of tokens that the draft must read before it can propose."""
        self._phase = PLAIN_ROUNDS
        """Number of rounds of the next plain phase."""
        self._plain_ends = False
        """Whether drafting certainly follows the current plain phase."""
        self._following: _Plan | None = None
        """What certainly follows the planned rounds with drafts; None = not decided."""
        self._num_drafted = 0
        """Number of rounds with drafts from which the session has learned."""
        self._planned = _FIRST if num_draft_tokens else _PLAIN
        """The option of the `_num_planned` rounds that are planned after `_next`."""
        self._num_planned = 1 if num_draft_tokens else _ENDLESS
        self._fixed: _Option | None = None
        """The option of all rounds after the planned rounds; None = not fixed."""
        self._current: _Option | None = None
        self._num_asked = 0
        """Number of draft tokens that `_current` asks for. If the completion has no room for K
        tokens, this number is smaller than K."""
        self._follows_plain = False
        """Whether the round before `_current` was plain. If both rounds are plain, the target ran
        `_current` without waiting for the coordinator."""
        self._next: _Option | None = None
        self.min_chance = 0.0
        """`RoundLength.min_chance`, as known when options were last compared."""
        self._context = prompt_length
        self._ended_at: float | None = None
        if self._bound > 0:
            if self._costs.drafting_delays:
                self._num_missed = prompt_length
            drafted, plain = self._options()
            if not self._drafting_is_due(_best(drafted), plain):
                self._begin_plain()
        # Until the draft has read the prompt, its proposals come later than usual.
        self._num_missed = prompt_length
        if not controls.adapts:
            self._fix(self._bound)

    @property
    def plans_plain(self) -> bool:
        return self._planned is _PLAIN

    def fix(self) -> None:
        """If K is not fixed yet, fixes it at the value that is best so far. The next round, and
        plain rounds that are already planned, keep their K. From now on, nothing is learned from
        this session, and its drafting has no time limit."""
        self.is_timed = False
        if self.adapts:
            drafted, plain = self._options()
            self._fix(_best([plain, *drafted]).num_draft_tokens)

    def _fix(self, num_draft_tokens: int) -> None:
        self.adapts, self._plain_ends, self._following = False, True, None
        self._fixed = _Option(num_draft_tokens) if num_draft_tokens else _PLAIN
        if self._fixed is _PLAIN:
            self._planned, self._num_planned = _PLAIN, _ENDLESS
        elif self._current is None:  # No round has begun.
            self._planned, self._num_planned = _FIRST, 1
        elif self._planned is not _PLAIN:
            self._num_planned = 0

    def choose(
        self, num_left: int, *, by_target: bool = False, by_head: bool = False
    ) -> RoundLength:
        """Returns the length of the next round. The completion has room for `num_left` more tokens,
        including the correction or bonus. The last call of `note` does not influence this length,
        because a target or draft that works ahead may already have drawn tokens of this round.
        `by_target` states whether the target's look-up drafts, so that this round and later rounds
        with the same K may run ahead; `by_head`, whether a head in the target drafts for every
        round."""
        self._follows_plain = self._current is _PLAIN
        self._current = current = self._next or self._take_planned()
        run_ahead = 0
        if current is _PLAIN or (by_target and self.is_timed):
            run_ahead = self._most_ahead(num_left)
        self._plan(runs_ahead=by_head or (by_target and self.is_timed))
        self._next = following = self._take_planned()
        if by_head and following is not _PLAIN:
            # With the verdict of the last of these rounds, the target drafts for one more round,
            # which has the same K, too.
            run_ahead = self._most_ahead(num_left)
        self._num_asked = min(current.num_draft_tokens, num_left - 1)
        num_next = max(0, min(following.num_draft_tokens, num_left - 2))
        return RoundLength(
            self._num_asked,
            run_ahead,
            num_next,
            current.draft_budget_s,
            self.is_timed,
            current.min_chance,
        )

    def _most_ahead(self, num_left: int) -> int:
        """Returns how many of the planned rounds may run ahead."""
        return min(self._controls.run_ahead_rounds, self._num_planned, num_left - 1)

    def note(self, result: RoundResult) -> None:
        """Learns from the round whose length was chosen last. The next round is planned already, so
        only the rounds after it can change."""
        if not self.adapts:
            return
        before, self._ended_at = self._ended_at, result.ended_at
        self._context = result.context
        if before is None:
            return  # The time of the first round includes the prefill.
        costs, is_plain = self._costs, self._current is _PLAIN
        round_s = max(0.0, result.ended_at - before - result.next_draft_s)
        if result.ran_ahead:
            round_s = result.target_s  # The verdicts of several rounds may arrive together.
        costs.note_load(result, round_s)
        self._experience.add_budget(result.num_tokens)
        if is_plain:
            self._num_missed += result.num_tokens
            if self._follows_plain:
                costs.note_plain(round_s, result.context)
        elif result.num_asked > 0:
            self._num_drafted += 1
            costs.note_drafted(result, round_s, is_typical=self._num_missed == 0)
            self.note_watched(result.num_asked, result.survival)
        elif result.draft_s > 0 and self._num_missed == 0:
            costs.note_late(self._num_asked, result.draft_s)
        if not is_plain and (result.num_asked > 0 or result.draft_s > 0):
            self._num_missed = 0  # From now on, a late proposal counts as slow drafting.

    def note_watched(self, num_asked: int, survival: tuple[float, ...]) -> None:
        """Learns how many tokens of a proposal were accepted (see `RoundResult`), or would have
        been accepted in plain rounds (see `LookupProbe`)."""
        if self.adapts:
            counts = depth_counts(num_asked, survival)
            for averages in (self._averages, *self._shared_averages):
                averages.note(counts)

    def close(self) -> None:
        """Ends the session."""
        self._controls.close(self._seed)

    def _take_planned(self) -> _Option:
        self._num_planned -= 1
        return self._planned

    def _plan(self, *, runs_ahead: bool) -> None:
        """Plans further rounds if no planned round is left. Decides before the end of a plain phase
        whether the phase continues, so that the target can run ahead. If rounds with drafts run
        ahead (`runs_ahead`), decides early what follows them, too."""
        in_phase = self._planned is _PLAIN and not self._plain_ends
        is_draft = self._planned.num_draft_tokens > 0
        is_early = in_phase or (
            runs_ahead
            and is_draft
            and self._following is None
            and self._num_drafted >= CHOICE_ROUNDS
        )
        num_early = min(EARLY_ROUNDS, self._controls.run_ahead_rounds)
        if self._num_planned > is_early * num_early:
            return
        if self._fixed is not None:
            self._planned, self._num_planned = self._fixed, _ENDLESS
            return
        following, self._following = self._following, None
        if following is None:
            drafted, plain = self._options()
            best = _best(drafted)
            if in_phase and self._num_planned > 0:
                self._plain_ends = self._drafting_is_due(best, plain)
                if not self._plain_ends:
                    self._begin_plain(self._num_planned)
                return
            following = _Plan(best, CHOICE_ROUNDS)
            if is_draft:
                following = self._after_drafts(drafted, plain, keeps=runs_ahead)
        if following.option is self._planned:
            self._num_planned += following.num_rounds
        elif self._num_planned > 0:
            self._following = following
        elif following.option is _PLAIN and not following.ends:
            self._begin_plain()
        else:
            self._planned, self._num_planned, self._plain_ends = following

    def _after_drafts(self, drafted: list[_Option], plain: _Option, *, keeps: bool) -> _Plan:
        """Returns what follows the planned rounds with drafts. With `keeps`, their option may go
        on although it is not quite the best."""
        best, largest, planned = _best(drafted), drafted[-1], self._planned
        if plain.rate > (1.0 + PLAIN_GAIN) * best.rate:
            return _Plan(_PLAIN)
        if self._tries_plain(best, plain):
            return _Plan(_PLAIN, PLAIN_TRIED_ROUNDS, ends=True)
        # A round that explores the planned K would only end the rounds that run ahead.
        explores = not (keeps and planned.num_draft_tokens == largest.num_draft_tokens)
        if (
            explores
            and largest is not best
            and self._experience.spend(best.rate * largest.seconds - largest.num_tokens)
        ):
            return _Plan(largest, 1)
        rate = drafted[planned.num_draft_tokens - 1].rate
        is_near = abs(best.min_chance - planned.min_chance) <= KEPT_CHANCE
        fastest = max(best.rate, plain.rate)
        if keeps and is_near and rate >= (1.0 - KEPT_LOSS) * fastest:
            return _Plan(planned, CHOICE_ROUNDS)
        return _Plan(best, CHOICE_ROUNDS)

    def _drafting_is_due(self, drafted: _Option, plain: _Option) -> bool:
        """Whether drafting is expected to gain tokens over plain decoding, or the exploration
        budget covers the expected loss. Includes the loss while the draft reads tokens that it
        lacks."""
        each = drafted.seconds * plain.rate - drafted.num_tokens
        num_rounds = CHOICE_ROUNDS if each > 0 else GAIN_ROUNDS
        lost = num_rounds * each + self._costs.reading_lost(plain.seconds, self._num_missed)
        return lost < 0 or self._experience.spend(lost)

    def _tries_plain(self, drafted: _Option, plain: _Option) -> bool:
        if self._costs.plain.weight >= PLAIN_KNOWN_ROUNDS:
            return False
        lost = PLAIN_TRIED_ROUNDS * (plain.seconds * drafted.rate - plain.num_tokens)
        return drafted.rate < PLAIN_TRIED_BELOW * plain.rate and self._experience.spend(lost)

    def _begin_plain(self, num_more: int = 0) -> None:
        """Plans a plain phase, after `num_more` plain rounds of the current phase."""
        self._planned, self._num_planned = _PLAIN, num_more + self._phase
        self._plain_ends = False
        self._phase = min(2 * self._phase, PLAIN_ROUNDS_MAX)

    def _options(self) -> tuple[list[_Option], _Option]:
        """Returns the options of drafting with K = 1, 2, ..., and the option of plain decoding.

        The time limit of a proposal is d + g. d is the usual time of drafting. g is the time in
        which plain decoding commits as many tokens as the proposal is expected to add. Drafting is
        chosen only if d < g, so a slow draft costs less than 2 g."""
        costs = self._costs
        forecast = costs.forecast(self._bound, self._context)
        chances = self._averages.chances(self._bound)
        gained = chances.committed - chances.proposed * forecast.token_lost
        num_tokens = gained.cumsum() + 1.0 - forecast.round_lost
        seconds = (chances.proposed * forecast.token_s).cumsum() + forecast.round_s
        budget_s = np.full(self._bound, math.inf)
        if costs.are_known:
            worth_s = np.maximum(0.0, num_tokens - 1.0) * forecast.plain_s
            budget_s = np.maximum(DRAFT_BUDGET_MIN_S, forecast.draft_s + worth_s)
        rates = np.maximum(0.0, num_tokens) / np.maximum(seconds, SECONDS_MIN)
        prices = forecast.token_lost + forecast.token_s * rates
        columns = (num_tokens, seconds, budget_s, prices)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        options = [_Option(k, *row) for k, row in enumerate(rows, start=1)]
        self.min_chance = _best(options).min_chance
        return options, _Option(0, seconds=forecast.plain_s)


def _best(options: list[_Option]) -> _Option:
    return max(options, key=lambda option: option.rate, default=_PLAIN)
