"""How many draft tokens each round asks for. Pure: told of rounds, and asked for the next.

The choice depends on rounds that were verified and on times. It never depends on a proposal, or on
noise, of the round that it is made for: so it is exact under every rule (docs/exactness.md).

| phase of a session | K | it ends |
| --- | --- | --- |
| drafting | the best by expected tokens and expected time | when plain decoding is better |
| plain | 0; the target runs ahead of the coordinator as far as the phase goes | after its rounds |

A plain phase is followed by some rounds with a draft, whatever is known: they find out whether
drafting pays by now. While it does not, plain phases grow longer.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.limits import DRAFTED_SEEDS_MAX
from outrider.messages import ReplicaDescription
from outrider.speculation.sampling import Rule

from .depth_averages import DepthAverages
from .lengths import PlayedRound, RoundLength
from .round_costs import Forecast, RoundCosts

PLAIN_TRIED_AFTER_ROUNDS: Final = 16
"""Rounds with a draft, of all sessions, after which plain decoding is tried once ..."""
PLAIN_TRIED_EVERY_ROUNDS: Final = 2048
"""... and so many after plain decoding was last seen, it is tried again ..."""
PLAIN_TRIED_BELOW: Final = 1.5
"""... where drafting is expected to be less than so many times as fast."""
PLAIN_TRIED_ROUNDS: Final = 8
BEGINNINGS_FAILED: Final = 4
"""Sessions in a row that may draft in vain when they begin; after each further one ..."""
BEGINNINGS_DOUBLED: Final = 3
"""... half as many try as before, so many times at most."""
PROMPT_SIZES: Final = (128, 512, 2048)
"""Tokens from which on a prompt is one of the next size."""
FAILURES_MAX: Final = 16
"""More of them make no phase longer."""
SECONDS_MIN: Final = 1e-9
"""Nothing is expected to take less."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How quickly lengths follow what is measured."""

    memory_rounds: float = 48.0
    """A session's round weighs 1 / e after so many more."""
    shared_memory_rounds: float = 512.0
    """The same for the averages over all sessions."""
    prior_rounds: float = 6.0
    """Rounds of a session that weigh as much as those averages ..."""
    shared_prior_rounds: float = 24.0
    """... and rounds of all sessions as what is assumed where nothing is known."""
    choice_rounds: int = 4
    """Rounds with a draft between two choices; so many follow each plain phase in any case."""
    switch_gain: float = 0.02
    """K changes only for a choice that is better by this share."""
    choices_a_look: int = 8
    """Each so manieth choice looks one token further, until the next one ..."""
    look_loss_max: float = 0.1
    """... unless that is expected to be slower by this share: nothing else tells of such depths."""
    plain_rounds_min: int = 16
    plain_rounds_max: int = 512
    trial_loss_max: float = 0.01
    """What the rounds with a draft after a plain phase may cost in vain, as a share of it."""
    settled_rounds: int = 16
    """Drafting that was given up sooner was a trial, and failed."""


TUNING: Final = Tuning()


class SharedAcceptance:
    """What sessions of one rule, with prompts of about one length, have shown: a long prompt often
    has what its answer copies."""

    def __init__(self, tuning: Tuning, of_rule: DepthAverages) -> None:
        """`of_rule` are the averages over prompts of any length."""
        memory_rounds = tuning.shared_memory_rounds
        self.averages = DepthAverages(memory_rounds, tuning.prior_rounds, of_rule)
        self._of_rule = of_rule
        self._failed = 0
        """Sessions in a row that gave up drafting soon after they began."""
        self._skipped = 0
        """Sessions since the last one that began with a draft."""

    def note(self, num_asked: int, survival: Sequence[float]) -> None:
        """See `DepthAverages.note`."""
        self.averages.note(num_asked, survival)
        self._of_rule.note(num_asked, survival)

    def begin(self) -> bool:
        """Whether a session for which averages promise nothing should draft its first rounds all
        the same: what it is about may be another thing. While that fails, fewer and fewer do."""
        spacing = 2 ** min(max(0, self._failed - BEGINNINGS_FAILED), BEGINNINGS_DOUBLED)
        self._skipped = (self._skipped + 1) % spacing
        return self._skipped == 0

    def ended(self, *, failed: bool) -> None:
        """A session that began with a draft gave up soon, or has gone on with it."""
        self._failed = self._failed + 1 if failed else 0


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
    ) -> None:
        """`run_ahead_rounds` bounds how far the target may be ahead."""
        draft_costs = None if draft is None else draft.step_costs
        self.costs = RoundCosts(target.step_costs, draft_costs, target.max_num_seqs)
        self.run_ahead_rounds = run_ahead_rounds
        self.tuning = tuning
        self._shared = {rule: self._nothing_shown() for rule in Rule}
        """By the length of prompts, see `_size`."""
        self._seeds: set[int] = set()
        """Seeds that a session had under a rule whose noise is keyed by the round ..."""
        self._running_seeds: set[int] = set()
        """... and those of them whose first session runs."""
        self._rounds_without_plain = 0
        self._plain_seen = False

    def open(
        self, rule: Rule, seed: int, num_draft_tokens: int, prompt_length: int
    ) -> LengthControl:
        """A session begins, which asks for so many draft tokens at most."""
        self.costs.num_sessions += 1
        if num_draft_tokens == 0 or rule.absolute_noise:
            shared = self._shared[rule][_size(prompt_length)]
            return LengthControl(self, shared, num_draft_tokens, prompt_length)
        if seed in self._seeds:
            return LengthControl(self, None, num_draft_tokens, prompt_length)
        self._remember(seed)
        shared = self._shared[rule][_size(prompt_length)]
        return LengthControl(self, shared, num_draft_tokens, prompt_length, seed)

    def close(self, first_of: int | None) -> None:
        """A session has ended: the first of this seed, if that matters."""
        self.costs.num_sessions -= 1
        if first_of is not None:
            self._running_seeds.discard(first_of)

    def drafted(self) -> None:
        """A round with a draft was played."""
        self._rounds_without_plain += 1

    def decoded_plainly(self) -> None:
        """A round of plain decoding was timed."""
        self._rounds_without_plain = 0
        self._plain_seen = True

    def tries_plain(self, advantage: float) -> bool:
        """Whether a session that drafts should decode plainly for a while, so that what that takes
        is known: by the rounds since, and where drafting is not sure to be quicker, being expected
        to be so many times as fast. The session that is told so does."""
        due = PLAIN_TRIED_EVERY_ROUNDS if self._plain_seen else PLAIN_TRIED_AFTER_ROUNDS
        if self._rounds_without_plain < due or advantage >= PLAIN_TRIED_BELOW:
            return False
        self._rounds_without_plain = 0
        return True

    def _nothing_shown(self) -> list[SharedAcceptance]:
        tuning = self.tuning
        of_rule = DepthAverages(tuning.shared_memory_rounds, tuning.shared_prior_rounds)
        return [SharedAcceptance(tuning, of_rule) for _ in range(len(PROMPT_SIZES) + 1)]

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
    """Expected, less ..."""
    lost: float
    """... those that other sessions lose."""
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / max(self.seconds, SECONDS_MIN)


class LengthControl:
    """Chooses the lengths of one session's rounds by what they are expected to bring."""

    def __init__(
        self,
        controls: LengthControls,
        shared: SharedAcceptance | None,
        num_draft_tokens: int,
        prompt_length: int,
        first_of: int | None = None,
    ) -> None:
        """`shared` is what to begin with and to add to; None where there must not be anything.
        `first_of` goes back to `controls` in the end."""
        tuning = controls.tuning
        self._controls = controls
        self._shared = shared
        self._bound = num_draft_tokens
        self._first_of = first_of
        self._tuning = tuning
        prior = None if shared is None else shared.averages
        self._averages = DepthAverages(tuning.memory_rounds, tuning.prior_rounds, prior)
        self._num_draft_tokens = 0
        """K, but for a look at the depth behind it."""
        self._look = 0
        """How much further than that the rounds until the next choice look."""
        self._until_choice = 0
        """Rounds with a draft until the next choice."""
        self._until_look = tuning.choices_a_look
        """Choices until the next look."""
        self._num_drafted = 0
        """Rounds with a draft since the last plain phase; all but the first, for which the draft
        has to read what it missed, ..."""
        self._drafted_tokens = 0
        """... committed so many tokens ..."""
        self._drafted_s = 0.0
        """... in so many seconds."""
        self._failures = 0
        """Trials that failed, one after the other."""
        self._plain_left = 0
        """Rounds of the plain phase that are still to come."""
        self._is_plain = False
        """Whether the round that was chosen last is one of a plain phase."""
        self._followed = False
        """Whether the round before was one, too: the target then did not wait for this one."""
        self._draft_is_behind = True
        """Whether the draft has tokens to read that it missed before it can propose any."""
        self._context = prompt_length
        self._ended_at: float | None = None
        if self._bound > 0:
            drafted, plain = self._options()
            best = _best(drafted)
            if plain.rate > best.rate and shared is not None and not shared.begin():
                self._begin_plain(self._phase_rounds(best, plain, prompt_length))
        self._is_beginning = not self.begins_plain
        """Whether it has drafted from its beginning, and not for long."""

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
        if self._bound > 0 and self._plain_left == 0 and index > 0:
            self._choose_again()
        self._followed = self._is_plain
        self._is_plain = self._bound == 0 or self._plain_left > 0
        if not self._is_plain:
            return RoundLength(min(self._num_draft_tokens + self._look, num_left - 1), 0)
        run_ahead = min(self._controls.run_ahead_rounds, num_left - 1)
        if self._bound > 0:
            self._plain_left -= 1
            run_ahead = min(run_ahead, self._plain_left)
        return RoundLength(0, run_ahead)

    def note(self, played: PlayedRound) -> None:
        """See `LengthPolicy.note`."""
        before, self._ended_at = self._ended_at, played.ended_at
        self._context = played.context
        if before is None:
            return  # The first round runs the prompt.
        costs = self._controls.costs
        round_s = max(0.0, played.ended_at - before)
        num_proposed = len(played.survival)
        costs.note_load(1 + num_proposed, played.num_tokens, round_s, played.target_s)
        if self._is_plain:
            self._averages.fade(1)
            if self._followed:
                costs.note_plain(round_s, played.context)
                self._controls.decoded_plainly()
        elif played.num_asked > 0:
            draft_s = None if self._draft_is_behind else played.draft_s
            self._drafted_s += 0.0 if self._draft_is_behind else round_s
            rest_s = round_s - played.draft_s - played.target_s
            costs.note_drafted(num_proposed, draft_s, played.target_s, rest_s, played.context)
            self._note_draft(played)

    def close(self) -> None:
        """See `LengthPolicy.close`."""
        self._controls.close(self._first_of)

    def _note_draft(self, played: PlayedRound) -> None:
        self._averages.note(played.num_asked, played.survival)
        if self._shared is not None:
            self._shared.note(played.num_asked, played.survival)
        self._num_drafted += 1
        self._drafted_tokens += 0 if self._draft_is_behind else played.num_tokens
        self._draft_is_behind = False
        if self._num_drafted > self._tuning.settled_rounds:
            self._end_beginning(failed=False)
        self._controls.drafted()

    def _choose_again(self) -> None:
        """K of the rounds from the next one on, or the beginning of a plain phase."""
        if self._until_choice > 0:
            self._until_choice -= 1
            return
        self._until_choice, self._look = self._tuning.choice_rounds - 1, 0
        drafted, plain = self._options()
        best = _best(drafted)
        if self._num_drafted == 0:
            self._num_draft_tokens = best.num_draft_tokens
            return
        enough = 1.0 + self._tuning.switch_gain
        current = drafted[self._num_draft_tokens - 1]
        if best.rate > current.rate * enough:
            self._num_draft_tokens, current = best.num_draft_tokens, best
        if plain.rate > current.rate * enough and not self._trial_pays(current, plain):
            failed = self._num_drafted <= self._tuning.settled_rounds
            self._failures = self._failures + 1 if failed else 0
            self._end_beginning(failed=True)
            missed = self._tuning.plain_rounds_min
            self._begin_plain(self._phase_rounds(current, plain, missed))
        elif self._controls.tries_plain(current.rate / plain.rate):
            self._plain_left = PLAIN_TRIED_ROUNDS
            self._draft_is_behind = True
        else:
            self._look = self._looks(drafted)

    def _end_beginning(self, *, failed: bool) -> None:
        if self._is_beginning and self._shared is not None:
            self._shared.ended(failed=failed)
        self._is_beginning = False

    def _looks(self, drafted: Sequence[_Option]) -> int:
        """How much further than K the next rounds are to look."""
        self._until_look -= 1
        if self._until_look > 0:
            return 0
        self._until_look = self._tuning.choices_a_look
        if self._num_draft_tokens == self._bound:
            return 0
        current, further = drafted[self._num_draft_tokens - 1 : self._num_draft_tokens + 1]
        return int(further.rate >= (1.0 - self._tuning.look_loss_max) * current.rate)

    def _trial_pays(self, current: _Option, plain: _Option) -> bool:
        """Whether rounds that were drafted as a trial were worth it, whatever came before them: a
        few of them do not change an average."""
        if self._num_drafted > self._tuning.settled_rounds:
            return False
        gained = self._drafted_tokens - (self._num_drafted - 1) * current.lost
        return gained > self._drafted_s * plain.rate

    def _phase_rounds(self, drafted: _Option, plain: _Option, num_missed: int) -> int:
        """Rounds of a plain phase: so many that the trial behind it, before which the draft has
        some missed tokens to read, costs little beside them; and twice as many for each further
        trial that fails."""
        tuning = self._tuning
        lost = tuning.choice_rounds * (drafted.seconds * plain.rate - drafted.num_tokens)
        lost += self._controls.costs.draft_reading_s(num_missed) * plain.rate
        rounds = max(tuning.plain_rounds_min, lost / tuning.trial_loss_max)
        doubled = min(max(0, self._failures - 1), FAILURES_MAX)
        return int(min(tuning.plain_rounds_max, rounds * 2**doubled))

    def _begin_plain(self, num_rounds: int) -> None:
        self._plain_left = num_rounds
        self._draft_is_behind = True
        self._num_draft_tokens = self._look = self._until_choice = 0
        self._num_drafted = self._drafted_tokens = 0
        self._drafted_s = 0.0

    def _options(self) -> tuple[list[_Option], _Option]:
        """What K = 1, 2, ... promise, and what plain decoding does."""
        forecast: Forecast = self._controls.costs.forecast(self._bound, self._context)
        prospects = self._averages.prospects(self._bound)
        options: list[_Option] = []
        num_tokens, lost, seconds = 1.0, 0.0, forecast.round_s
        for depth in range(self._bound):
            proposed = prospects.proposed[depth]
            num_tokens += prospects.committed[depth]
            lost += proposed * forecast.lost[depth]
            seconds += proposed * forecast.token_s[depth]
            options.append(_Option(depth + 1, num_tokens - lost, lost, seconds))
        return options, _Option(0, 1.0, 0.0, forecast.plain_s)


def _size(prompt_length: int) -> int:
    """Which of the sizes a prompt has."""
    return bisect(PROMPT_SIZES, prompt_length)


def _best(options: Iterable[_Option]) -> _Option:
    """The quickest, of several the shortest."""
    return max(options, key=lambda option: option.rate)
