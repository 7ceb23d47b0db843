"""Dataclasses of what is made in every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

__all__ = ["value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool) -> Any:
        """`dataclass`, whose `frozen` the type checker alone enforces: Python would set each field
        by a call that asks whether it may, and take 1.7 us in place of 0.3 for one of 16 fields."""
        return dataclass(slots=slots, unsafe_hash=frozen)
