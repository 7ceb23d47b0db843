"""What the benches print: figures as one JSON object, and as a table of two columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

JSON_DIGITS: Final = 4
"""Decimals of a number in a JSON report."""


def to_json(value: Mapping[str, object]) -> str:
    """One JSON object on one line. Raises `ValueError` for NaN and infinity."""
    return json.dumps(_rounded(value), allow_nan=False)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` per cent of `values` do not exceed, interpolated."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), share))


def figures_table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Names and figures for people."""
    from rich.table import Table

    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, figure in rows:
        table.add_row(name, figure)
    return table


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, JSON_DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value
