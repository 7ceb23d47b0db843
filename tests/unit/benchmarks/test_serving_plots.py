"""Axes and points of the report's plots."""

from __future__ import annotations

import re

import pytest

from benchmarks.serving_plots import (
    CURVE_POINTS_MAX,
    Bar,
    Scale,
    bars,
    curve,
    nice_step,
    steps,
    thinned,
    timeline,
)


@pytest.mark.parametrize(
    ("span", "step"), [(1.0, 0.25), (4.0, 1.0), (7.0, 2.0), (0.013, 0.005), (900.0, 250.0)]
)
def test_steps_are_round_and_few(span: float, step: float) -> None:
    assert nice_step(span) == pytest.approx(step)


def test_a_rounded_axis_ends_at_a_line_and_another_at_its_most() -> None:
    rounded, exact = Scale.rounded(7.0, 0, 100), Scale.upto(7.0, 0, 100)
    assert rounded.ticks() == [0, 2, 4, 6, 8]
    assert (rounded(8.0), rounded(4.0)) == (100, 50)
    assert exact.ticks() == [0, 2, 4, 6]
    assert exact(7.0) == 100
    assert Scale.rounded(0.3, 0, 1).ticks() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert Scale.upto(0.0, 0, 1).ticks() == [0, 0.25, 0.5, 0.75, 1]


def test_a_curve_rises_from_none_to_all() -> None:
    """Whatever the order of its values, and with no more points than can be seen."""
    drawn = curve([3.0, 1.0, 2.0, 4.0], "ms", [("median", 2.5)])
    path = re.search(r'd="M46,156(.*?)H448"', drawn)
    assert path is not None
    heights = [float(found) for found in re.findall(r"V([\d.]+)", path[1])]
    assert heights == [120, 84, 48, 12]
    assert "median 2.50 ms" in drawn
    many = curve([float(value) for value in range(10_000)], "ms", [])
    assert CURVE_POINTS_MAX <= many.count("V") <= CURVE_POINTS_MAX + 10


def test_thinning_keeps_the_peaks_and_the_end() -> None:
    points = [(float(place), float(place % 7)) for place in range(3_000)]
    points[1234] = (1234.0, 99.0)
    found = thinned(points)
    assert len(found) <= 2 * CURVE_POINTS_MAX
    assert found == sorted(found)
    assert (1234.0, 99.0) in found
    assert found[-1] == points[-1]
    assert thinned(points[:10]) == points[:10]


def test_every_bar_and_every_request_is_drawn() -> None:
    assert bars([1.0, 0.0, 2.0], 0.5).count("<rect") == 2
    assert steps([(0.0, 1.0), (1.0, 2.0), (3.0, 0.0)]).count("V") == 4
    rows = [
        Bar(0.0, 0.0, 1.0, 2.0, False, "a"),
        Bar(0.0, 1.0, 1.5, 2.0, False, "waited"),
        Bar(0.5, 0.5, 1.5, 1.5, True, 'failed: <"x">'),
    ]
    drawn = timeline(rows)
    kinds = re.findall(r'<rect class="(\w+)"', drawn)
    assert kinds == ["fill", "area", "first", "wait", "fill", "area", "first", "bad"]
    assert "failed: &lt;&quot;x&quot;&gt;" in drawn


def test_nothing_to_draw_says_so() -> None:
    for drawn in (curve([], "ms", []), bars([], 1.0), steps([]), timeline([])):
        assert "nothing was measured" in drawn
