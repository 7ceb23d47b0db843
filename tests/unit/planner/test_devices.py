"""`outrider plan --devices`: its rows, its advice, and the table in the documentation."""

import re
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main
from outrider.planner.devices import compare
from tests.support.command_lines import reported

PERFORMANCE = Path(__file__).parents[3] / "docs" / "performance.md"
RATE = "device_tokens_per_second"
PLAIN, HEAD, BESIDE, EIGHTH, APART = 0, 1, 2, 3, 6
"""The rows of decoding without drafts, a head, a draft on the target's device, a draft for 8
targets, and a draft for each target."""


def _rows(text: str, round_trip_s: float = 0.0) -> list[dict[str, Any]]:
    return compare(text, round_trip_s).values["devices"]


def test_a_draft_of_several_devices_counts_as_several() -> None:
    """A head, or a draft on the target's device, has no other memory than the target."""
    rows = _rows("h200-8b,draft=2.47/16/32.8/2,head=0.85/1/12.3/2")
    assert [row["draft_devices"] for row in rows] == [0, *[0.25, 0.5, 1, 2] * 2]
    for row in rows:
        occupied = 1 + row["draft_devices"]
        assert row[RATE] == pytest.approx(row["session_tokens_per_second"] / occupied)


def test_a_way_that_does_not_fit_is_left_out() -> None:
    """17.2 GB of keys and values fit beside an 8B draft six times, so eight targets cannot share
    it."""
    rows = _rows("h200-70b-fp8,context=131072,draft=16.06/32/131.1")
    assert [row["draft_devices"] for row in rows] == [0, 0, 0, 0.25, 0.5, 1]


def test_a_link_makes_the_rounds_of_draft_devices_longer() -> None:
    near, far = _rows("h200-70b-fp8"), _rows("h200-70b-fp8", 0.005)
    assert [one[RATE] for one in near[:EIGHTH]] == [one[RATE] for one in far[:EIGHTH]]
    assert all(a[RATE] > b[RATE] for a, b in zip(near[EIGHTH:], far[EIGHTH:], strict=True))


@pytest.mark.parametrize(
    ("text", "round_trip_ms", "pays", "waits_ms"),
    [
        # 2 links x 3.13 tokens x 2 x 4,096 bytes / 3 GB/s, of rounds of K = 6.
        ("h200-8b", 0, "target.", 0.017),
        ("h200-8b,sessions=64,head_width=576", 0, "target for throughput, draft for", 0.154),
        ("h200-8b,sessions=64", 5, "target for throughput, draft for", 5.988),
        ("h200-8b,sessions=64,link_gb=0.1", 0, "target.", None),
        # Its steps take more of a round than the eighth of a device that takes them over.
        ("h200-8b,sessions=256,context=256,layer_ms=0.01", 0, "draft.", None),
        ("h200-8b,head_acceptance=0", 0, None, None),
        ("h200-70b-fp8", 0, None, None),  # On several ranks.
    ],
)
def test_where_a_head_pays_depends_on_its_width_and_the_link(
    text: str, round_trip_ms: float, pays: str | None, waits_ms: float | None
) -> None:
    report = compare(text, round_trip_ms / 1e3).values
    assert ("For a head" in report["advice"]) == (pays is not None)
    assert pays is None or f"For a head, use --eagle3-on {pays}" in report["advice"]
    apart = [row for row in report["devices"] if row["way"] == "a head on a draft device"]
    if waits_ms is not None:
        fastest = max(apart, key=lambda row: row["session_tokens_per_second"])
        assert fastest["link_ms"] == pytest.approx(waits_ms, abs=5e-4)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("h200-8b", "Do not use a separate draft here: a head is the fastest, 315"),
        ("h200-8b,head_acceptance=0", "Do not use a separate draft here: a draft is the fastest"),
        (
            "h200-8b,head_acceptance=0,acceptance=0.1",
            "Do not use a separate draft here: decoding without drafts is the fastest, 138",
        ),
        ("h200-70b-fp8,head_acceptance=0", "Use a separate draft here: a draft is the fastest"),
    ],
)
def test_a_separate_draft_is_advised_where_its_device_brings_the_most(
    text: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, _ = reported(capsys, "plan", "--devices", text)
    assert shown["advice"].startswith(advice)
    most = max(shown["devices"], key=lambda row: row[RATE])
    devices = f"({most['draft_devices']:g} draft devices for each target)"
    assert (devices in shown["advice"]) == (most["way"] == "a draft")
    assert main(["plan", "--devices", text]) == 0
    assert advice in capsys.readouterr().out


def test_the_documentation_has_what_the_command_says() -> None:
    """| preset | sessions | context | none | head | beside | apart | shared (targets) |."""
    number = r"\| *([\d,]+) "
    row = re.compile(rf"^\| (8B|70B) {number * 7}\((\d)\) \|$", re.MULTILINE)
    found = row.findall(PERFORMANCE.read_text(encoding="utf-8"))
    assert len(found) == 12
    for model, *figures, targets in found:
        sessions, context, *rates = (int(figure.replace(",", "")) for figure in figures)
        preset = {"8B": "h200-8b", "70B": "h200-70b-fp8"}[model]
        rows = _rows(f"{preset},sessions={sessions},context={context}")
        shared = max(rows[EIGHTH:APART], key=lambda one: float(one[RATE]))
        told = [rows[PLAIN], rows[HEAD], rows[BESIDE], rows[APART], shared]
        assert rates == [round(one[RATE]) for one in told], (model, sessions, context)
        assert int(targets) == 1 / shared["draft_devices"]


def test_the_table_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--devices", "h200-70b-fp8"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    for row in _rows("h200-70b-fp8"):
        figures = (f"{value:.3f}" for value in row.values() if isinstance(value, float))
        assert all(figure in shown for figure in figures)
        assert all(word in shown for name in row for word in name.split("_"))
