"""`outrider plan`: the options that it refuses, and one small run with its own services."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.interfaces.step_costs import StepCosts
from outrider.planner import rehearsal
from outrider.replica.engines import build_engine
from tests.support.bench_sides import pair_here, tiny_pair
from tests.support.command_lines import refusal, reported

FLEET = ("--sessions", "4", "--targets", "2", "--drafts", "1", "--coordinators", "1")
EMULATED = ("--simulate", "--engine", "emulated:acceptance_rates=0.8")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--temperature", "0,3"), "error: --temperature: "),
        (("--prompts", "/nowhere/at.all"), "error: --prompts: "),
        (("--draft-model", "eagle3:DIR"), "error: --draft-model: eagle3:DIR is wrong; `plan`"),
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size: 2 is wrong"),
        (("--sessions", "3"), "error: --sessions: needs --simulate"),
        (("--simulate", "--tpot-ms", "9"), "error: --sessions or --rate is needed"),
        ((*EMULATED, "--rate", "3"), "error: --tpot-ms is needed"),
        ((*EMULATED, "--rate", "3", *FLEET), "error: --sessions or --rate is needed"),
        ((*EMULATED, *FLEET, "--prompts", "x"), "error: --prompts: cannot be used"),
        (("--simulate", "--engine", "emulated:", *FLEET), ": emulated: has no acceptance_"),
        (("--simulate", "--from-report", "/no/where", *FLEET), "error: --from-report: can"),
        (("--simulate", "--from-report", __file__, *FLEET), f": {__file__} is not the output of"),
        (("--devices", "h"), "--devices: must begin with h200-8b or h200-70b-fp8, not 'h'"),
        (("--devices", "h200-8b,speed=1"), "--devices: speed='1'"),
        (("--devices", f"h200-8b,context={10**400}"), "--devices: context='1000"),
        (("--devices", f"h200-8b,target=16/32/131/{10**400}"), "--devices: target='1000"),
        (("--devices", "h200-8b,bandwidth_tb=inf"), "--devices: bandwidth_tb='inf'"),
        (("--devices", "h200-8b,memory_gb=16"), "memory_gb is too small for the target and 1024"),
        (("--devices", "h200-8b", "--concurrency", "2"), "error: --concurrency: cannot be used"),
        (("--devices", "h200-8b", "--dtype", "float32"), "error: --dtype: cannot be used"),
        (("--devices", "h200-8b", "--config", "/dev/null"), "error: --config: cannot be used"),
        (("--devices", "h200-8b", "--simulate"), "error: --simulate: cannot go with --devices"),
    ],
)
def test_wrong_flags_end_the_command(
    flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refusal(capsys, "plan", *flags)


@pytest.mark.xdist_group("redis")
def test_the_command_reads_rehearses_and_prints_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tables(_: Any) -> list[StepCosts]:
        return [StepCosts((1, 2), (0.001, 0.002))] * 2

    pair = pair_here(tmp_path / "redis", lambda config: build_engine(config, 1))
    monkeypatch.setattr(rehearsal, "running_pair", pair)
    monkeypatch.setattr(rehearsal, "_tables", tables)
    flags = ["--max-tokens", "12", "--temperature", "1", "--draft-num-threads", "1"]
    fleet = ("--simulate", *FLEET, "--simulated-seconds", "1")
    report, _ = reported(capsys, "plan", *tiny_pair(tmp_path), *flags, *fleet)
    first = report["simulated"]
    assert first["figures"]["tokens_per_second"] > 0
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(report))
    later, _ = reported(capsys, "plan", "--from-report", str(saved), *fleet)
    again = later["simulated"]
    assert again["fleet"] == first["fleet"]
    rate = pytest.approx(first["figures"]["tokens_per_second"], rel=0.01)
    assert again["figures"]["tokens_per_second"] == rate
    plan = report["temperatures"]["1"]
    assert {option["rule"] for option in plan["options"]} == {"token", "block", "coupled"}
    assert len(plan["options"]) == 24
    assert all(option["tokens_per_second"] > 0 for option in plan["options"])
    assert plan["acceptance"]["chat"]["num_tokens"] <= 12
    assert plan["acceptance"]["all"]["by_position"]["token"][0] is not None
