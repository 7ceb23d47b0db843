"""Bounds of values, as metadata of types."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from annotated_types import Interval, MaxLen
from pydantic import TypeAdapter, ValidationError

from outrider.errors import BadRequest
from outrider.foundation.bounds import check_bounds


@dataclass(frozen=True)
class Values:
    share: Annotated[float, Interval(gt=0.0, le=1.0)] = 1.0
    number: Annotated[int, Interval(ge=-1)] | None = None
    large: Annotated[int, Interval(ge=0, le=2**64 - 1)] = 0
    entries: Annotated[tuple[Annotated[int, Interval(ge=5, le=6)], ...], MaxLen(2)] = ()
    free: float = 0.0


@pytest.mark.parametrize(
    ("name", "good", "bad", "allowed"),
    [
        ("share", (1e-9, 1), (0.0, 1.1, math.nan, math.inf), "above 0, at most 1"),
        ("number", (None, -1, 2**70), (-2,), "-1 or more"),
        ("large", (0, 2**64 - 1), (-1, 2**64), "0..18446744073709551615"),
        ("entries", ((), (5, 6)), ((5, 5, 5),), "up to 2"),
        ("free", (-math.inf,), (), ""),
    ],
)
def test_bounds_from_both_sides(
    name: str, good: tuple[Any, ...], bad: tuple[Any, ...], allowed: str
) -> None:
    """pydantic draws the same bounds. Only here is NaN beyond them."""
    pydantic = TypeAdapter(Values)
    for value in good:
        check_bounds(Values(**{name: value}))
        pydantic.validate_python({name: value})
    for value in bad:
        with pytest.raises(BadRequest, match=rf"^at\.{name}: got .*; allowed: {allowed}$"):
            check_bounds(Values(**{name: value}), "at.")
        if value == value:
            with pytest.raises(ValidationError):
                pydantic.validate_python({name: value})
