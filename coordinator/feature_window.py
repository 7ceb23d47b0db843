"""What the target's head read at a session's newest committed tokens, for a draft that goes on from
that."""

from __future__ import annotations

from outrider.features import Features
from outrider.limits import FEATURES_MAX


class FeatureWindow:
    """Of one session: `FEATURES_MAX` tokens at most, and which of them the draft was told of. The
    store has none of it: after a take-over, as after a gap, it begins with what comes."""

    def __init__(self) -> None:
        self._kept: Features | None = None
        self._told = 0
        """The place before which the draft was told of all."""

    def put(self, features: Features) -> None:
        """A verdict has come with these."""
        kept = features if self._kept is None else self._kept.joined(features)
        self._kept = kept.since(kept.end - FEATURES_MAX)

    @property
    def news(self) -> Features | None:
        """What the draft was not told yet."""
        return None if self._kept is None else self._kept.since(self._told)

    def told(self) -> None:
        """The draft is told of all that is kept."""
        if self._kept is not None:
            self._told = self._kept.end

    def forgotten(self) -> None:
        """The draft may know nothing any more."""
        self._told = 0
