"""Token masks, and the interface of objects that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TokenMask:
    """The tokens allowed at one position."""

    bits: npt.NDArray[np.uint8]
    """[W]: one bit for each token, lowest bit first. Tokens after the last bit are forbidden."""
    is_over: bool = False
    """Whether the completion has ended and only end tokens may follow."""

    def has(self, token_id: int) -> bool:
        """Whether the token is allowed."""
        byte, bit = divmod(token_id, 8)
        return byte < len(self.bits) and bool(self.bits[byte] >> bit & 1)

    def flags(self, vocab_size: int) -> Flags:
        """[V]: whether each token is allowed."""
        count = min(vocab_size, 8 * len(self.bits))
        flags = np.unpackbits(self.bits, count=count, bitorder="little")
        return np.pad(flags, (0, vocab_size - len(flags))).astype(np.bool_)


class AllowedTokens(Protocol):
    """Tells which tokens may follow the committed tokens of one session, by the session's grammar
    or `min_tokens`. The object is valid until the session's tokens change."""

    def mask_after(self, drafted: Sequence[int]) -> TokenMask | None:
        """The tokens that may follow the committed tokens and `drafted`. None if `drafted` is not
        allowed. Raises `Incompatible` if no mask can be computed."""
        ...

    def advanced(self, committed: Sequence[int]) -> AllowedTokens:
        """Returns the `AllowedTokens` that is valid after these tokens are committed."""
        ...
