"""What the target's head read at a session's newest committed tokens, for a draft that goes on from
that."""

from __future__ import annotations

import logging

from outrider.hidden_states import Features
from outrider.limits import FEATURES_MAX

_log = logging.getLogger(__name__)


class FeatureWindow:
    """Of one session: `FEATURES_MAX` tokens at most, and which of them the draft has answered to.
    The store has none of it: after a take-over, as after a gap, it begins with what comes."""

    def __init__(self) -> None:
        self._kept: Features | None = None
        self._told = 0
        """The place before which the draft was told of all."""

    def put(self, features: Features, committed_length: int) -> None:
        """A verdict on a round that began with so many tokens has come with these; they begin with
        the last of them, or are of no use."""
        if features.first != committed_length - 1:
            _log.warning("features from %d on, behind %d tokens", features.first, committed_length)
            return
        kept = features if self._kept is None else self._kept.joined(features)
        self._kept = kept.since(kept.end - FEATURES_MAX)

    @property
    def news(self) -> Features | None:
        """What the draft was not told yet."""
        return None if self._kept is None else self._kept.since(self._told)

    def told(self) -> None:
        """The draft has answered a question with all that is kept."""
        if self._kept is not None:
            self._told = self._kept.end

    def forgotten(self) -> None:
        """The draft may know nothing any more."""
        self._told = 0
