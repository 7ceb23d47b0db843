"""What a look-up would have proposed while a session decodes plainly, compared with what followed.

It costs the target nothing, so length control needs no rounds with a draft to find out how many
tokens would be accepted. A look-up proposes each token with certainty: it would be accepted as
often as the target writes it.
"""

from __future__ import annotations

from typing import Final

from coordinator.routing.drafts import SessionLookup
from outrider.speculation.random_streams import RoundNoise

from .policy import LengthPolicy

WATCH_ROUNDS_MIN: Final = 8
"""Rounds from one look-up to the next at least: each takes up to 0.1 ms of the coordinator ..."""
WATCH_ROUNDS_MAX: Final = 64
"""... and at most: the number doubles with each look-up of which no token followed."""


class LookupProbe:
    """The look-ups of one session that nothing is drafted from."""

    def __init__(self, lookup: SessionLookup, lengths: LengthPolicy, num_draft_tokens: int) -> None:
        """Looks up at most `num_draft_tokens` tokens at a time, and tells `lengths` of them."""
        self._lookup = lookup
        self._lengths = lengths
        self._num_draft_tokens = num_draft_tokens
        self._guess: tuple[int, ...] | None = None
        """None = nothing was looked up for the tokens to come."""
        self._num_followed = 0
        """Tokens of it that were committed since."""
        self._rounds_left = 0
        """Until the next look-up ..."""
        self._interval = WATCH_ROUNDS_MIN
        """... which comes so many rounds after the last one."""

    def committed(self, noise: RoundNoise, token_id: int) -> None:
        """A round without a draft brought one token, which the session does not have yet; `noise`
        is the round's."""
        self._rounds_left -= 1
        if self._guess is None:
            if self._rounds_left > 0:
                return
            self._guess = self._lookup.propose(self._num_draft_tokens, noise).token_ids
            self._num_followed, self._rounds_left = 0, self._interval
        num_drafted = len(self._guess)
        if self._num_followed < num_drafted and self._guess[self._num_followed] == token_id:
            self._num_followed += 1
            if self._num_followed < num_drafted:
                return
        survival = tuple(float(depth < self._num_followed) for depth in range(num_drafted))
        self._guess = None
        self._interval = min(2 * self._interval, WATCH_ROUNDS_MAX)
        if self._num_followed > 0:
            self._interval = WATCH_ROUNDS_MIN
        self._lengths.note_watched(self._num_draft_tokens, survival)

    def interrupted(self) -> None:
        """A round with a draft follows: what was looked up before it says nothing more."""
        self._guess = None
