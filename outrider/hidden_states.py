"""Hidden states in messages: outputs of some of the target's layers, one row for each token. A
drafting head reads these rows. This module imports no numeric library."""

from dataclasses import dataclass

from outrider.limits import FEATURES_BYTES_MAX, FEATURES_MAX

BYTES_OF_A_NUMBER = 2  # each number is a bfloat16, little-endian


def rows_max(width: int) -> int:
    """Returns the largest number of rows in a message. A row has `width` numbers."""
    return min(FEATURES_MAX, FEATURES_BYTES_MAX // (width * BYTES_OF_A_NUMBER))


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of consecutive tokens, one row for each token."""

    first: int  # the first token's position in the session
    width: int  # length of a row, in numbers
    rows: bytes

    def __len__(self) -> int:
        return len(self.rows) // (self.width * BYTES_OF_A_NUMBER)

    @property
    def end(self) -> int:
        return self.first + len(self)
