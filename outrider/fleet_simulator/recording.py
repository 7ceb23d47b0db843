"""What is noted while a simulation runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from outrider.fleet_simulator.figures import LossFigures, rate_between, weighted_percentile
from outrider.fleet_simulator.scenario import Loss
from outrider.fleet_simulator.stations import Session


class Recording:
    """Counts of the time that is measured, in sums: a round costs next to nothing."""

    def __init__(self, begins_at: float, seconds: float) -> None:
        """Measuring begins at that time of the agenda, s."""
        self._begins_at = begins_at
        self._seconds = seconds
        self.is_on = False
        self.num_tokens = 0
        self.num_rounds = 0
        self.num_asked = 0
        """Rounds that waited for a proposal, or would have ..."""
        self.num_queued = 0
        self.num_hits = 0
        self.draft_s = 0.0
        self.num_requests = 0
        self.num_refused = 0
        self.by_second = [0] * max(1, int(seconds))
        self._pace: defaultdict[float, float] = defaultdict(float)
        """Tokens by time per token, s."""
        self._first: defaultdict[float, float] = defaultdict(float)
        self.pauses: defaultdict[int, list[float]] = defaultdict(list)
        """By number of the loss, s."""

    def begin(self, sessions: Iterable[Session]) -> None:
        """Measuring begins; these sessions run."""
        self.is_on = True
        for session in sessions:
            if session.last_at >= 0:
                session.marked_at, session.marked_length = session.last_at, session.length

    def count(self, now: float, num_tokens: int, num_rounds: int) -> None:
        """A step of a target committed so many tokens."""
        if not self.is_on:
            return
        self.num_tokens += num_tokens
        self.num_rounds += num_rounds
        second = int(now - self._begins_at)
        if second < len(self.by_second):
            self.by_second[second] += num_tokens

    def asked(self, num: int, num_hits: int) -> None:
        """So many rounds are to have proposals, and so many of them have one already."""
        if self.is_on:
            self.num_asked += num
            self.num_hits += num_hits

    def queued(self, num: int) -> None:
        """So many questions found others at their draft."""
        if self.is_on:
            self.num_queued += num

    def waited(self, seconds: float) -> None:
        """Proposals were waited for so long together."""
        if self.is_on:
            self.draft_s += seconds

    def refused(self) -> None:
        """A request found no room."""
        self.num_refused += self.is_on

    def ended(self, session: Session) -> None:
        """A session has all its tokens."""
        self.num_requests += self.is_on
        self.leave(session)

    def first(self, session: Session, now: float) -> None:
        """A session has its first token."""
        session.marked_at, session.marked_length = now, session.length
        if self.is_on:
            self._first[now - session.began_at] += 1.0

    def resumed(self, session: Session, now: float) -> None:
        """A session has its first token after a loss."""
        if session.since_loss is not None and session.last_at >= 0:
            self.pauses[session.since_loss].append(now - session.last_at)
        session.since_loss = None

    def leave(self, session: Session) -> None:
        """A session ends, or measuring does."""
        tokens = session.length - session.marked_length
        if self.is_on and tokens > 0 and session.marked_at >= 0:
            self._pace[(session.last_at - session.marked_at) / tokens] += tokens

    def pace_ms(self, share: float) -> float | None:
        """Time per token that requests with so large a share of the tokens keep."""
        found = weighted_percentile(self._pace, share)
        return None if found is None else found * 1e3

    def first_ms(self, share: float) -> float | None:
        """Time to the first token that so large a share of the requests keep."""
        found = weighted_percentile(self._first, share)
        return None if found is None else found * 1e3

    def loss_figures(self, number: int, loss: Loss) -> LossFigures:
        """Of the loss of this number."""
        pauses = sorted(self.pauses[number]) or [0.0]
        end_s = min(loss.back_s, self._seconds)
        worst = self.by_second[int(loss.at_s) : max(int(loss.at_s) + 1, int(end_s))]
        return LossFigures(
            role=loss.role,
            at_s=loss.at_s,
            back_s=None if loss.back_s > self._seconds else loss.back_s,
            tokens_per_second_before=rate_between(self.by_second, 0.0, loss.at_s),
            tokens_per_second_after=rate_between(self.by_second, loss.at_s + pauses[-1], end_s),
            tokens_in_worst_second=min(worst, default=0),
            num_paused=len(self.pauses[number]),
            pause_ms_p50=pauses[len(pauses) // 2] * 1e3,
            pause_ms_max=pauses[-1] * 1e3,
        )
