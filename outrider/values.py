"""Fast dataclasses, for values that are made in every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

__all__ = ["value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool) -> Any:
        """`dataclass`, but `frozen` is enforced only by the type checker: at run time it makes each
        assignment of a field a call, and creating an object of 16 fields takes 1.7 us instead of
        0.3."""
        return dataclass(slots=slots, unsafe_hash=frozen)
