"""How every benchmark reports: figures as one JSON object on one line, and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

JSON_DIGITS: Final = 4
"""Decimals of a number in a JSON report."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one benchmark."""

    values: Mapping[str, Any]
    """The figures by their names in JSON; None = not measured."""
    shown: Sequence[RenderableType]
    """For people: tables and lines."""
    warnings: Sequence[str] = ()
    """What forbids to take the figures as they stand, a line each."""

    @classmethod
    def of(cls, title: str, values: Mapping[str, Any]) -> Report:
        """With one table of all figures that were measured."""
        return cls(values, [table(title, ("figure", "value"), _rows(values))])


def _rows(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        shown = prefix + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _rows(value, f"{shown}: ")
        elif value is not None:
            parts = value if isinstance(value, list | tuple) else [value]
            yield shown, " ".join(map(_shown, parts))


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)


def to_json(value: Mapping[str, object]) -> str:
    """One JSON object on one line. Raises `ValueError` for NaN and infinity."""
    text = json.dumps(value, allow_nan=False)
    return json.dumps(json.loads(text, parse_float=lambda one: round(float(one), JSON_DIGITS)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` per cent of `values` do not exceed, interpolated."""
    import numpy as np

    return float(np.percentile(np.asarray(values, dtype=np.float64), share))


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The first column is of names, the others of figures."""
    from rich.table import Table

    found = Table(title=title)
    for place, heading in enumerate(headings):
        found.add_column(heading, justify="right" if place else "left", no_wrap=not place)
    for row in rows:
        found.add_row(*row)
    return found


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each, and a column for each of their names in JSON."""
    headings = [name.replace("_", " ") for name in rows[0]]
    return table(title, headings, [[*map(_shown, row.values())] for row in rows])
