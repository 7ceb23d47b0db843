"""Measures a coordinator: its recent rounds, the delay of its event loop, and its CPU time."""

import asyncio
import time
from collections import Counter

from coordinator.routing.drafts import Drafted
from outrider.errors import Overloaded
from outrider.foundation.decayed_average import DecayedSums
from outrider.limits import LOOP_LAG_CHECKS, LOOP_LAG_MS_MAX
from outrider.registry.registry import WINDOW_S, Figures

_CHECK_PERIOD_S = 0.25
_LAG_S_MAX = 1.0
"""Longer delays count as this delay. Otherwise one long pause would dominate the mean."""
_WAITED = 1.0
"""A proposal counts as `waited` if its `queue_ms` > `_WAITED` * its `compute_ms`. A shorter
wait may be just the rest of a step that was already running."""


class LoadMeter:
    """Measures the rounds of all sessions, this process, and the event loop that runs `watch`."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._sums = DecayedSums(WINDOW_S, self._clock())
        self._news: Counter[str] = Counter()
        """Amounts of the rounds that are not in `_sums` yet."""
        self._num_late = 0
        """Number of consecutive delays above `LOOP_LAG_MS_MAX` up to now."""
        self.lag_ms = 0.0
        """Mean delay of the event loop. May be read on any thread, unlike `figures`."""

    def decided(self, drafted: Drafted, num_accepted: int, num_tokens: int) -> None:
        """Counts a round that added `num_tokens` tokens, including `num_accepted` draft tokens."""
        news, source = self._news, drafted.source
        news["tokens"] += num_tokens
        if source != "fallback":
            news["drafted"] += len(drafted.proposal)
            news["accepted"] += num_accepted
        if source == "replica":
            waited = drafted.queue_ms > _WAITED * drafted.compute_ms and not drafted.ahead
            news["proposals"] += 1
            news["waited"] += waited
            news["ahead"] += drafted.ahead

    async def watch(self) -> None:
        """Measures the event loop and the process, until this call is cancelled."""
        while True:
            due, cpu_s = self._clock() + _CHECK_PERIOD_S, time.process_time()
            await asyncio.sleep(_CHECK_PERIOD_S)
            now = self._clock()
            lag_s, cpu_s = now - due, time.process_time() - cpu_s
            self._add_news(now)
            self._sums.add(now, {"looks": 1, "lag_s": min(lag_s, _LAG_S_MAX), "cpu_s": cpu_s})
            self.lag_ms = 1e3 * (self._sums.mean(now, "lag_s", "looks") or 0.0)
            self._num_late = self._num_late + 1 if 1e3 * lag_s > LOOP_LAG_MS_MAX else 0

    @property
    def figures(self) -> Figures:
        sums, now = self._sums, self._clock()
        self._add_news(now)
        return Figures(
            draft_waits=sums.mean(now, "waited", "proposals"),
            acceptance=sums.mean(now, "accepted", "drafted"),
            look_ahead_hits=sums.mean(now, "ahead", "proposals"),
            tokens_per_second=sums.rate(now, "tokens"),
            busy=sums.rate(now, "cpu_s"),
            loop_lag_ms=self.lag_ms,
        )

    def _add_news(self, now: float) -> None:
        self._sums.add(now, self._news)
        self._news.clear()

    def check(self) -> None:
        """Raises `Overloaded` if the last `LOOP_LAG_CHECKS` delays are above `LOOP_LAG_MS_MAX`."""
        if self._num_late >= LOOP_LAG_CHECKS:
            raise Overloaded(
                f"this coordinator is overloaded: its event loop is {self.lag_ms:.0f} ms late; try "
                "again later",
                limit="loop_lag",
                of_server=True,
            )
