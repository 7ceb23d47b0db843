"""What rounds cost: tables of the engines, put right by the times of rounds that were played.
Pure: told of times, and of nothing else.

| part of a round | known from |
| --- | --- |
| wait for a proposal | the draft's table, then measured: not every drafter takes a step a token |
| the target's step | its table, for what all sessions have in a step, then measured |
| wait for that step | measured, as a share of a step, while others are at the target |
| all else: messages, and the coordinator's work | measured: a round's time less those three |
| what others at the target lose to the draft and to messages, where they share cores | measured |
| a round of plain decoding | measured as a whole, once there are any; else the target's part |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.step_costs import StepCosts

from .policy import PlayedRound

MEMORY_ROUNDS = 64.0
"""A time weighs 1 / e after so many others of its kind."""
LOAD_MEMORY_ROUNDS = 256.0
OUTLIER = 8.0
"""A time counts as at most so many mean rounds: one stall says little of the next."""
NOISE = 0.15
"""Standard deviation of a time, as a share of it."""
TABLE_SPREAD = 0.5
"""How far from 1 what a token adds to a draft's time may stand to the table's, as a standard
deviation ..."""
STEP_SPREAD = 0.2
"""... and what a row adds to a target's, to the mean measured time over the table's: how many rows
others had in its step is known on average alone, which makes the measured line too flat."""
ROW_SHARE = 0.3
"""Of its even share in a target's step that a token is taken to cost where no table says it ..."""
TOKEN_SHARE = 1.0
"""... and of that in a draft's ..."""
SHARE_SPREAD = 1.0
"""... and how far off these may be, as a standard deviation."""
MESSAGES_WORK = 4.0
"""Time that others lose to the messages of a round, over what the round itself waits for them: both
ends work for it, and a step waits for whichever of its threads has lost its core. On two cores, 3
to 4 was measured at 8 sessions."""
PLAIN_PRIOR_ROUNDS = 1.0
"""Rounds of plain decoding that weigh as much as the guess from the rounds with a draft."""
SECONDS_MIN = 1e-9
"""Nothing is expected to take less."""
FORGOTTEN = 1.0 - 1.0 / 512.0
"""What plain decoding weighs after a round with a draft, in which it was not seen; and the other
way."""
Array = npt.NDArray[np.float64]


class CostLine:
    """Seconds over a quantity: an exponentially weighted line by least squares, whose slope is
    drawn towards a stated one until enough different quantities were seen. It never falls, and is
    nowhere negative."""

    def __init__(
        self, slope: float, spread: float, *, relative: bool = False, unit: float = 1.0
    ) -> None:
        """`spread` is the standard deviation of what the slope may turn out to be. Both are
        multiples of `unit`, or where they are `relative`, of the mean time over the mean quantity
        once there are any."""
        self.weight = 0.0
        """Of what was noted: at most `MEMORY_ROUNDS`."""
        self._slope, self._spread = slope, spread
        self._relative, self._unit = relative, unit
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
            return self._slope * self._unit
        if self._y <= 0.0 or self._x <= 0.0:
            return 0.0
        unit = self._y / self._x if self._relative else self._unit
        pull = (NOISE * self._y / (self._spread * unit)) ** 2
        slope = (self._xy + pull * self._slope * unit) / (self._xx + pull)
        return min(max(0.0, slope), self._y / self._x)


class _Mean:
    """An exponentially weighted mean."""

    def __init__(self, memory_rounds: float = MEMORY_ROUNDS) -> None:
        self._keep = 1.0 - 1.0 / memory_rounds
        self._weight = 0.0
        self.value = 0.0

    def note(self, value: float) -> None:
        self._weight = self._weight * self._keep + 1.0
        self.value += (value - self.value) / self._weight


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the next round of a session costs. Others lose tokens as it makes their steps longer, or
    the draft and messages keep the cores from them."""

    plain_s: float
    """A round of plain decoding."""
    round_s: float
    """A round for which tokens were asked and none was proposed ..."""
    round_lost: float
    """... and the tokens that other sessions lose to it."""
    token_s: Array
    """[K]: what the first proposed token adds, the second, ..., its row included."""
    token_lost: Array
    row_s: Array
    """[K + siblings]: what each further row of a verification adds; siblings cost the draft
    nothing."""
    row_lost: Array
    draft_s: Array
    """[K]: the wait for a proposal of one token, two, ..."""


class Load:
    """Sessions at the targets of one coordinator, as they are now."""

    def __init__(self, num_sessions: int = 0) -> None:
        self.num_sessions = num_sessions
        """Sessions that run here ..."""
        self.num_elsewhere = 0
        """... and at other coordinators of the same targets ..."""
        self.num_targets = 1
        """... which share them all."""


class RoundCosts:
    """The times of one coordinator's rounds with one target and one draft."""

    def __init__(
        self,
        target: StepCosts | None,
        draft: StepCosts | None,
        max_num_seqs: int,
        load: Load,
        *,
        drafting_delays: bool,
        messages_delay: bool,
    ) -> None:
        """The engines' tables, as far as they are known. At most `max_num_seqs` sessions share a
        step of the target. That waits while the draft works, if `drafting_delays`: because both
        share cores or a device, or because the target drafts. Messages delay it, if
        `messages_delay`: because the coordinator or the draft shares its cores."""
        self.load = load
        self.drafting_delays = drafting_delays
        self.num_drafted = 0
        """Rounds with a draft that were timed."""
        self._table = target
        self._max_others = max_num_seqs - 1.0
        self._messages_work = MESSAGES_WORK * messages_delay
        self._target, self.plain = (_line(target, ROW_SHARE, STEP_SPREAD, True) for _ in range(2))
        self.meet_draft(draft)
        self._wait, self._rest = _Mean(), _Mean()
        """The wait for a step to begin is in steps, where others are at the target: one at most."""
        self._round, self._at_target, self._rows, self._tokens, self._context = (
            _Mean(LOAD_MEMORY_ROUNDS) for _ in range(5)
        )

    def meet_draft(self, costs: StepCosts | None) -> None:
        """A draft with this table is there, of which nothing was measured yet."""
        self._draft_table = costs
        self._draft_token = 1.0 if costs is None else costs.step_seconds(1)
        """A token's share of the draft's work: s by its table, or without one just that."""
        self._draft, self._draft_work = (
            _line(costs, TOKEN_SHARE, TABLE_SPREAD, False) for _ in range(2)
        )

    def note_load(self, played: PlayedRound, round_s: float) -> None:
        """A round, `round_s` from the end of the one before. Of rounds whose verdicts come
        together, the first has the time of all."""
        self._round.note(self._bounded(round_s))
        self._at_target.note(self._bounded(played.target_s))
        self._rows.note(1 + len(played.survival) + played.num_siblings)
        self._context.note(played.context)
        self._tokens.note(played.num_tokens)

    def note_plain(self, round_s: float, context: int) -> None:
        """A round of plain decoding behind another one, of a session with so many tokens."""
        self.plain.note(self._load(0, context, self._others()), self._bounded(round_s))
        self._draft.fade(FORGOTTEN)
        self._target.fade(FORGOTTEN)

    def note_drafted(self, played: PlayedRound, round_s: float, is_typical: bool = True) -> None:
        """A round for which tokens were asked, whose proposal was waited for as rounds do, if it
        `is_typical`."""
        self.num_drafted += 1
        num_proposed = len(played.survival)
        num_drafted, draft_s, work_s = played.beside or (
            num_proposed, played.draft_s, played.work_s
        )  # fmt: skip
        if is_typical or played.beside is not None:
            self._draft.note(num_drafted * self._draft_token, self._bounded(draft_s))
            self._draft_work.note(num_drafted * self._draft_token, self._bounded(work_s))
            rest_s = round_s - played.draft_s - played.target_s
            self._rest.note(self._bounded(max(0.0, rest_s)))
        others, step_s = self._others(), played.target_s - played.queue_s
        if others > 0 and step_s > 0:
            self._wait.note(min(1.0, played.queue_s / step_s / min(1.0, others)))
        num_rows = num_proposed + played.num_siblings
        load = self._load(num_rows, played.context, others)
        self._target.note(load, self._bounded(step_s))
        self.plain.fade(FORGOTTEN)

    def note_late(self, num_asked: int, waited_s: float) -> None:
        """A proposal of so many tokens was waited for in vain: it takes so long at least."""
        self._draft.note(num_asked * self._draft_token, self._bounded(waited_s))

    def forecast(self, num_draft_tokens: int, context: int, num_siblings: int = 0) -> Forecast:
        """The costs of up to so many draft tokens, and siblings beside them, of a session with so
        many tokens."""
        num_rows = num_draft_tokens + num_siblings
        others, pace = self._others(), self._pace()
        loads = np.array([self._load(num, context, others) for num in range(num_rows + 1)])
        verify_s = float(self._target.at(loads[0]))
        row_s = self._target.slope() * np.diff(loads)
        row_lost = others * pace * row_s
        works = np.arange(num_draft_tokens + 1.0) * self._draft_token
        draft_s = self._draft.at(works)
        draft_lost = np.zeros(len(works))
        if self.drafting_delays:
            # All at the target wait for a session's work, but for what waiting costs it anyway.
            # Where all draft in one step, whose work is the wait of each, that is nothing.
            work_s = (1.0 + others) * self._draft_work.at(works)
            draft_lost = pace * np.maximum(0.0, work_s - draft_s)
        wait_s = self._wait.value * min(1.0, others) * verify_s
        known = self.plain.weight
        plain_s = known * float(self.plain.at(loads[0])) if known else 0.0
        return Forecast(
            plain_s=(plain_s + PLAIN_PRIOR_ROUNDS * verify_s) / (known + PLAIN_PRIOR_ROUNDS),
            round_s=float(draft_s[0]) + wait_s + verify_s + self._rest.value,
            # Where the target runs ahead, others pay for messages once for several rounds.
            round_lost=float(draft_lost[0])
            + others * pace * self._messages_work * self._rest.value,
            token_s=np.diff(draft_s) + row_s[:num_draft_tokens],
            token_lost=np.diff(draft_lost) + row_lost[:num_draft_tokens],
            row_s=row_s,
            row_lost=row_lost,
            draft_s=draft_s[1:],
        )

    @property
    def are_known(self) -> bool:
        return self._round.value > 0

    def reading_lost(self, plain_s: float, num_missed: int) -> float:
        """Tokens that are lost while the draft of a session that decodes plainly reads so many
        tokens that it missed, by its table."""
        if self._draft_table is None or num_missed == 0:
            return 0.0
        reading_s = self._draft_table.step_seconds(num_missed)
        others_s = self._others() * reading_s * self.drafting_delays
        return reading_s / max(plain_s, SECONDS_MIN) + others_s * self._pace()

    def _bounded(self, seconds: float) -> float:
        mean = self._round.value
        return min(seconds, OUTLIER * mean) if mean > 0 else seconds

    def _load(self, num_proposed: int, context: int, others: float) -> float:
        """The target's share of a round, s by its table, with all that others have in the step;
        without a table, all rows."""
        rows = 1 + num_proposed + others * self._rows.value
        if self._table is None:
            return rows
        sessions = max(1, round(1 + others))
        slots = round(context + others * self._context.value)
        return self._table.step_seconds(max(1, round(rows)), sessions, slots)

    def _others(self) -> float:
        """Sessions that share a step, mean."""
        if not self.are_known:
            return 0.0
        share = min(1.0, self._at_target.value / self._round.value)
        load = self.load
        others = max(0.0, (load.num_sessions + load.num_elsewhere) / load.num_targets - 1)
        return min(self._max_others, others * share)

    def _pace(self) -> float:
        """Tokens a second of a session."""
        return self._tokens.value / self._round.value if self.are_known else 0.0


def _line(table: StepCosts | None, share: float, spread: float, relative: bool) -> CostLine:
    if table is None:
        return CostLine(share, SHARE_SPREAD, relative=True, unit=0.0)
    return CostLine(1.0, spread, relative=relative)
