"""Results of commands, shown as a JSON object or as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SIGNIFICANT = 6


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a command."""

    values: Mapping[str, Any]
    """The JSON object. A value of None means that the figure was not measured."""
    shown: Sequence[RenderableType]
    warnings: Sequence[str] = ()
    """Reasons not to trust the figures, one line each."""

    @classmethod
    def of(cls, title: str, values: Mapping[str, Any]) -> Report:
        """Shows all values that are not None in one table."""
        rows = [{"figure": name, "value": value} for name, value in _flat(values)]
        return cls(values, [table(title, rows)])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        shown = prefix + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{shown}: ")
        elif value is not None:
            yield shown, value


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_shown, value))
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)


def to_json(value: Mapping[str, object]) -> str:
    """JSON on one line, with rounded numbers. Raises `ValueError` for NaN and infinity."""
    text = json.dumps(value, allow_nan=False)
    return json.dumps(json.loads(text, parse_float=lambda x: float(f"{float(x):.{SIGNIFICANT}g}")))


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table with a column for each key of the rows. The first column names the rows."""
    from rich.table import Table

    found = Table(title=title)
    for place, name in enumerate(rows[0]):
        justify: Any = "right" if place else "left"
        found.add_column(name.replace("_", " "), justify=justify, no_wrap=not place)
    for row in rows:
        found.add_row(*map(_shown, row.values()))
    return found
