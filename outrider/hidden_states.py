"""Hidden states in messages: outputs of some of the target's layers, a row for each token. They are
the input of a drafting head. This module needs no numeric library."""

from dataclasses import dataclass

from outrider.limits import FEATURES_BYTES_MAX, FEATURES_MAX

BYTES_OF_A_NUMBER = 2
"""bfloat16, little-endian."""


def rows_max(width: int) -> int:
    """Most rows of this width in a message."""
    return min(FEATURES_MAX, FEATURES_BYTES_MAX // (width * BYTES_OF_A_NUMBER))


@dataclass(frozen=True, slots=True)
class Features:
    """Rows of consecutive tokens."""

    first: int
    """The first token's position in the session."""
    width: int
    """D, the length of a row."""
    rows: bytes
    """A row for each token."""

    def __len__(self) -> int:
        return len(self.rows) // (self.width * BYTES_OF_A_NUMBER)

    @property
    def end(self) -> int:
        return self.first + len(self)
