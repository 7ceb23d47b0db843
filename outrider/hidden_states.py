"""What a drafting head makes of a target's layers at some of a session's tokens, as it travels: no
numeric library."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.limits import FEATURES_BYTES_MAX, FEATURES_MAX

BYTES_OF_A_NUMBER = 2
"""bfloat16, the lower byte first."""


def rows_max(width: int) -> int:
    """Rows of so many numbers that a message has at most."""
    return min(FEATURES_MAX, FEATURES_BYTES_MAX // (width * BYTES_OF_A_NUMBER))


@dataclass(frozen=True, slots=True)
class Features:
    """Of tokens in a row."""

    first: int
    """The place in the session of the first one."""
    width: int
    """D, numbers of a row."""
    rows: bytes
    """A row for each token."""

    def __len__(self) -> int:
        return len(self.rows) // (self.width * BYTES_OF_A_NUMBER)

    @property
    def end(self) -> int:
        return self.first + len(self)
