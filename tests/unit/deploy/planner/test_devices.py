"""`outrider plan --devices`: rows by hand, what is advised, and the table in the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.main import main
from deploy.planner.choosing import SWEEP
from deploy.planner.devices import compare
from outrider.errors import ConfigError

PERFORMANCE = Path(__file__).parents[4] / "docs" / "performance.md"
RATE = "device_tokens_per_second"
PLAIN, HEAD, BESIDE, EIGHTH, APART = 0, 1, 2, 3, 6
"""Rows: no draft, a head, a draft on the target's device, one for 8 targets, one for each."""


def _rows(text: str, round_trip_s: float = 0.0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = compare(text, round_trip_s).values["devices"]
    return rows


def _tokens(acceptance: float, k: int) -> float:
    return sum(acceptance**depth for depth in range(k + 1))


def test_one_session_takes_bytes_over_bandwidth_and_what_was_measured_beside_it() -> None:
    """16.06 GB at 3.6 TB/s, 32 layers of 0.07 ms, 1,024 slots of 131.1 KB; a round without a draft
    takes 0.5 ms more, one with 1.3 and 0.07."""
    target_ms = 16.06 / 3.6 + 32 * 0.07 + 1024 * 131.1e-6 / 3.6
    head_ms = 0.85 / 3.6 + 0.07 + 1024 * 4.1e-6 / 3.6
    draft_ms = 2.47 / 3.6 + 16 * 0.07 + 1024 * 32.8e-6 / 3.6
    rest_ms = 1.37
    rows = _rows("h200-8b")
    assert rows[PLAIN][RATE] == pytest.approx(1e3 / (target_ms + 0.5))
    by_head = {k: _tokens(0.71, k) / (target_ms + rest_ms + k * head_ms) for k in SWEEP}
    assert rows[HEAD][RATE] == pytest.approx(1e3 * max(by_head.values()))
    assert rows[HEAD]["num_draft_tokens"] == max(by_head, key=by_head.__getitem__)
    by_draft = {k: _tokens(0.65, k) / (target_ms + rest_ms + k * draft_ms) for k in SWEEP}
    assert rows[BESIDE][RATE] == pytest.approx(1e3 * max(by_draft.values()))


def test_a_draft_device_counts_and_is_hidden_where_it_looks_ahead() -> None:
    """A round whose outcome was foreseen, 84 in 100, takes the target's step, or the draft's K + 1
    of 16 outcomes where these are longer; else the draft's K tokens come on top."""
    k, hit = 2, 0.84
    verify_ms = 16.06 / 3.6 + 32 * 0.07 + 1024 * 131.1e-6 / 3.6 + 1.37
    draft_ms = 2.47 / 3.6 + 16 * 0.07 + 1024 * 32.8e-6 / 3.6
    ahead_ms = (k + 1) * (draft_ms + 15 * (0.05 + 1024 * 32.8e-6 / 3.6))
    round_ms = verify_ms + hit * max(0.0, ahead_ms - verify_ms) + (1 - hit) * k * draft_ms
    row = _rows("h200-8b")[APART]
    assert (row["num_draft_tokens"], row["look_ahead"]) == (k, 16)
    assert row["session_tokens_per_second"] == pytest.approx(1e3 * _tokens(0.65, k) / round_ms)
    assert row[RATE] == pytest.approx(row["session_tokens_per_second"] / 2)
    [*_, large] = _rows("h200-70b-fp8")
    assert large[RATE] == pytest.approx(large["session_tokens_per_second"] / 5)


def test_targets_that_share_a_draft_lengthen_its_steps() -> None:
    """8 sessions of 8 targets in a step: 7 * 0.05 ms and 7 contexts more, of each of K = 2."""
    rows = _rows("h200-8b,hit_rate=0")
    shared, apart = rows[EIGHTH], rows[APART]
    assert shared["num_draft_tokens"] == apart["num_draft_tokens"] == 2
    longer_ms = 2 * 7 * (0.05 + 1024 * 32.8e-6 / 3.6)
    rounds_ms = [
        1e3 * _tokens(0.65, 2) / one["session_tokens_per_second"] for one in (apart, shared)
    ]
    assert rounds_ms[1] - rounds_ms[0] == pytest.approx(longer_ms)
    assert shared[RATE] == pytest.approx(shared["session_tokens_per_second"] / 1.125)


def test_many_rows_compute_for_longer_than_they_read() -> None:
    """412 rows behind the first one take twice as long as one row."""
    bare = "h200-8b,layer_ms=0,session_ms=0,plain_ms=0,target=16.06/32/0.001,sessions="
    one, many = (_rows(f"{bare}{number}")[PLAIN] for number in (1, 413))
    ratio = one["session_tokens_per_second"] / many["session_tokens_per_second"]
    assert ratio == pytest.approx(2.0, rel=0.001)


def test_a_row_has_the_sessions_that_fit() -> None:
    """Of 32,768 tokens: 110.9 GB of keys and values on a target, 124.5 of 8 targets on a draft."""
    rows = _rows("h200-8b,sessions=64,context=32768")
    numbers = [rows[place]["sessions"] for place in (PLAIN, EIGHTH, APART)]
    assert numbers == [25, 14, 25]


def test_a_draft_of_several_devices_counts_as_several() -> None:
    """A head and a draft on the target's device have no more than the target."""
    rows = _rows("h200-8b,draft=2.47/16/32.8/2,head=0.85/1/4.1/2")
    assert [row["draft_devices"] for row in rows] == [0, 0.25, 0.5, 1, 2]
    for row in rows:
        occupied = 1 + row["draft_devices"]
        assert row[RATE] == pytest.approx(row["session_tokens_per_second"] / occupied)


def test_a_way_that_does_not_fit_is_left_out() -> None:
    """17.2 GB of keys and values fit beside an 8B draft six times, so not for eight targets."""
    rows = _rows("h200-70b-fp8,context=131072,draft=16.06/32/131.1")
    assert [row["draft_devices"] for row in rows] == [0, 0, 0, 0.25, 0.5, 1]


def test_a_link_makes_the_rounds_of_draft_devices_longer() -> None:
    near, far = _rows("h200-70b-fp8"), _rows("h200-70b-fp8", 0.005)
    assert [one[RATE] for one in near[:EIGHTH]] == [one[RATE] for one in far[:EIGHTH]]
    assert all(a[RATE] > b[RATE] for a, b in zip(near[EIGHTH:], far[EIGHTH:], strict=True))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("h200-8b", "Do not use a separate draft here: a head brings the most, 315"),
        ("h200-70b-fp8,sessions=64", "Do not use a separate draft here: a head brings the most"),
        ("h200-8b,head_acceptance=0", "Do not use a separate draft here: a draft brings the most"),
        (
            "h200-8b,head_acceptance=0,acceptance=0.1",
            "Do not use a separate draft here: decoding without drafts brings the most, 138",
        ),
        ("h200-70b-fp8,head_acceptance=0", "Use a separate draft here: a draft brings the most"),
        (
            "h200-70b-fp8,sessions=64,acceptance=0.85",
            "Use a separate draft here: a draft brings the most",
        ),
    ],
)
def test_a_separate_draft_is_advised_where_its_device_brings_the_most(
    text: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--devices", text, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["advice"].startswith(advice)
    most = max(shown["devices"], key=lambda row: row[RATE])
    devices = f"({most['draft_devices']:g} draft devices for each target)"
    assert (devices in shown["advice"]) == (most["way"] == "a draft")


def test_people_read_the_advice_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--devices", "h200-8b"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("│ a draft ") == 5
    assert "Do not use a separate draft here: a head" in shown


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("h100", "devices: 'h100' is wrong; it begins with h200-8b or h200-70b-fp8"),
        ("h200-8b,speed=1", "--devices: speed='1'"),
        ("h200-8b,acceptance=1.1", "--devices: acceptance='1.1'"),
        ("h200-8b,target=16/32", "--devices: target="),
        ("h200-8b,bandwidth_tb=inf", "--devices: bandwidth_tb='inf'"),
        ("h200-8b,memory_gb=16", "memory_gb: 1024 tokens do not fit"),
    ],
)
def test_wrong_devices_are_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        compare(text, 0.0)


def test_the_documentation_has_what_the_command_says() -> None:
    """| preset | sessions | context | none | head | beside | apart | shared (targets) |, twice."""
    number = r"\| *([\d,]+) "
    row = re.compile(rf"^\| (8B|70B) {number * 7}\((\d)\) \|$", re.MULTILINE)
    alone = ",layer_ms=0,session_ms=0,verdict_ms=0,round_ms=0,plain_ms=0"
    found = row.findall(PERFORMANCE.read_text(encoding="utf-8"))
    assert len(found) == 24
    for place, (model, *figures, targets) in enumerate(found):
        sessions, context, *rates = (int(figure.replace(",", "")) for figure in figures)
        preset = {"8B": "h200-8b", "70B": "h200-70b-fp8"}[model]
        rest = alone if place >= 12 else ""
        rows = _rows(f"{preset},sessions={sessions},context={context}{rest}")
        shared = max(rows[EIGHTH:APART], key=lambda one: float(one[RATE]))
        told = [rows[PLAIN], rows[HEAD], rows[BESIDE], rows[APART], shared]
        assert rates == [round(one[RATE]) for one in told], (model, sessions, context)
        assert int(targets) == 1 / shared["draft_devices"]
