"""Decides which tokens run in a step: first those of rounds, then chunks of long prefixes.

    item to run               tokens that run in a step
    a round                   all its tokens if there is room, otherwise none
    a longer item (a prefix)  a chunk that fills the remaining room, in order of arrival

A step has at most `max_num_batched_tokens` tokens. While rounds run, the step's time is limited,
too. Let n be the number of waiting prefixes, and t the time of a step that has only the rounds. The
next step with rounds must end within (1 + STEP_GROWTH * n) * t after the last step with rounds. So
one long prompt does not stall sessions that decode, and many prompts are prefilled soon. As prompts
end, n falls by at most the factor WAITING_DECAY in each step, so that the last of many prompts is
prefilled as fast as the first. If two prefixes or more wait, and n is at least the number of
sessions that decode, the time is not limited. If rounds fill a step, the oldest prefix still gets
PREFIX_TOKENS_MIN tokens, so rounds cannot starve prefixes.

A step's time is predicted from costs measured at the start. The prediction is corrected by measured
times, separately for steps with and without a prefix (`note_seconds`). A draft's step has several
passes (`note_passes`). The first pass runs the tokens that `share` grants. Each later pass runs
one token of every item whose tokens all ran in the first pass. A step with rounds is expected to
have as many passes as the last step with rounds."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outrider.interfaces.step_costs import StepCosts
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.replica.step_watch import ExpectedStep

ROUND_BACKLOG_MAX = NUM_DRAFT_TOKENS_MAX + 1
"""A round has at most this many tokens before its last `num_last` tokens (`TokenDemand`), because
the previous round committed no more. A demand that has more is a prefix."""
PREFIX_TOKENS_MIN = 8
STEP_GROWTH = 0.75
"""With one waiting prompt, the planned gap between two tokens is at most 1.75 t. If steps take
1.5 times their predicted time, the gap is 2.6 t, which is still less than 3 t."""
WAITING_DECAY = 0.95  # n falls at most by this factor in each step
CORRECTION_WEIGHT = 0.2  # weight of the newest step in the average of `TokenBudget._corrections`
CORRECTION_MAX = 1.1
"""Each new correction is clipped to this factor above or below the average, because other processes
may have delayed the step."""
ROUND_REST_STEPS = 4
"""After this number of steps in a row without a round, no more rounds are expected. Until then,
the sessions of the last rounds may still wait for their coordinators."""


class TokenDemand(NamedTuple):
    """The tokens that an item would run if it were alone in a step."""

    num_tokens: int  # at least 1
    num_last: int  # number of tokens at the end that must run in one step: 1..num_tokens
    context: int  # number of tokens of the session that are in the cache already

    @property
    def is_round(self) -> bool:
        return self.num_tokens - self.num_last <= ROUND_BACKLOG_MAX


class _Load(NamedTuple):
    rows: int = 0
    sessions: int = 0
    attention_s: float = 0.0  # time for reading the sessions' contexts, s; 0 without costs
    has_prefix: bool = False
    later_s: float = 0.0  # time of the passes after the first pass, s


class TokenBudget:
    """Decides which tokens run in steps of at most `max_tokens` tokens and `max_steps` sessions.
    Without `costs`, the time of a step is not limited."""

    def __init__(self, max_tokens: int, max_steps: int, costs: StepCosts | None = None) -> None:
        self._max_tokens = max_tokens
        self.max_steps = max_steps
        self._costs = costs
        self._last_rounds: _Load | None = None  # load of the last rounds; None = expects no rounds
        self._rest_steps = 0  # number of steps since the step of `_last_rounds`
        self._rest_s = 0.0  # predicted time of these steps, s
        self._step_s = 0.0  # predicted time of the step of `_last_rounds`, s
        self._last = _Load()
        self._num_carried = 0
        self._whole: list[TokenDemand] = []  # the demands whose tokens all run in the last step
        self._round_passes = 1
        self._num_waiting = 0.0  # the value n of the module's docstring
        self._num_decoding = 0.0  # largest number of rounds in a recent step; falls like n
        self._corrections = {False: 1.0, True: 1.0}  # measured / predicted time, by `has_prefix`

    def share(self, demands: Sequence[TokenDemand], num_carried: int = 0) -> list[int]:
        """Returns how many tokens of each of the `demands` this step runs. `demands` are in order
        of arrival. A round gets all its tokens or none. A prefix may also get a chunk that leaves
        at least `num_last` tokens for later steps. The step also continues `num_carried` rounds of
        earlier steps, with one token each. Without these, at least one demand gets tokens. Without
        demands, the time of the step is not predicted."""
        if not demands:
            self.drop_step()
            return []
        grants = [0] * len(demands)
        prefixes = [i for i, demand in enumerate(demands) if not demand.is_round]
        spared = _Load(PREFIX_TOKENS_MIN, 1) if prefixes else _Load()
        rows = sessions = self._num_carried = num_carried
        self._whole = []
        for index, demand in enumerate(demands):
            # The first round always fits, so that a series of prefixes cannot keep it waiting.
            most = self._max_tokens - (spared.rows if rows else 0)
            has_seat = sessions < self.max_steps - spared.sessions
            if demand.is_round and has_seat and rows + demand.num_tokens <= most:
                grants[index] = demand.num_tokens
                rows += demand.num_tokens
                sessions += 1
                self._whole.append(demand)
        attention_s = self._attention_seconds(
            (each.num_tokens, each.context) for each in self._whole
        )
        rounds = load = _Load(
            rows, sessions, attention_s, False, self._later_seconds(self._round_passes)
        )
        self._num_waiting = max(len(prefixes), WAITING_DECAY * self._num_waiting)
        self._num_decoding = max(rounds.sessions, WAITING_DECAY * self._num_decoding)
        most_wait = len(prefixes) > 1 and self._num_waiting >= self._num_decoding
        seconds = math.inf if most_wait else self._seconds_allowed(rounds)
        for index in prefixes:
            demand = demands[index]
            least = PREFIX_TOKENS_MIN if index == prefixes[0] else 0
            grants[index] = self._part(demand, load, seconds, least)
            if grants[index] == 0:
                break
            load = self._with(load, demand, grants[index])
            if grants[index] == demand.num_tokens:
                self._whole.append(demand)
        self._note(rounds, load)
        return grants

    def expect_no_rounds(self) -> None:
        """Lifts the limit of a step's time until the next round. Call this when all sessions of
        the last rounds have ended."""
        self._last_rounds = None

    def note_passes(self, num_passes: int) -> None:
        """Notes how many passes the last step had. Without a call, the step counts as one pass."""
        self._last = self._last._replace(later_s=self._later_seconds(num_passes))
        if self._last.rows and self._rest_steps == 0:
            self._round_passes = num_passes

    def note_seconds(self, seconds: float) -> None:
        """Notes the time of the last step, s."""
        foretold = self._cost_seconds(self._last)
        if foretold > 0:
            before = self._corrections[self._last.has_prefix]
            ratio = min(max(seconds / foretold, before / CORRECTION_MAX), before * CORRECTION_MAX)
            self._corrections[self._last.has_prefix] += CORRECTION_WEIGHT * (ratio - before)

    @property
    def expected(self) -> ExpectedStep:
        """What is expected of the step whose items `share` has chosen. Any thread may read this."""
        last = self._last
        return ExpectedStep(last.rows, last.sessions, self._seconds(last))

    def round_seconds(self, rows: int, sessions: int) -> float:
        """Returns the predicted time of a step that has only rounds, s; 0 without costs."""
        return self._seconds(_Load(rows, sessions))

    def drop_step(self) -> None:
        """Makes `note_seconds` ignore the last step, because it did not run all its tokens."""
        self._last = _Load()
        self._num_carried, self._whole = 0, []

    def _part(self, demand: TokenDemand, load: _Load, seconds: float, least: int) -> int:
        """Returns how many tokens of a prefix to run in addition to `load`, in a step of at most
        `seconds`. Returns at least `least`, even if the step then takes longer."""
        if load.sessions == self.max_steps:
            return 0
        most = min(demand.num_tokens, self._max_tokens - load.rows)
        low = min(least, most)
        low += bisect_right(
            range(low + 1, most + 1),
            seconds,
            key=lambda num: self._seconds(self._with(load, demand, num)),
        )
        return low if low == demand.num_tokens else min(low, demand.num_tokens - demand.num_last)

    def _seconds_allowed(self, rounds: _Load) -> float:
        """Returns how many seconds a step may take. L is the limit in the module's docstring. With
        rounds, a step may take L - `_rest_s`. Without rounds, it may take L - `_rest_s` -
        `_step_s`, so that it leaves `_step_s` for the next step with rounds."""
        newest = rounds if rounds.rows else self._last_rounds
        if newest is None:
            return math.inf
        passed_s = self._rest_s if rounds.rows else self._step_s + self._rest_s
        return (1 + STEP_GROWTH * self._num_waiting) * self._seconds(newest) - passed_s

    def _later_seconds(self, num_passes: int) -> float:
        """Returns the predicted time of all passes of the last step but the first, s."""
        if num_passes == 1:
            return 0.0
        num = self._num_carried + len(self._whole)
        attention_s = self._attention_seconds((1, demand.context) for demand in self._whole)
        return (num_passes - 1) * self._cost_seconds(_Load(num, num, attention_s))

    def _attention_seconds(self, sessions: Iterable[tuple[int, int]]) -> float:
        """Returns the time for reading the contexts of sessions with these numbers of tokens in the
        step and in the cache, s; 0 without costs."""
        costs = self._costs
        return 0.0 if costs is None else sum(costs.attention_seconds(*one) for one in sessions)

    def _with(self, load: _Load, demand: TokenDemand, num_tokens: int) -> _Load:
        attention_s = self._attention_seconds([(num_tokens, demand.context)])
        return _Load(
            load.rows + num_tokens,
            load.sessions + 1,
            load.attention_s + attention_s,
            load.has_prefix or not demand.is_round,
            load.later_s,
        )

    def _note(self, rounds: _Load, load: _Load) -> None:
        self._last = load
        if rounds.rows:
            self._last_rounds, self._step_s = rounds, self._seconds(load)
            self._rest_steps, self._rest_s = 0, 0.0
            return
        self._rest_steps += 1
        self._rest_s += self._seconds(load)
        if self._rest_steps >= ROUND_REST_STEPS:
            self._last_rounds = None

    def _seconds(self, load: _Load) -> float:
        """Returns the corrected prediction of a step's time; 0 without costs."""
        return self._corrections[load.has_prefix] * self._cost_seconds(load)

    def _cost_seconds(self, load: _Load) -> float:
        if self._costs is None or load.rows == 0:
            return 0.0
        first_s = self._costs.mixed_seconds(load.rows, load.sessions, load.attention_s)
        return first_s + load.later_s
