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
from itertools import pairwise
from typing import Final

from outrider.engine.step_costs import StepCosts

from .policy import PlayedRound

MEMORY_ROUNDS: Final = 64.0
"""A time weighs 1 / e after so many others of its kind."""
LOAD_MEMORY_ROUNDS: Final = 256.0
OUTLIER: Final = 8.0
"""A time counts as at most so many mean rounds: one stall says little of the next."""
NOISE: Final = 0.15
"""Standard deviation of a time, as a share of it."""
TABLE_SPREAD: Final = 0.5
"""How far from 1 what a token adds to a draft's time may stand to the table's, as a standard
deviation ..."""
STEP_SPREAD: Final = 0.2
"""... and what a row adds to a target's, to the mean measured time over the table's: how many rows
others had in its step is known on average alone, which makes the measured line too flat."""
ROW_SHARE: Final = 0.3
"""Of its even share in a target's step that a token is taken to cost where no table says it ..."""
TOKEN_SHARE: Final = 1.0
"""... and of that in a draft's ..."""
SHARE_SPREAD: Final = 1.0
"""... and how far off these may be, as a standard deviation."""
MESSAGES_WORK: Final = 4.0
"""Time that others lose to the messages of a round, over what the round itself waits for them: both
ends work for it, and a step waits for whichever of its threads has lost its core. On two cores, 3
to 4 was measured at 8 sessions."""
NEW_LOAD: Final = 2.0
"""A load is another one where so many times as many sessions share a step."""
PLAIN_PRIOR_ROUNDS: Final = 1.0
"""Rounds of plain decoding that weigh as much as the guess from the rounds with a draft."""
SECONDS_MIN: Final = 1e-9
"""Nothing is expected to take less."""
FORGOTTEN: Final = 1.0 - 1.0 / 512.0
"""What plain decoding weighs after a round with a draft, in which it was not seen; and the other
way."""


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
        keep = 1.0 - 1.0 / MEMORY_ROUNDS
        self.weight = self.weight * keep + 1.0
        dx = x - self._x
        self._x += dx / self.weight
        self._y += (seconds - self._y) / self.weight
        self._xx = self._xx * keep + dx * (x - self._x)
        self._xy = self._xy * keep + dx * (seconds - self._y)

    def fade(self, keep: float) -> None:
        self.weight *= keep
        self._xx *= keep
        self._xy *= keep

    def at(self, x: float) -> float:
        return self._y + self.slope() * (x - self._x)

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
    """What the next round of a session costs, by how many tokens are proposed."""

    plain_s: float
    """A round of plain decoding."""
    round_s: float
    """A round for which tokens were asked and none was proposed."""
    token_s: tuple[float, ...]
    """What the first proposed token adds, the second, ..."""
    row_s: tuple[float, ...]
    """What each further row of a verification adds: of this the target's part; it goes on for
    siblings, which cost the draft nothing."""
    lost: tuple[float, ...]
    """Tokens that other sessions do not get for each row, as it makes their steps longer."""
    draft_lost: tuple[float, ...]
    """Tokens that they do not get while the draft works and messages are on their way: of a round
    for which tokens were asked, and what the first proposed token adds to that, the second, ..."""
    draft_s: tuple[float, ...]
    """The wait for a proposal of one token, two, ..."""


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
        drafting_delays: bool = False,
        messages_delay: bool = False,
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
        self._messages_delay = messages_delay
        self._target, self._plain = self._target_line(), self._target_line()
        self.meet_draft(draft)
        self._wait, self._rest, self._first_plain = _Mean(), _Mean(), _Mean()
        """The wait for a step to begin is in steps, where others are at the target: one at most."""
        self._drafted_among = _Mean()
        """Sessions that were at the target beside one that drafts."""
        self._round, self._at_target = _Mean(LOAD_MEMORY_ROUNDS), _Mean(LOAD_MEMORY_ROUNDS)
        self._rows, self._tokens = _Mean(LOAD_MEMORY_ROUNDS), _Mean(LOAD_MEMORY_ROUNDS)
        self._context = _Mean(LOAD_MEMORY_ROUNDS)

    def meet_draft(self, costs: StepCosts | None) -> None:
        """A draft with this table is there, of which nothing was measured yet."""
        self._draft_table = costs
        self._draft_token = 1.0 if costs is None else costs.step_seconds(1)
        """A token's share of the draft's work: s by its table, or without one just that."""
        self._draft, self._draft_work = self._draft_line(), self._draft_line()

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
        self._plain.note(self._load(0, context), self._bounded(round_s))
        self._draft.fade(FORGOTTEN)
        self._target.fade(FORGOTTEN)

    def note_first_plain(self, round_s: float) -> None:
        """The first round of plain decoding behind others: it waits for a step of the target that
        has others in it, and for messages."""
        self._first_plain.note(self._bounded(round_s))

    def note_drafted(self, played: PlayedRound, round_s: float, is_typical: bool = True) -> float:
        """A round for which tokens were asked, whose proposal was waited for as rounds do, if it
        `is_typical`. Returns the tokens that other sessions did not get because of it."""
        self.num_drafted += 1
        num_rows = len(played.survival) + played.num_siblings
        num_drafted, work_s = len(played.survival), played.work_s
        draft_s = played.draft_s if is_typical else None
        if played.beside is not None:
            num_drafted, draft_s = played.beside.num_tokens, played.beside.seconds
            work_s = played.beside.work_s
        if draft_s is not None:
            self._draft.note(num_drafted * self._draft_token, self._bounded(draft_s))
            self._draft_work.note(num_drafted * self._draft_token, self._bounded(work_s))
            rest_s = round_s - played.draft_s - played.target_s
            self._rest.note(self._bounded(max(0.0, rest_s)))
        others, step_s = self._others(), played.target_s - played.queue_s
        self._drafted_among.note(others)
        if others > 0 and step_s > 0:
            self._wait.note(min(1.0, played.queue_s / step_s / min(1.0, others)))
        self._target.note(self._load(num_rows, played.context), self._bounded(step_s))
        self._plain.fade(FORGOTTEN)
        rows_s = self._load(num_rows, played.context) - self._load(0, played.context)
        rows_lost = self._others() * self._pace() * self._target.slope() * rows_s
        return (
            rows_lost + self._lost_to_messages() + self._lost_while_drafting(draft_s or 0.0, work_s)
        )

    def note_late(self, num_asked: int, waited_s: float) -> None:
        """A proposal of so many tokens was waited for in vain: it takes so long at least."""
        self._draft.note(num_asked * self._draft_token, self._bounded(waited_s))

    def forecast(self, num_draft_tokens: int, context: int, num_siblings: int = 0) -> Forecast:
        """The costs of up to so many draft tokens, and siblings beside them, of a session with so
        many tokens."""
        loads = [self._load(num, context) for num in range(num_draft_tokens + num_siblings + 1)]
        others, verify_s = self._others(), self._target.at(loads[0])
        wait_s = self._wait.value * min(1.0, others) * verify_s
        per_load, pace = self._target.slope(), others * self._pace()
        rows_s = [per_load * (after - before) for before, after in pairwise(loads)]
        token_s = self._draft.slope() * self._draft_token
        works = [num * self._draft_token for num in range(num_draft_tokens + 1)]
        draft_s = [self._draft.at(work) for work in works]
        lost = [
            self._lost_while_drafting(wait, self._draft_work.at(work))
            for wait, work in zip(draft_s, works, strict=True)
        ]
        known = self._plain.weight
        plain_s = known * self._plain.at(loads[0]) if known else 0.0
        return Forecast(
            plain_s=(plain_s + PLAIN_PRIOR_ROUNDS * verify_s) / (known + PLAIN_PRIOR_ROUNDS),
            round_s=draft_s[0] + wait_s + verify_s + self._rest.value,
            token_s=tuple(token_s + seconds for seconds in rows_s[:num_draft_tokens]),
            row_s=tuple(rows_s),
            lost=tuple(pace * seconds for seconds in rows_s),
            draft_lost=(
                lost[0] + self._lost_to_messages(),
                *(after - before for before, after in pairwise(lost)),
            ),
            draft_s=tuple(draft_s[1:]),
        )

    @property
    def are_known(self) -> bool:
        return self._round.value > 0

    @property
    def plain_rounds_known(self) -> float:
        return self._plain.weight

    @property
    def load_is_new(self) -> bool:
        """Whether far more sessions are at the target than were when any drafted: they may wait
        for each other in ways that no table tells."""
        return self._others() > NEW_LOAD * (1.0 + self._drafted_among.value)

    def detour_lost(self, plain_s: float, num_missed: int) -> float:
        """Tokens that are lost when a session that decodes plainly tries a draft and comes back,
        beside its rounds: the draft reads so many tokens that it missed, by its table, and the
        first plain round takes longer than the others."""
        reading_s = 0.0
        if self._draft_table is not None and num_missed > 0:
            reading_s = self._draft_table.step_seconds(num_missed)
        own_s = reading_s + max(0.0, self._first_plain.value - plain_s)
        others_s = self._others() * reading_s if self.drafting_delays else 0.0
        return own_s / max(plain_s, SECONDS_MIN) + others_s * self._pace()

    def _lost_to_messages(self) -> float:
        """Tokens that others lose while a verdict and the next item of a session are on their way:
        cores that the target shares work for that one then. Where the target runs ahead they pay
        that once for several rounds."""
        if not self._messages_delay:
            return 0.0
        return self._others() * self._pace() * MESSAGES_WORK * self._rest.value

    def _lost_while_drafting(self, draft_s: float, work_s: float) -> float:
        """Tokens that all at the target lose while the draft works for a session, but for what
        waiting costs that session itself. Where all draft in one step, whose work is the wait of
        each, that is nothing."""
        if not self.drafting_delays:
            return 0.0
        return self._pace() * max(0.0, (1.0 + self._others()) * work_s - draft_s)

    def _draft_line(self) -> CostLine:
        if self._draft_table is None:
            return CostLine(TOKEN_SHARE, SHARE_SPREAD, relative=True, unit=0.0)
        return CostLine(1.0, TABLE_SPREAD)

    def _target_line(self) -> CostLine:
        if self._table is None:
            return CostLine(ROW_SHARE, SHARE_SPREAD, relative=True, unit=0.0)
        return CostLine(1.0, STEP_SPREAD, relative=True)

    def _bounded(self, seconds: float) -> float:
        mean = self._round.value
        return min(seconds, OUTLIER * mean) if mean > 0 else seconds

    def _load(self, num_proposed: int, context: int) -> float:
        """The target's share of a round, s by its table, with all that others have in the step;
        without a table, all rows."""
        others = self._others()
        rows = 1 + num_proposed + others * self._rows.value
        if self._table is None:
            return rows
        sessions = max(1, round(1 + others))
        slots = round(context + others * self._context.value)
        return self._table.step_seconds(max(1, round(rows)), sessions, slots)

    def _others(self) -> float:
        if self._round.value <= 0:
            return 0.0
        share = min(1.0, self._at_target.value / self._round.value)
        load = self.load
        others = max(0.0, (load.num_sessions + load.num_elsewhere) / load.num_targets - 1)
        return min(self._max_others, others * share)

    def _pace(self) -> float:
        return self._tokens.value / self._round.value if self._round.value > 0 else 0.0
