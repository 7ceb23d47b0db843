"""Results of commands, shown as a JSON object or as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

SIGNIFICANT = 6
_GAP = 2
"""Number of spaces between two columns of a table."""


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


@dataclass(frozen=True, slots=True)
class DataTable:
    """A table that never cuts a cell. If its columns need more than the width of the console, the
    table continues below with the other columns, and repeats the first column there. A cell that is
    wider than the console is folded."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_keys: int = 1
    """Number of leading columns that name a row. Each part of the table has these columns."""
    bold: int | None = None
    """Index of the row to highlight."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from rich.cells import cell_len
        from rich.text import Text

        def longest(texts: Iterable[str]) -> int:
            return max(map(cell_len, texts))

        yield Text(self.title, style="bold")
        cells = [*zip(*self.rows, strict=True)]
        # A column is as wide as its widest cell. The column's name may take several lines.
        widths = [
            longest((*name.split(), *values))
            for name, values in zip(self.columns, cells, strict=True)
        ]
        words = longest(word for text in (self.columns[0], *cells[0]) for word in text.split())
        least = min(words, options.max_width // 2)
        keys, rest = [*range(self.num_keys)], [*range(self.num_keys, len(widths))]
        room = options.max_width - least - sum(widths[place] + _GAP for place in keys[1:])
        while rest:
            left, shown = room, [*keys]
            while rest and (len(shown) == len(keys) or widths[rest[0]] + _GAP <= left):
                place = rest.pop(0)
                widths[place] = max(1, min(widths[place], left - _GAP))
                left -= widths[place] + _GAP
                shown.append(place)
            first = min(widths[0], least + max(0, left))
            yield self._part(shown, [first, *(widths[place] for place in shown[1:])])
            if rest:
                yield ""

    def _part(self, places: Sequence[int], widths: Sequence[int]) -> RenderableType:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        for place, width in zip(places, widths, strict=True):
            justify: Any = "right" if place else "left"
            grid.add_column(self.columns[place], justify=justify, width=width, overflow="fold")
        for index, row in enumerate(self.rows):
            style = "bold" if index == self.bold else None
            grid.add_row(*(Text(row[place], overflow="fold") for place in places), style=style)
        return grid


def table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    num_keys: int = 1,
    joined: str = "",
    bold: int | None = None,
) -> DataTable:
    """A table with a column for each key of the rows. The first `num_keys` columns name the rows.
    If `joined` names a column, rows that differ only there become one row. `bold` is the index of
    the row to highlight, and counts the rows before they are joined."""
    merged: dict[object, dict[str, str]] = {}
    bold_key: object = None
    for index, row in enumerate(rows):
        shown = {name: _shown(value) for name, value in row.items()}
        key: object = index
        if joined:
            key = tuple(value for name, value in shown.items() if name != joined)
        if (first := merged.setdefault(key, shown)) is not shown:
            first[joined] += f", {shown[joined]}"
        if index == bold:
            bold_key = key
    names = [name.replace("_", " ") for name in rows[0]]
    cells = [[*row.values()] for row in merged.values()]
    place = None if bold is None else [*merged].index(bold_key)
    return DataTable(title, names, cells, num_keys, place)
