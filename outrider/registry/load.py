"""What replicas say of their work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

WINDOW_S: Final = 5.0
"""About so long ago is what means still remember."""
FIGURE_MAX: Final = 1e12
"""Of each number that a replica says of its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Means over about `WINDOW_S`; None where there is nothing to say, or it is another role's."""

    busy: float | None = None
    """Share of the time in which a step ran, 0 to 1."""
    fill: float | None = None
    """Share of a step's places that were taken, 0 to 1."""
    step_ms: float | None = None
    queue_steps: float | None = None
    """How long an item waited for its step, in steps."""
    kv_usage: float | None = None
    """Share of the pages of keys and values that somebody waits for the contents of, 0 to 1."""
    draft_waits: float | None = None
    """Of a coordinator: share of the rounds with a proposal of a draft that waited for its turn
    there, 0 to 1 ..."""
    acceptance: float | None = None
    """... share of the draft tokens that were accepted, 0 to 1 ..."""
    look_ahead_hits: float | None = None
    """... share of the proposals that were there before their rounds, 0 to 1 ..."""
    tokens_per_second: float | None = None
    """... and tokens decided."""

    @classmethod
    def from_values(cls, values: object) -> Self:
        """Of a JSON object; keys that are not known are left out. Raises `ValueError`."""
        if not isinstance(values, Mapping):
            raise ValueError("figures are an object")
        known = {one.name for one in fields(cls)}
        found: dict[str, Any] = {name: value for name, value in values.items() if name in known}
        for name, value in found.items():
            if value is None:
                continue
            if type(value) not in (int, float) or not 0 <= value <= FIGURE_MAX:
                raise ValueError(f"figures.{name}: is no number from 0 to {FIGURE_MAX:g}")
        return cls(**found)


NO_FIGURES: Final = Figures()
