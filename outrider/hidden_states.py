"""What a target's head read at some of a session's tokens, as it travels: no numeric library."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_OF_A_NUMBER = 2
"""bfloat16, the lower byte first."""


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

    def since(self, place: int) -> Features | None:
        """Those from a place on; None where there are none."""
        skipped = max(0, place - self.first)
        if skipped >= len(self):
            return None
        rows = self.rows[skipped * self.width * BYTES_OF_A_NUMBER :]
        return Features(self.first + skipped, self.width, rows)

    def joined(self, later: Features) -> Features:
        """With those that follow; `later` alone where these do not reach so far."""
        if later.width != self.width or not self.first <= later.first <= self.end:
            return later
        kept = self.rows[: (later.first - self.first) * self.width * BYTES_OF_A_NUMBER]
        return Features(self.first, self.width, kept + later.rows)
