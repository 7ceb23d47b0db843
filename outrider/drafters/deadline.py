"""Until when the tokens of one proposal may be drawn."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final


class DraftDeadline:
    """The time that a round gives its draft, on the clock of the process that drafts.

    A drafter asks before each draw, of a token and its siblings together, whether to make it, and
    proposes everything that it has drawn. So the length of a proposal depends on the time and on
    the tokens that are proposed, and never on a token that was drawn and dropped: it is a stopping
    time, which docs/exactness.md needs. May be used by several threads."""

    __slots__ = ("_clock", "_has_drawn", "_is_told", "_lock", "ends_at", "has_cut")

    def __init__(
        self, ends_at: float = math.inf, clock: Callable[[], float] = lambda: -math.inf
    ) -> None:
        """`ends_at` is a time of `clock`, both in seconds; without them there is no bound."""
        self.ends_at = ends_at
        self.has_cut = False
        """Whether a draw was not allowed: no later one is."""
        self._clock = clock
        self._has_drawn = self._is_told = False
        self._lock = threading.Lock()

    @classmethod
    def after(
        cls, budget_us: int, clock: Callable[[], float], now: float | None = None
    ) -> DraftDeadline:
        """So many microseconds from `now` on, by default what the clock says; 0 = no bound."""
        if budget_us == 0:
            return NO_DEADLINE
        return cls((clock() if now is None else now) + budget_us / 1e6, clock)

    def allows_draw(self) -> bool:
        """Whether the next token may be drawn. True is a promise: the token is proposed."""
        if self.ends_at == math.inf:
            return True
        with self._lock:
            self.has_cut = self.has_cut or self._clock() >= self.ends_at
            self._has_drawn = self._has_drawn or not self.has_cut
            return not self.has_cut

    def num_draws(self, num_wanted: int, draw_s: float) -> int:
        """How many of so many tokens there is time for, the first of which is allowed, where each
        is expected to take `draw_s` seconds."""
        left = self.ends_at - self._clock()
        if draw_s <= 0.0 or num_wanted * draw_s <= left:
            return num_wanted
        return max(1, int(left / draw_s))

    @property
    def is_over(self) -> bool:
        """Whether the time has run out."""
        return self._clock() >= self.ends_at

    def close_undrawn(self) -> bool:
        """Allows no draw any more, if none was made: then True, once, for the caller that tells
        so."""
        with self._lock:
            if self._has_drawn or self._is_told:
                return False
            self.has_cut = self._is_told = True
            return True


NO_DEADLINE: Final = DraftDeadline()
"""Every draw may be made."""
