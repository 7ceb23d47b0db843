"""Features in messages from a target to an EAGLE-3 head on a draft replica. A *feature* is a row
with the fused hidden states of one token (`DraftHead.fuse`). Imports no numeric library."""

from dataclasses import dataclass

from outrider.limits import FEATURES_BYTES_MAX, FEATURES_MAX

BYTES_OF_A_NUMBER = 2  # each number is a bfloat16, little-endian


def rows_max(width: int) -> int:
    """Returns the largest number of rows in a message. A row has `width` numbers."""
    return min(FEATURES_MAX, FEATURES_BYTES_MAX // (width * BYTES_OF_A_NUMBER))


@dataclass(frozen=True, slots=True)
class Features:
    """The features of consecutive tokens of a session."""

    first: int  # the first token's position in the session
    width: int  # length of a row, in numbers
    rows: bytes

    def __len__(self) -> int:
        return len(self.rows) // (self.width * BYTES_OF_A_NUMBER)

    @property
    def end(self) -> int:
        return self.first + len(self)
