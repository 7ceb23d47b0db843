"""A faster dataclass decorator, for values that every round creates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

__all__ = ["value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool) -> Any:
        """Like `dataclass`, but only the type checker enforces `frozen`. If Python enforced
        `frozen`, `__init__` of 16 fields would take 1.7 us instead of 0.3 us."""
        return dataclass(slots=slots, unsafe_hash=frozen)
