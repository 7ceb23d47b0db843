"""Forecasts the cost of a round from the engines' tables of step times, and from the times of
finished rounds.

| quantity | known from |
| --- | --- |
| wait for a proposal | at first the draft's table, then measured |
| the target's step, for all sessions' rows (tokens) | at first the target's table, then measured |
| wait for the target's step to begin | measured while other sessions use the target |
| messages, and the coordinator's work | measured: a round's time minus the times above |
| share of the other sessions' rounds that are plain | measured |
| tokens that other sessions cannot decode while drafting uses shared cores | measured |
| a plain round | at first the time of the target's step, then measured as a whole |
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.interfaces.step_costs import StepCosts

from .policy import RoundResult

MEMORY_ROUNDS = 64.0
"""The weight of a measured time falls to 1/e after this many further measurements of its kind."""
LOAD_MEMORY_ROUNDS = 256.0
OUTLIER = 8.0
"""Measured times count as at most this multiple of the mean time of a round."""
NOISE = 0.15
"""Assumed standard deviation of a measured time, as a share of this time."""
TABLE_SPREAD = 0.5
"""Standard deviation of the prior of m / t. The prior's mean is 1. m is a draft token's measured
time, and t is its time in the draft's table."""
STEP_SPREAD = 0.2
"""Like `TABLE_SPREAD`, for the target's time per row. Measured times per row are too low
(regression dilution), because the number of other sessions' rows is an estimate. A small spread
gives these measured times little weight."""
MEAN_SPREAD = 1.0
"""Like `TABLE_SPREAD`, for a draft without a table. t is then the mean measured time."""
PLAIN_PRIOR_ROUNDS = 1.0
"""In the forecast of a plain round's time, the estimate from drafting rounds (K > 0) weighs as much
as this many measured plain rounds."""
SECONDS_MIN = 1e-9
KEPT = 1.0 - 1.0 / 512.0
"""Each drafting round multiplies the weight of the measured plain rounds by this factor. So slow
plain rounds are forgotten after some time, and plain decoding is tried again."""
Array = npt.NDArray[np.float64]


class CostLine:
    """Fits seconds as a linear function of a quantity x >= 0, by exponentially weighted least
    squares with a prior for the slope. The slope and the fitted values are never negative."""

    def __init__(self, spread: float, *, relative: bool) -> None:
        """The prior of the slope has mean 1 and standard deviation `spread`. If `relative` is true,
        both are multiples of m / n. m is the mean measured time, and n is the mean x."""
        self.weight = 0.0
        """Total weight of the measurements, at most `MEMORY_ROUNDS`."""
        self._spread, self._relative = spread, relative
        self._x = self._y = self._xx = self._xy = 0.0

    def note(self, x: float, seconds: float) -> None:
        self.fade(1.0 - 1.0 / MEMORY_ROUNDS)
        self.weight += 1.0
        dx = x - self._x
        self._x += dx / self.weight
        self._y += (seconds - self._y) / self.weight
        self._xx += dx * (x - self._x)
        self._xy += dx * (seconds - self._y)

    def fade(self, keep: float) -> None:
        self.weight *= keep
        self._xx *= keep
        self._xy *= keep

    def at(self, x: npt.ArrayLike) -> Array:
        return self._y + self.slope() * (np.asarray(x) - self._x)

    def slope(self) -> float:
        if self.weight == 0.0:
            return 1.0
        if self._y <= 0.0 or self._x <= 0.0:
            return 0.0
        mean = self._y / self._x if self._relative else 1.0
        pull = (NOISE * self._y / (self._spread * mean)) ** 2
        slope = (self._xy + pull * mean) / (self._xx + pull)
        return min(max(0.0, slope), self._y / self._x)


class _Mean:
    def __init__(self, memory_rounds: float = MEMORY_ROUNDS) -> None:
        self._keep = 1.0 - 1.0 / memory_rounds
        self._weight = 0.0
        self.value = 0.0

    def note(self, value: float) -> None:
        self._weight = self._weight * self._keep + 1.0
        self.value += (value - self.value) / self._weight


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected times of a session's next round, and the tokens that other sessions lose to this
    round. The round lengthens the steps of other sessions, which may also wait for its messages,
    and its drafting may use shared cores."""

    plain_s: float
    round_s: float
    """Time of a round that asks for draft tokens and gets none."""
    round_lost: float
    """Tokens that other sessions lose to a round that gets no draft tokens."""
    token_s: Array
    """[K]: time that the first, second, ... proposed token adds."""
    token_lost: Array
    """[K]: tokens that other sessions lose to the first, second, ... proposed token."""
    draft_s: Array
    """[K]: wait for a proposal of one, two, ... tokens."""


class Load:
    """The number of one coordinator's targets, and the numbers of current sessions on them."""

    def __init__(self, num_sessions: int = 0) -> None:
        self.num_sessions, self.num_targets = num_sessions, 1
        self.num_elsewhere = 0
        """Number of sessions of other coordinators on the same targets."""


class RoundCosts:
    """Learns and forecasts the times of a coordinator's rounds, for one target and one draft."""

    def __init__(
        self,
        target: StepCosts,
        draft: StepCosts | None,
        max_num_seqs: int,
        load: Load,
        *,
        drafting_delays: bool,
    ) -> None:
        """`target` and `draft` are the engines' tables. At most `max_num_seqs` sessions share a
        step of the target. With `drafting_delays`, drafting delays the target, because the target
        itself drafts, or shares cores or a device with the draft."""
        self.load = load
        self.drafting_delays = drafting_delays
        self._table = target
        self._max_others = max_num_seqs - 1.0
        self._target, self.plain = (CostLine(STEP_SPREAD, relative=True) for _ in range(2))
        self.set_draft(draft)
        self._wait, self._rest = _Mean(), _Mean()
        """`_wait` is the wait for the target's step while other sessions use the target, as a share
        of the step's time. `_rest` is the time of messages and of the coordinator's work."""
        self._round, self._at_target, self._rows, self._tokens, self._context, self._plain = (
            _Mean(LOAD_MEMORY_ROUNDS) for _ in range(6)
        )

    def set_draft(self, costs: StepCosts | None) -> None:
        """Starts with the table of a new draft, and drops the measured times of earlier drafts."""
        self._draft_table = costs
        self._draft_token = SECONDS_MIN if costs is None else costs.step_seconds(1)
        """Seconds per token in the draft's table. Without a table, almost 0, so that drafting is
        tried and its times are measured."""
        spread = MEAN_SPREAD if costs is None else TABLE_SPREAD
        self._draft, self._draft_work = (CostLine(spread, relative=costs is None) for _ in range(2))

    def note_load(self, result: RoundResult, round_s: float) -> None:
        """Counts a round of any kind. `round_s` is the time since the end of the previous round."""
        self._round.note(self._bounded(round_s))
        self._at_target.note(self._bounded(result.target_s))
        self._rows.note(1 + len(result.survival))
        self._context.note(result.context)
        self._tokens.note(result.num_tokens)
        self._plain.note(result.num_asked == 0 and result.draft_s == 0)

    def note_plain(self, round_s: float, context: int) -> None:
        """Counts a plain round that follows another plain round."""
        self.plain.note(self._load(0, context, self._others()), self._bounded(round_s))

    def note_drafted(self, result: RoundResult, round_s: float, is_typical: bool = True) -> None:
        """Counts a round that asked for draft tokens. `is_typical` is false if the draft first
        had to read tokens that it had missed. The wait for such a proposal does not count."""
        num_proposed = len(result.survival)
        num_drafted, draft_s, work_s = result.beside or (
            num_proposed,
            result.draft_s,
            result.work_s,
        )
        if is_typical or result.beside is not None:
            self._draft.note(num_drafted * self._draft_token, self._bounded(draft_s))
            self._draft_work.note(num_drafted * self._draft_token, self._bounded(work_s))
            rest_s = round_s - result.draft_s - result.target_s
            self._rest.note(self._bounded(max(0.0, rest_s)))
        others, step_s = self._others(), result.target_s - result.queue_s
        if others > 0 and step_s > 0:
            self._wait.note(min(1.0, result.queue_s / step_s / min(1.0, others)))
        load = self._load(num_proposed, result.context, others)
        self._target.note(load, self._bounded(step_s))
        self.plain.fade(KEPT)

    def note_late(self, num_asked: int, waited_s: float) -> None:
        """Counts a proposal of `num_asked` tokens that did not arrive within `waited_s`."""
        self._draft.note(num_asked * self._draft_token, self._bounded(waited_s))

    def forecast(self, num_draft_tokens: int, context: int) -> Forecast:
        others, pace = self._others(), self._pace()
        loads = np.array([self._load(num, context, others) for num in range(num_draft_tokens + 1)])
        verify_s = float(self._target.at(loads[0]))
        row_s = self._target.slope() * np.diff(loads)
        works = np.arange(num_draft_tokens + 1.0) * self._draft_token
        draft_s = self._draft.at(works)
        draft_lost = np.zeros(len(works))
        if self.drafting_delays:
            # Each of the 1 + others sessions waits while the draft works for this session. The wait
            # of this session, draft_s, is counted already.
            work_s = (1.0 + others) * self._draft_work.at(works)
            draft_lost = pace * np.maximum(0.0, work_s - draft_s)
        wait_s = self._wait.value * min(1.0, others) * verify_s
        known = self.plain.weight
        plain_s = known * float(self.plain.at(loads[0])) if known else 0.0
        return Forecast(
            plain_s=(plain_s + PLAIN_PRIOR_ROUNDS * verify_s) / (known + PLAIN_PRIOR_ROUNDS),
            round_s=float(draft_s[0]) + wait_s + verify_s + self._rest.value,
            round_lost=float(draft_lost[0]) + self._held() * pace * self._rest.value,
            token_s=np.diff(draft_s) + row_s,
            token_lost=np.diff(draft_lost) + others * pace * row_s,
            draft_s=draft_s[1:],
        )

    @property
    def are_known(self) -> bool:
        return self._round.value > 0

    def reading_lost(self, plain_s: float, num_missed: int) -> float:
        """Returns how many tokens all sessions lose while the draft reads `num_missed` tokens."""
        if self._draft_table is None or num_missed == 0:
            return 0.0
        reading_s = self._draft_table.step_seconds(num_missed)
        others_s = self._others() * reading_s * self.drafting_delays
        return reading_s / max(plain_s, SECONDS_MIN) + others_s * self._pace()

    def _bounded(self, seconds: float) -> float:
        mean = self._round.value
        return min(seconds, OUTLIER * mean) if mean > 0 else seconds

    def _load(self, num_proposed: int, context: int, others: float) -> float:
        """Returns the time of a step with the rows of all sessions, by the target's table."""
        rows = 1 + num_proposed + others * self._rows.value
        sessions = max(1, round(1 + others))
        slots = round(context + others * self._context.value)
        return self._table.step_seconds(max(1, round(rows)), sessions, slots)

    def _others(self) -> float:
        """Mean number of other sessions in a step of the target."""
        if not self.are_known:
            return 0.0
        share = min(1.0, self._at_target.value / self._round.value)
        load = self.load
        others = max(0.0, (load.num_sessions + load.num_elsewhere) / load.num_targets - 1)
        return min(self._max_others, others * share)

    def _held(self) -> float:
        """Mean number of other sessions whose rounds wait for the messages of a session that
        drafts. Rounds that run ahead need no messages, but the target holds a step for sessions
        whose messages are under way (`BatchingDelay`). All of these share the loss."""
        others = self._others()
        num_plain = others * self._plain.value
        return num_plain / (1.0 + others - num_plain)

    def _pace(self) -> float:
        return self._tokens.value / self._round.value if self.are_known else 0.0
