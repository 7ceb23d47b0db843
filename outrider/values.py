"""Fast dataclasses, for values made in every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

__all__ = ["value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool) -> Any:
        """`dataclass`, but only the type checker enforces `frozen`: at run time it would make each
        assignment of a field a call, and an object of 16 fields would take 1.7 us instead of
        0.3."""
        return dataclass(slots=slots, unsafe_hash=frozen)
