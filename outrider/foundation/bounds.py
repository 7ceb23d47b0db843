"""Bounds of values, as metadata of `Annotated` types. pydantic reads the same metadata, so a limit
is stated once for bodies in JSON, which pydantic checks, and for dataclasses of other origin."""

from collections.abc import Sequence
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval, MaxLen

from outrider.errors import BadRequest

Bounds = Interval | MaxLen
"""The least and largest number, or the largest number of entries."""


def check_bounds(values: object, path: str = "") -> None:
    """Raises `BadRequest` for the first field of a dataclass that is beyond the bounds of its type.
    The error's field is the field's name after `path`. None is within all bounds."""
    for name, bounds in _bounds_of(type(values)):  # type: ignore[arg-type]
        value = getattr(values, name)
        if value is not None and (reason := beyond(value, bounds)):
            raise BadRequest(path + name, reason)


def beyond(value: Any, bounds: Bounds) -> str:
    """Says why a value is beyond bounds; empty = it is within them. NaN is beyond all bounds."""
    if isinstance(bounds, MaxLen):
        most, size = bounds.max_length, len(value)
        return f"got {size} entries; allowed: up to {most}" if size > most else ""
    low: Any = bounds.gt if bounds.ge is None else bounds.ge
    high: Any = bounds.le
    is_above = value >= low if bounds.gt is None else value > low
    if is_above and (high is None or value <= high):
        return ""
    if high is None:
        return f"got {value}; allowed: {low} or more"
    if bounds.gt is None:
        return f"got {value}; allowed: {_shown(low)}..{_shown(high)}"
    return f"got {value}; allowed: above {_shown(low)}, at most {_shown(high)}"


def _shown(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


@cache
def _bounds_of(kind: type) -> Sequence[tuple[str, Bounds]]:
    bounds = list[tuple[str, Bounds]]()
    for name, hint in get_type_hints(kind, include_extras=True).items():
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for member in members:
            metadata = getattr(member, "__metadata__", ())
            bounds += [(name, entry) for entry in metadata if isinstance(entry, Bounds)]
    return bounds
