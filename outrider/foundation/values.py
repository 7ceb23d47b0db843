"""A faster dataclass decorator, for values that every round creates."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["completed", "replaced", "value"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool, eq: bool = True) -> Any:
        """Like `dataclass`, but only the type checker enforces `frozen`. If Python enforced
        `frozen`, `__init__` of 16 fields would take 1.7 us instead of 0.3 us."""
        return dataclass(slots=slots, eq=eq, unsafe_hash=frozen and eq)


def replaced(given: T, **changes: object) -> T:
    """Like `dataclasses.replace`, for classes that are made by `value` and have no `__post_init__`.
    With 17 fields, it takes 1 us instead of 2.4 us."""
    kind: Any = type(given)
    made: T = kind(*_reader(kind)(given))
    for name, new in changes.items():
        setattr(made, name, new)
    return made


def completed(made: T, **changes: object) -> T:
    """Sets fields of a value on which nothing depends so far. Returns the value."""
    for name, new in changes.items():
        setattr(made, name, new)
    return made


@cache
def _reader(kind: Any) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*(one.name for one in fields(kind)))
