"""Plots as inline SVG, made of nothing but text: numbers in, one `<svg>` out.

Colours are classes, which the page's style gives values for light and for dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Final

WIDTH, HEIGHT = 460, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 34
TICKS: Final = 4
LABEL_WIDTH: Final = 120
"""Of a mark's name and value, at most."""
CURVE_POINTS_MAX: Final = 300
"""Of a curve: more would not be seen."""
ROW_MAX, ROW_MIN = 9.0, 1.0
"""Height of a row of the timeline, in its units, between which rows are fitted."""
TIMELINE_HEIGHT: Final = 420.0
_NICE: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


def nice_step(span: float, ticks: int = TICKS) -> float:
    """The smallest round number of which at most `ticks` make up `span`, which is above 0."""
    raw = span / ticks
    power = 10.0 ** floor(log10(raw))
    return next(power * unit for unit in _NICE if power * unit >= raw * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear axis from 0 to `top`, with a line at each `step`."""

    top: float
    step: float
    begin: float
    """Where 0 is drawn ..."""
    end: float
    """... and where `top` is."""

    @classmethod
    def upto(cls, most: float, begin: float, end: float) -> Scale:
        """From 0 to `most`."""
        most = most if most > 0 else 1.0
        return cls(most, nice_step(most), begin, end)

    @classmethod
    def rounded(cls, most: float, begin: float, end: float) -> Scale:
        """From 0 to the first line that is not below `most`."""
        found = cls.upto(most, begin, end)
        return cls(found.step * ceil(found.top / found.step - 1e-9), found.step, begin, end)

    def __call__(self, value: float) -> float:
        """Where a value is drawn."""
        return self.begin + (self.end - self.begin) * value / self.top

    def ticks(self) -> list[float]:
        """The values with a line."""
        return [self.step * place for place in range(floor(self.top / self.step + 1e-9) + 1)]


def curve(values: Sequence[float], unit: str, marks: Sequence[tuple[str, float]]) -> str:
    """The distribution of values: which share of them is at most x. `marks` are named places on
    the x axis."""
    if not values:
        return _nothing()
    ordered = sorted(values)
    x = Scale.upto(ordered[-1], LEFT, WIDTH - RIGHT)
    y = Scale(1.0, 0.25, HEIGHT - BOTTOM, TOP)
    number = len(ordered)
    places = sorted({0, number - 1, *range(0, number, max(1, number // CURVE_POINTS_MAX))})
    path = f"M{_at(x(0))},{_at(y(0))}"
    for place in places:
        path += f"H{_at(x(ordered[place]))}V{_at(y((place + 1) / number))}"
    path += f"H{_at(x.end)}"
    lines = []
    for turn, (name, value) in enumerate(marks):
        middle = x(value)
        # To the right, where a distribution leaves room, unless the plot ends there.
        anchor = "end" if middle > WIDTH - RIGHT - LABEL_WIDTH else "start"
        shift = -4 if anchor == "end" else 4
        lines.append(
            f'<line class="mark" x1="{_at(middle)}" x2="{_at(middle)}" y1="{TOP}" '
            f'y2="{HEIGHT - BOTTOM}"/><text class="label" text-anchor="{anchor}" '
            f'x="{_at(middle + shift)}" y="{HEIGHT - BOTTOM - 8 - 14 * turn}">'
            f"{escape(name)} {value:.2f} {escape(unit)}</text>"
        )
    drawn = f'<path class="line" d="{path}"/>{"".join(lines)}'
    return _framed(drawn, x, y, unit, percent=True)


def bars(values: Sequence[float], bin_s: float) -> str:
    """A rate over time: one bar for each `bin_s` seconds."""
    if not len(values):
        return _nothing()
    x = Scale.upto(len(values) * bin_s, LEFT, WIDTH - RIGHT)
    y = Scale.rounded(max(values), HEIGHT - BOTTOM, TOP)
    width = max(0.5, x(bin_s) - x(0) - 1)
    drawn = "".join(
        f'<rect class="area" x="{_at(x(place * bin_s))}" y="{_at(y(value))}" '
        f'width="{_at(width)}" height="{_at(y(0) - y(value))}"/>'
        for place, value in enumerate(values)
        if value > 0
    )
    return _framed(drawn, x, y, "s")


def steps(points: Sequence[tuple[float, float]]) -> str:
    """What has each value from its time on, s; ascending."""
    if not points:
        return _nothing()
    x = Scale.upto(points[-1][0], LEFT, WIDTH - RIGHT)
    y = Scale.rounded(max(value for _, value in points), HEIGHT - BOTTOM, TOP)
    path = f"M{_at(x(0))},{_at(y(0))}"
    for at_s, value in thinned(points):
        path += f"H{_at(x(at_s))}V{_at(y(value))}"
    return _framed(f'<path class="area line" d="{path}V{_at(y(0))}Z"/>', x, y, "s")


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """As many points as can be seen: of those that fall together, the one with most and the last.
    Ascending, as they are."""
    if len(points) <= 2 * CURVE_POINTS_MAX:
        return list(points)
    size = ceil(len(points) / CURVE_POINTS_MAX)
    found: list[tuple[float, float]] = []
    for first in range(0, len(points), size):
        together = points[first : first + size]
        found += sorted({max(together, key=lambda point: point[1]), together[-1]})
    return found


@dataclass(frozen=True, slots=True)
class Bar:
    """One request on the timeline, s."""

    due_s: float
    started_s: float
    first_s: float
    """Its first token; where it failed, its end."""
    ended_s: float
    failed: bool
    title: str
    """What is told where one points at it."""


def timeline(rows: Sequence[Bar]) -> str:
    """Requests below each other: waiting in this client, to the first token, and from there."""
    if not rows:
        return _nothing()
    row = min(ROW_MAX, max(ROW_MIN, TIMELINE_HEIGHT / len(rows)))
    width, bottom = 2 * WIDTH, TOP + row * len(rows)
    x = Scale.upto(max(each.ended_s for each in rows), LEFT, width - RIGHT)
    drawn = []
    for place, each in enumerate(rows):
        top, high = TOP + row * place, row * 0.8
        parts = [
            _bar("wait", x, each.due_s, each.started_s, top + high / 4, high / 2),
            _bar("bad" if each.failed else "fill", x, each.started_s, each.first_s, top, high),
        ]
        if not each.failed:
            parts.append(_bar("area", x, each.first_s, each.ended_s, top, high))
            parts.append(
                f'<rect class="first" x="{_at(x(each.first_s) - 0.75)}" y="{_at(top)}" '
                f'width="1.5" height="{_at(high)}"/>'
            )
        drawn.append(f"<g><title>{escape(each.title)}</title>{''.join(parts)}</g>")
    axis = "".join(_tick_x(x, value, TOP, bottom) for value in x.ticks())
    label = _unit("s", width, bottom)
    return _svg(axis + "".join(drawn) + label, width, bottom + BOTTOM)


def _bar(kind: str, x: Scale, begin: float, end: float, top: float, high: float) -> str:
    if end <= begin:
        return ""
    return (
        f'<rect class="{kind}" x="{_at(x(begin))}" y="{_at(top)}" '
        f'width="{_at(max(0.5, x(end) - x(begin)))}" height="{_at(high)}"/>'
    )


def _framed(drawn: str, x: Scale, y: Scale, unit: str, percent: bool = False) -> str:
    """With the axes' lines and numbers."""
    lines = [_tick_x(x, value, TOP, HEIGHT - BOTTOM) for value in x.ticks()]
    for value in y.ticks():
        text = f"{100 * value:g}%" if percent else f"{value:g}"
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_at(y(value))}" '
            f'y2="{_at(y(value))}"/><text class="tick" text-anchor="end" x="{LEFT - 6}" '
            f'y="{_at(y(value) + 4)}">{text}</text>'
        )
    return _svg("".join(lines) + drawn + _unit(unit, WIDTH, HEIGHT - BOTTOM), WIDTH, HEIGHT)


def _tick_x(x: Scale, value: float, top: float, bottom: float) -> str:
    return (
        f'<line class="grid" x1="{_at(x(value))}" x2="{_at(x(value))}" y1="{_at(top)}" '
        f'y2="{_at(bottom)}"/><text class="tick" text-anchor="middle" x="{_at(x(value))}" '
        f'y="{_at(bottom + 16)}">{value:g}</text>'
    )


def _unit(unit: str, width: float, bottom: float) -> str:
    return (
        f'<text class="tick" text-anchor="end" x="{_at(width - RIGHT)}" '
        f'y="{_at(bottom + 30)}">{escape(unit)}</text>'
    )


def _nothing() -> str:
    text = f'<text class="label" text-anchor="middle" x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}">'
    return _svg(f"{text}nothing was measured</text>", WIDTH, HEIGHT)


def _svg(parts: str, width: float, height: float) -> str:
    return f'<svg viewBox="0 0 {_at(width)} {_at(height)}" role="img">{parts}</svg>'


def _at(value: float) -> str:
    """A coordinate, no longer than it can be seen."""
    return f"{value:.1f}".removesuffix(".0")
