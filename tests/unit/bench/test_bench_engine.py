"""`bench engine`: its waits, and a small run."""

from pathlib import Path

import pytest

from outrider.bench.engine import _waits, gaps, random_prompts
from outrider.cli.main import main
from tests.support.bench_sides import pair_here
from tests.support.command_lines import reported
from tests.support.models import byte_level_tokenizer, save_tiny_model
from tests.support.stack import running_stack
from tests.support.toy_engine import ToyEngine


def test_one_run_prints_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_here(tmp_path / "redis", lambda _: ToyEngine(320, 1, max_model_len=512))
    monkeypatch.setattr("outrider.bench.engine.running_pair", pair)
    monkeypatch.setattr("outrider.bench.engine.SESSIONS", (1, 2))
    directory = save_tiny_model(
        tmp_path / "model", vocab_size=320, tokenizer=byte_level_tokenizer(), max_model_len=512
    )
    command = ["bench", "engine", "--model", str(directory), "--target-num-threads", "1"]
    words = ["--repetitions", "1", "--parts", "sessions,steps"]
    found, _ = reported(capsys, *command, *words)
    for sessions in (found["sessions"], found["engine_sessions"]):
        assert list(sessions) == ["1", "2"]
        assert all(rate > 0 for rate in sessions.values())
    assert found["verify_step_ms"] > 0
    assert found["transformers_forward_ms"] > 0
    assert main(command) == 2
    assert "--model: takes at most 512 tokens; these --parts need 4001" in capsys.readouterr().err


def test_gaps_of_tokens_that_come_together_share_the_time_to_the_next() -> None:
    """A gap counts if it overlaps the interval."""
    assert gaps([[1.0, 1.0, 2.0, 5.0]], 0.0, 9.0) == [0.5, 0.5, 3.0]
    assert gaps([[1.0, 1.0, 2.0, 5.0]], 3.0, 4.0) == [3.0]


async def test_waits_are_ratios_of_times(tmp_path: Path) -> None:
    engine = ToyEngine(64, max_model_len=4_300, num_pages=8192)
    async with running_stack(engine, None, tmp_path) as stack:
        found = await _waits(stack.client, random_prompts(64))
    assert found.keys() == {"prefix_ratio", "gap_ratio"}
    assert all(value > 0 for value in found.values())
