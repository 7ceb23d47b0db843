"""Length control: how many draft tokens (K) each round asks for. Pure: it learns from finished
rounds and chooses the length of the next one.

The length of a round is fixed when the previous round begins. At that moment no token of the round
has been drawn, neither here nor by a target or draft that works ahead. So the choice does not
depend on the round's random numbers, and sampling stays exact under every rule. Sessions that share
a seed get fixed lengths (`LengthControls.open`). docs/exactness.md has the proof. Without length
control (`adapts`), every round asks for as many tokens as the request allows.

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
import sys
from bisect import bisect
from copy import copy
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from coordinator.draft_length.acceptance import DepthAverages, SiblingAverage, observed
from coordinator.draft_length.policy import PlayedRound, RoundLength
from coordinator.draft_length.round_cost import SECONDS_MIN, Load, RoundCosts
from outrider.limits import DRAFTED_SEEDS_MAX, TREE_TOKENS_MAX
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
_ENDLESS = sys.maxsize
"""A number of rounds that no session reaches."""


class Experience:
    """What the sessions of one rule have shown. Acceptance is also kept by prompt length, as
    answers to long prompts often copy from them."""

    def __init__(self) -> None:
        self.averages = DepthAverages(SHARED_MEMORY_ROUNDS, SHARED_PRIOR_ROUNDS)
        self.by_size = [
            DepthAverages(SHARED_MEMORY_ROUNDS, PRIOR_ROUNDS, self.averages)
            for _ in range(len(PROMPT_SIZES) + 1)
        ]
        self.siblings = SiblingAverage(SHARED_MEMORY_ROUNDS, PRIOR_ROUNDS)
        self._left = CREDIT_TOKENS
        """Trial budget: tokens that trials may still lose."""

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
    earlier session, whose results must not influence its lengths. So a session with a repeated seed
    neither reads this nor adds to it (proof: docs/exactness.md)."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.by_rule = {rule: Experience() for rule in Rule}


class _Shared:
    """What the sessions of all drafters share."""

    def __init__(self) -> None:
        self.load = Load()
        self.learned: WeakKeyDictionary[LengthControls, Learned] = WeakKeyDictionary()
        self.seeds: set[int] = set()
        """Seeds of sessions under rules whose random numbers are keyed by the round."""
        self.running: dict[int, LengthControl] = {}
        """The first session of each seed, while it runs."""

    def make_room(self) -> None:
        """Forgets the seeds of ended sessions if there is no room for one more. Also forgets what
        was learned: the next session with such a seed counts as its first, and must not read what
        earlier ones showed."""
        if len(self.seeds) >= max(DRAFTED_SEEDS_MAX, len(self.running) + 1):
            self.seeds = set(self.running)
            self.learned.clear()


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
        adapts: bool = True,
    ) -> None:
        """`run_ahead_rounds` bounds how far the target may run ahead. With `delays`, draft and
        coordinator share the target's cores and so delay it. Without `adapts`, every round asks
        for as many tokens as the session allows."""
        self._target = target
        self._draft = draft
        self._delays = delays
        self.adapts = adapts
        self.run_ahead_rounds = run_ahead_rounds
        self._shared = _Shared()

    @property
    def learned(self) -> Learned:
        """What new sessions read and extend."""
        if self not in self._shared.learned:
            self._shared.learned[self] = self._nothing_learned(self.load)
        return self._shared.learned[self]

    @property
    def load(self) -> Load:
        return self._shared.load

    @property
    def costs(self) -> RoundCosts:
        return self.learned.costs

    def of_another(self, drafter: ReplicaDescription) -> LengthControls:
        """Controls for sessions with another drafter (a draft, or a target that drafts). They share
        load and seeds with this object, but learn separately."""
        found = copy(self)
        if drafter.drafts_itself:
            found._target = drafter
        else:
            found._draft = drafter
        return found

    def hear_load(
        self, num_targets: int, num_elsewhere: int, draft: ReplicaDescription | None
    ) -> None:
        """Updates the number of targets, the number of sessions that other coordinators run on
        them, and the draft. The times of a draft with other weights are learned from scratch."""
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
        bounds, shared = (num_draft_tokens, prompt_length, siblings_max), self._shared
        if rule.absolute_noise:
            return LengthControl(self, self.learned, rule, *bounds)
        if seed in shared.seeds:
            if seed in shared.running:
                shared.running[seed].fix()
            repeated = LengthControl(self, self._nothing_learned(Load()), rule, *bounds)
            repeated.fix()
            return repeated
        shared.make_room()
        first = LengthControl(self, self.learned, rule, *bounds, seed)
        shared.seeds.add(seed)
        shared.running[seed] = first
        return first

    def close(self, seed: int | None) -> None:
        """Ends a session; `seed` is None unless it was the first session of that seed."""
        self.load.num_sessions -= 1
        if seed is not None:
            self._shared.running.pop(seed, None)

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
    num_beside: int = 0
    """Siblings beside each draft token."""
    draft_budget_s: float = math.inf

    @property
    def rate(self) -> float:
        return max(0.0, self.num_tokens) / max(self.seconds, SECONDS_MIN)

    def siblings(self, num_places: int) -> tuple[int, ...]:
        """Siblings to ask for, at each of `num_places` places."""
        return (self.num_beside,) * num_places if self.num_beside else ()


_PLAIN = _Option(0)
"""A round of a plain phase."""
_FIRST = _Option(0)
"""The first round of a session that drafts: it does not wait for a proposal."""


class LengthControl:
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
        self._bound = num_draft_tokens
        self._num_beside = [
            min(siblings_max, TREE_TOKENS_MAX // num - 1) for num in range(1, num_draft_tokens + 1)
        ]
        """Siblings beside each token of K = 1, 2, ...: as many as the largest tree allows."""
        self._seed = seed
        self.adapts = True
        """Whether lengths depend on what rounds show."""
        self._is_timed = True
        self._choice: _Option | None = None
        """Length of the next rounds with a draft; None = not chosen yet."""
        self._drafted_left = 0
        """Rounds with a draft until the next choice."""
        self._num_missed = 0
        """Tokens that the draft has to read before it can propose any."""
        self._phase = PLAIN_ROUNDS
        """Rounds of the next plain phase."""
        self._plain_left = 0 if self._bound else _ENDLESS
        """Rounds of the plain phase that are certain to come."""
        self._plain_ends = False
        """Whether the plain phase ends with them."""
        self._current: _Option | None = None
        """The round that was chosen last."""
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
        if not controls.adapts:
            self._fix(_Option(self._bound, num_beside=self._num_beside[-1] if self._bound else 0))

    @property
    def plans_plain(self) -> bool:
        """Whether several rounds without a draft come next."""
        return self._plain_left > 0

    def fix(self) -> None:
        """Fixes K at the best value so far, unless it is fixed already. Rounds that are planned
        keep their K, and so do plain rounds that are certain to come. From now on nothing is
        learned from this session, and no time limit bounds drafting."""
        self._is_timed = False
        if self.adapts:
            drafted, plain = self._options()
            self._fix(_Option(_best([plain, *drafted]).num_draft_tokens))

    def _fix(self, length: _Option) -> None:
        self.adapts = False
        self._choice, self._drafted_left, self._plain_ends = length, _ENDLESS, True
        if length.num_draft_tokens == 0:
            self._plain_left = _ENDLESS
        elif self._current is None:
            self._plain_left = 0  # The target was not told to run ahead yet.

    def choose(self, index: int, num_left: int) -> RoundLength:
        """The length of round `index`; `num_left` more tokens fit the completion, the target's own
        one included. Independent of the last `note`: a target or draft that works ahead may already
        have drawn tokens of this round. The first round has no proposal: waiting for one would
        delay the first token."""
        length, run_ahead = self._next or self._taken(_FIRST)
        self._follows_plain = self._current is _PLAIN
        self._current = length
        self._next = self._plan()
        following, _ = self._next
        num_asked = min(length.num_draft_tokens, num_left - 1)
        num_next = max(0, min(following.num_draft_tokens, num_left - 2))
        return RoundLength(
            num_asked,
            min(run_ahead, num_left - 1),
            length.siblings(num_asked),
            num_next,
            length.draft_budget_s,
            following.siblings(num_next),
            is_timed=self._is_timed,
        )

    def note(self, played: PlayedRound) -> None:
        """Learns from the round chosen last. The next round is planned already, so this changes the
        one after it at the earliest."""
        if not self.adapts:
            return
        before, self._ended_at = self._ended_at, played.ended_at
        self._context = played.context
        if before is None:
            return  # The first round includes the prompt.
        costs, is_plain = self._costs, self._current is _PLAIN
        round_s = max(0.0, played.ended_at - before - played.next_draft_s)
        costs.note_load(played, round_s)
        self._experience.earn(played.num_tokens)
        if is_plain:
            self._num_missed += played.num_tokens
            if self._follows_plain:
                costs.note_plain(round_s, played.context)
        elif played.num_asked > 0:
            costs.note_drafted(played, round_s, is_typical=self._num_missed == 0)
            if played.sibling_taken is not None:
                self._experience.siblings.note(played.sibling_taken)
            self.note_watched(played.num_asked, played.survival)
        elif played.draft_s > 0 and self._num_missed == 0 and self._current is not None:
            costs.note_late(self._current.num_draft_tokens, played.draft_s)
        if not is_plain and (played.num_asked > 0 or played.draft_s > 0):
            self._num_missed = 0  # From here on a late proposal counts as slow drafting.

    def note_watched(self, num_asked: int, survival: tuple[float, ...]) -> None:
        """Notes how many tokens were accepted, or in a round without a draft, would have been:
        `num_asked` tokens were looked up for comparison; `survival` as in `PlayedRound`."""
        if self.adapts:
            counts = observed(num_asked, survival)
            for averages in (self._averages, *self._shared_averages):
                averages.note(counts)

    def close(self) -> None:
        """Call when the session ends."""
        self._controls.close(self._seed)

    def _plan(self) -> tuple[_Option, int]:
        """Plans the next round. Returns it, and how many plain rounds certainly follow it."""
        if self._plain_left > 0:
            self._plan_plain()
        elif self._drafted_left == 0:
            self._choose_again()
        return self._taken(self._choice or _FIRST)

    def _taken(self, drafted: _Option) -> tuple[_Option, int]:
        """Returns the next round: one of the plain phase if it goes on, otherwise `drafted`. Also
        returns how many plain rounds certainly follow."""
        if self._plain_left > 0:
            self._plain_left -= 1
            return _PLAIN, min(self._controls.run_ahead_rounds, self._plain_left)
        if drafted is not _FIRST:
            self._drafted_left -= 1
        return drafted, 0

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
        each = drafted.seconds * plain.rate - drafted.num_tokens
        num_rounds = CHOICE_ROUNDS if each > 0 else GAIN_ROUNDS
        lost = num_rounds * each + self._costs.reading_lost(plain.seconds, self._num_missed)
        return lost < 0 or self._experience.pays(lost)

    def _choose_again(self) -> None:
        """Chooses K from the next round on, or begins a plain phase."""
        drafted, plain = self._options()
        best, largest = _best(drafted), drafted[-1]
        is_first = self._choice is None
        self._choice, self._drafted_left = best, CHOICE_ROUNDS
        if is_first:
            return
        if plain.rate > (1.0 + PLAIN_GAIN) * best.rate:
            self._begin_plain()
        elif self._tries_plain(best, plain):
            self._plain_left, self._plain_ends, self._choice = PLAIN_TRIED_ROUNDS, True, None
            self._drafted_left = 0
        elif largest is not best and self._experience.pays(
            best.rate * largest.seconds - largest.num_tokens
        ):
            self._choice, self._drafted_left = largest, 1

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
        self._choice, self._drafted_left = None, 0

    def _options(self) -> tuple[list[_Option], _Option]:
        """The options K = 1, 2, ..., and plain decoding.

        The time limit of a proposal is its usual time plus what its accepted tokens would take in
        plain decoding, so a draft that becomes slow costs at most twice what it saves."""
        costs = self._costs
        forecast = costs.forecast(self._bound, self._context)
        prospects = self._averages.prospects(self._bound)
        num_beside = np.array(self._num_beside)
        chance = self._experience.siblings.chance * (num_beside > 0)
        num_tokens = (
            (prospects.committed - prospects.proposed * forecast.token_lost).cumsum()
            + chance * prospects.refused.cumsum()
            - num_beside * (prospects.proposed * forecast.row_lost).cumsum()
            + 1.0 - forecast.round_lost
        )  # fmt: skip
        seconds = (
            (prospects.proposed * forecast.token_s).cumsum()
            + num_beside * (prospects.proposed * forecast.row_s).cumsum()
            + forecast.round_s
        )
        budget_s = np.full(self._bound, math.inf)
        if costs.are_known:
            worth_s = np.maximum(0.0, num_tokens - 1.0) * forecast.plain_s
            budget_s = np.maximum(DRAFT_BUDGET_MIN_S, forecast.draft_s + worth_s)
        columns = (num_tokens, seconds, num_beside, budget_s)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        options = [_Option(k, *row) for k, row in enumerate(rows, start=1)]
        return options, _Option(0, seconds=forecast.plain_s)


def _best(options: list[_Option]) -> _Option:
    return max(options, key=lambda option: option.rate)
