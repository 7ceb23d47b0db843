"""`bench emulate`: figures compared with hand calculations, and one small run."""

from pathlib import Path
from typing import Any

import pytest

from outrider.bench import emulate
from outrider.bench.emulate import Run, figures, window
from outrider.bench.measurement import Round
from outrider.config.deployment import TargetConfig
from outrider.config.emulated_spec import SCHEME, EmulatedSpec
from outrider.engine.emulated import EmulatedEngine
from outrider.interfaces.request import RoundReport, Tokens
from outrider.speculation.sampling_params import Rule
from tests.support.bench_sides import pair_here
from tests.support.command_lines import reported


def round_of(drafted: int, first: int, num_tokens: int, seconds: float = 1.0) -> Round:
    report = RoundReport(0, (0,) * drafted, 0, 0, 0, 0, 0, 0)
    return Round(report, Tokens(first, (0,) * num_tokens, "", (), ()), seconds)


def test_a_window_of_rounds_is_without_the_first_and_those_behind_the_last_token() -> None:
    """Rounds have the tokens 1 | 2..4 | 5, 6, 7 | 8 | 9, 10; the first four are dropped."""
    rounds = [round_of(*place) for place in ((0, 0, 1), (2, 1, 3), (4, 4, 3), (4, 7, 1), (4, 8, 2))]
    assert window(rounds, 8) == rounds[2:4]


def test_the_ideal_is_a_step_of_the_target_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With K = 2 and acceptance 1/4, a round commits 21/16 tokens in 18.3 ms: 71.7 tokens/s."""
    monkeypatch.setattr(emulate, "ACCEPTANCE", {Rule.TOKEN: 0.5, Rule.COUPLED: 0.25})
    one = [round_of(2, 0, 1, 0.025)]
    found = figures(Run("synchronous", Rule.COUPLED, 2), one)
    assert found["tokens_per_second"] == pytest.approx(40.0)
    assert found["fraction_of_ideal"] == pytest.approx(40.0 * 18.3e-3 / (21 / 16))
    assert found["overhead_ms_p50"] == pytest.approx(25.0 - 18.3 - 2 * 1.3)
    assert found["look_ahead_hit_rate"] is None
    ahead = figures(Run("look_ahead", Rule.COUPLED, 2), one)
    assert ahead["overhead_ms_p50"] == pytest.approx(25.0 - 18.3)
    assert ahead["look_ahead_hit_rate"] == 0.0


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Runs the services in this process with fast engines. Returns the delays of their links."""
    asked: list[float] = []

    def engine_of(config: Any) -> EmulatedEngine:
        spec = EmulatedSpec.parse(config.engine.removeprefix(f"{SCHEME}:"))
        return EmulatedEngine(spec, "target" if isinstance(config, TargetConfig) else "draft")

    monkeypatch.setattr(emulate, "STEPS", emulate.STEPS | {"verify_ms": 4.0, "draft_ms": 0.5})
    monkeypatch.setattr(emulate, "LAW", emulate.LAW | {"vocab_size": 1_000, "support": 10})
    monkeypatch.setattr(emulate, "WARM_UP_TOKENS", 8)
    monkeypatch.setattr(emulate, "running_pair", pair_here(tmp_path, engine_of, asked))
    return asked


@pytest.mark.xdist_group("redis")
@pytest.mark.parametrize("stated", [(), ("--acceptance-rates", "1")], ids=["own", "stated"])
def test_the_command_measures_every_mode_and_prints_one_json_object(
    stated: tuple[str, ...], delays: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """With stated rates, each proposal has one token, which is accepted."""
    value, err = reported(capsys, "bench", "emulate", "--tokens", "32", *stated)
    told = [f"outrider: run {number} of 5" for number in range(1, 6)]
    assert [line for line in err.splitlines() if not line.endswith(" s)")] == told
    assert delays == [0.0, 0.0, 0.0, 2.5, 2.5]
    plain, *drafting = value["modes"]
    assert (plain["mode"], plain["num_draft_tokens"], plain["tokens_per_round"]) == ("plain", 0, 1)
    assert 0 < plain["fraction_of_ideal"] < 1.1
    assert [one["mode"] for one in drafting] == ["synchronous", "look_ahead"] * 2
    for one in drafting:
        assert 1 < one["tokens_per_round"] <= 1 + one["num_draft_tokens"]
        if stated:
            assert (one["tokens_per_round"], one["num_draft_tokens"]) == (2, 1)
        assert (one["look_ahead_hit_rate"] is None) == (one["mode"] == "synchronous")
