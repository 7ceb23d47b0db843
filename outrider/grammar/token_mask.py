"""Which tokens may follow what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TokenMask:
    """The tokens that may stand at one place."""

    bits: Bits
    """[W]: eight tokens a byte, the lowest bit first; a token beyond them may not."""
    is_over: bool = False
    """Whether the completion has ended, and nothing but its end is said again."""

    def has(self, token_id: int) -> bool:
        """Whether a token may."""
        byte, bit = divmod(token_id, 8)
        return byte < len(self.bits) and bool(self.bits[byte] >> bit & 1)

    def flags(self, vocab_size: int) -> Flags:
        """[V]: whether each token may."""
        count = min(vocab_size, 8 * len(self.bits))
        flags = np.unpackbits(self.bits, count=count, bitorder="little")
        return np.pad(flags, (0, vocab_size - len(flags))).astype(np.bool_)


class Allowed(Protocol):
    """What may follow the committed tokens of one session, by its grammar. Good until the session's
    tokens change; the answers are a function of tokens and constraint alone."""

    def after(self, drafted: Sequence[int]) -> TokenMask | None:
        """What may follow them and `drafted`; None where these must not stand there themselves, so
        that nothing behind them counts. Raises `Incompatible` where nothing may, or the grammar is
        found to be too hard."""
        ...

    def num_legal(self, drafted: Sequence[int]) -> int:
        """How many of `drafted`, from the first on, their masks let stand there."""
        ...

    def behind(self, committed: Sequence[int]) -> Allowed:
        """The same for when these tokens are committed, too."""
        ...
