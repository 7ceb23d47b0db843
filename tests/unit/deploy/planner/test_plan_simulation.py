"""`outrider plan --simulate`: what it reads, what it refuses, and what it prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from deploy.cli.main import main
from deploy.planner.fleets import of_numbers
from outrider.errors import SettingError

FLEET = ("--sessions", "4", "--targets", "2", "--drafts", "1", "--coordinators", "1")
NUMBERS = ("plan", "--simulate", "--from-numbers")


def test_numbers_say_what_is_simulated() -> None:
    """About the emulated pair's by default: 18.3 ms for 16 rows, 1.3 for 64."""
    pair = of_numbers("", 64, 64)
    for rows, ms in ((1, 18.3), (16, 18.3), (32, 36.6), (16 * 1_000, 18_300)):
        assert pair.times.target.step_seconds(rows) == pytest.approx(ms / 1e3)
    assert pair.survival == pytest.approx([0.8**n for n in range(1, 7)])
    table = of_numbers(
        "verify_ms=1:20/101:30, acceptance=0.9/0.5,num_draft_tokens=3,look_ahead=4,hit_rate=0.7,"
        "draft_ms=1.3,rest_ms=2",
        target_seats=7,
        draft_seats=5,
    )
    assert table.times.target.step_seconds(51) == pytest.approx(0.025)
    assert table.survival == pytest.approx((0.9, 0.45, 0.225))
    assert (table.way.look_ahead, table.way.hit_rate) == (4, 0.7)
    assert table.times.draft is not None
    assert table.times.draft.step_seconds(7) == pytest.approx(0.0013)
    assert (table.times.rest_s, table.seats("target"), table.seats("draft")) == (0.002, 7, 5)
    assert table.times.plain.at(0.02) == pytest.approx(0.022)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("speed=1", "speed='1'"),
        ("verify_ms=1,verify_ms=2", "verify_ms is given twice"),
        ("verify_ms=fast", "verify_ms='fast'"),
        ("verify_ms=4:1/2:3", "whose rows ascend"),
        ("verify_ms=1:x", "verify_ms='1:x'"),
        ("acceptance=nan", "acceptance='nan'"),
        ("num_draft_tokens=2.5", "num_draft_tokens='2.5'"),
    ],
)
def test_wrong_numbers_are_named(text: str, named: str) -> None:
    with pytest.raises(SettingError, match="from_numbers") as caught:
        of_numbers(text, 64, 64)
    assert named in caught.value.reason


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_file_that_is_no_report_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert main(["plan", "--simulate", "--from-report", str(path), *FLEET]) == 2
    assert f"error: --from-report: {path} is not " in capsys.readouterr().err


def test_a_saved_report_is_simulated_without_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every load on every fleet, of the pair of what a simulation printed, too."""
    pair = of_numbers("look_ahead=2,hit_rate=0.5", 8, 8)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"pair": asdict(pair)}))
    flags = (
        "plan", "--simulate", "--from-report", str(path), "--sessions", "2,4", "--targets", "1,2",
        "--drafts", "1", "--coordinators", "1", "--simulated-seconds", "2",
        "--json",
    )  # fmt: skip
    assert main(flags) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    report = json.loads(shown.out)
    assert [(one["load"]["sessions"], one["fleet"]["targets"]) for one in report["fleets"]] == [
        (2, 1), (2, 2), (4, 1), (4, 2)
    ]  # fmt: skip
    assert report["pair"]["way"]["look_ahead"] == 2
    for one in report["fleets"]:
        assert one["figures"]["tokens_per_second"] > 0
    assert main(flags) == 0
    assert capsys.readouterr().out == shown.out


@pytest.mark.parametrize(
    ("numbers", "tpot_ms", "said"),
    [("rest_ms=1", "15", "keep 15 ms a token"), ("", "1", "keeps 1 ms a token")],
)
def test_the_smallest_fleet_is_named(
    numbers: str, tpot_ms: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or that there is none; progress goes to standard error."""
    load = ("--sessions", "2", "--simulated-seconds", "1", "--prompt-tokens", "16")
    assert main([*NUMBERS, numbers, *load, "--tpot-ms", tpot_ms]) == 0
    shown = capsys.readouterr()
    assert said in " ".join(shown.out.split())
    assert "ms a token for 99 % of them" in shown.err
