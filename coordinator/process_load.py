"""How busy a coordinator's process is: how late its event loop is, and its share of a core."""

from __future__ import annotations

import asyncio
import math
import time

from outrider.decayed_average import DecayedSums
from outrider.errors import Overloaded
from outrider.limits import LOOP_LAG_MS_MAX, LOOP_LAG_PATIENCE_S
from outrider.registry.registry import WINDOW_S

_LOOK_PERIOD_S = 0.25
_LAG_S_MAX = 1.0
"""What one look counts as at most: a machine that stood still for once is not overloaded."""


class ProcessLoad:
    """Looks at it now and then, while `watch` runs on the event loop that is meant."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._sums = DecayedSums(WINDOW_S, self._clock())
        self._late_since = math.inf
        """Since when it has been later than `LOOP_LAG_MS_MAX`."""

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            due, cpu_s = self._clock() + _LOOK_PERIOD_S, time.process_time()
            await asyncio.sleep(_LOOK_PERIOD_S)
            now = self._clock()
            lag_s, cpu_s = now - due, time.process_time() - cpu_s
            self._sums.add(now, {"looks": 1, "lag_s": min(lag_s, _LAG_S_MAX), "cpu_s": cpu_s})
            is_late = self.lag_ms > LOOP_LAG_MS_MAX
            self._late_since = min(self._late_since, now) if is_late else math.inf

    @property
    def lag_ms(self) -> float:
        """How late what is due on the event loop begins, mean."""
        return 1e3 * (self._sums.mean(self._clock(), "lag_s", "looks") or 0.0)

    @property
    def busy(self) -> float:
        """Cores that the process computes on, mean."""
        return self._sums.rate(self._clock(), "cpu_s")

    def check(self) -> None:
        """Raises `Overloaded` where the event loop has been late for long."""
        if self._clock() - self._late_since >= LOOP_LAG_PATIENCE_S:
            raise Overloaded(
                f"what this coordinator has to do waits for {self.lag_ms:.0f} ms; try again later"
            )
