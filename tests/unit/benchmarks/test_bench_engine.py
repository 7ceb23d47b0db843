"""`bench engine`: its waits, and a small run."""

import json
from pathlib import Path

import numpy as np
import pytest
from bench_sides import pair_here
from models import byte_level_tokenizer, save_tiny_model
from stack import running_stack
from toy_engine import ToyEngine

from benchmarks.engine import LONG_TOKENS, OWN_TOKENS, PREFIX_TOKENS, Prompts, _waits, gaps
from deploy.cli.main import main


def test_no_two_prompts_begin_alike() -> None:
    prompts = Prompts(range(1000))
    taken = [prompt for number in (1, 16, 16, 4) for prompt in prompts.take(number, 20)]
    assert {len(prompt) for prompt in taken} == {20}
    assert len({prompt[0] for prompt in taken}) == len(taken)


def test_one_run_prints_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_here(tmp_path / "redis", lambda _: ToyEngine(320, 1, max_model_len=512))
    monkeypatch.setattr("benchmarks.engine.running_pair", pair)
    monkeypatch.setattr("benchmarks.engine.SESSIONS", (1, 2))
    directory = save_tiny_model(
        tmp_path / "model", vocab_size=320, tokenizer=byte_level_tokenizer(), max_model_len=512
    )
    words = ["--repetitions", "1", "--json", "--target-num-threads", "1"]
    assert main(["bench", "engine", "--model", str(directory), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    for sessions in (found["sessions"], found["engine_sessions"]):
        assert list(sessions) == ["1", "2"]
        assert all(rate > 0 for rate in sessions.values())
    assert found["verify_step_ms"] > 0
    assert found["transformers_forward_ms"] > 0
    assert not {"prefix_ratio", "gap_ratio"} & set(found), "the model is too short"


def test_gaps_of_tokens_that_come_together_share_the_time_to_the_next() -> None:
    """A session gets two tokens at 1 s, one at 2 s and one at 5 s. A gap counts if it overlaps the
    interval."""
    assert gaps([[1.0, 1.0, 2.0, 5.0]], 0.0, 9.0) == [0.5, 0.5, 3.0]
    assert gaps([[1.0, 1.0, 2.0, 5.0]], 3.0, 4.0) == [3.0]


@pytest.mark.parametrize(
    ("max_model_len", "known"),
    [(PREFIX_TOKENS, 0), (PREFIX_TOKENS + OWN_TOKENS + 1, 3), (LONG_TOKENS + 300, 6)],
)
async def test_waits_are_measured_as_far_as_the_model_is_long_enough(
    max_model_len: int, known: int, tmp_path: Path
) -> None:
    engine = ToyEngine(64, max_model_len=max_model_len, num_pages=8192)
    prompts = Prompts(np.random.default_rng(1).integers(64, size=10_000).tolist())
    async with running_stack(engine, None, tmp_path) as stack:
        found = await _waits(stack.client, prompts, max_model_len)
    assert len(found) == known
    assert all(value > 0 for value in found.values())
