"""vLLM's models on Outrider's pages are compared with the library's own models."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config.deployment import TargetConfig
from outrider.errors import ConfigError
from outrider.interfaces.engine import SequenceStep
from outrider.kernels import processor
from outrider.replica.engines import build_engine
from tests.support.pages import check_pages
from tests.support.vllm_models import MAX_MODEL_LEN, VOCAB, MakeEngine, save

TOLERANCE = 1e-3
"""Largest difference of a logit in float32."""


def dense(module: Any, token_ids: list[int]) -> torch.Tensor:
    """The library's logits [T, V]."""
    with torch.inference_mode():
        return module(input_ids=torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize(
    ("family", "enforce_eager"),
    [("llama", True), ("llama", False), ("qwen3", True), ("gemma3", True), ("mixtral", True)],
)
def test_any_steps_give_the_logits_of_the_library(
    family: str, enforce_eager: bool, tmp_path: Path, make_engine: MakeEngine
) -> None:
    module = save(family, tmp_path)
    engine = make_engine(tmp_path, enforce_eager=enforce_eager)
    chance = random.Random(5)
    prompt = [chance.randrange(VOCAB) for _ in range(100)]
    texts: dict[str, list[int]] = {}
    for turn in range(40):
        if turn % 5 == 4:
            engine.release("fork")
            engine.fork("a", "fork")
            texts["fork"] = [*texts["a"]]
        steps = []
        for name in ("a", "b", "c", "fork"):
            if len(texts.get(name, ())) > 150:
                engine.release(name)
                del texts[name]
            if name not in texts:
                texts[name] = prompt[: engine.attach(name, prompt)]
                new = prompt[len(texts[name]) :]
            else:
                if chance.random() < 0.3:
                    del texts[name][chance.randint(1, len(texts[name])) :]
                    engine.keep(name, len(texts[name]))
                new = [chance.randrange(VOCAB) for _ in range(chance.choice([1, 1, 5, 40]))]
            steps.append(SequenceStep(name, tuple(new), chance.randint(1, len(new))))
            texts[name].extend(new)
        for step, logits in zip(steps, engine.forward(steps), strict=True):
            expected = dense(module, texts[step.sequence_id])[-step.num_logits :]
            assert (logits - expected).abs().max() <= TOLERANCE
    assert engine.page_counts().prefix_hits > 0


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_failed_step_leaves_sequences_as_they_were(
    tmp_path: Path, make_engine: MakeEngine, num_rows: int
) -> None:
    save("llama", tmp_path)
    engine = make_engine(tmp_path)
    [before] = engine.forward([SequenceStep("a", (1, 2, 3), 1)])
    model, engine._model = engine._model, None
    with pytest.raises(TypeError):
        engine.forward([SequenceStep("a", (4,) * num_rows, 1)])
    engine._model = model
    assert engine.length("a") == 3
    engine.keep("a", 2)
    [again] = engine.forward([SequenceStep("a", (3,), 1)])
    torch.testing.assert_close(again, before)
    check_pages(engine._pool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_rows_do_not_depend_on_others(
    tmp_path: Path, make_engine: MakeEngine, dtype: str
) -> None:
    """Here the rows have a step of their own. The step of all rows is longer than batches of
    prompts, as are steps of a draft and the engine's tests at its start."""
    save("llama", tmp_path)
    engine = make_engine(tmp_path, dtype=dtype, deterministic=True, max_num_batched_tokens=64)
    assert engine.info.numerics
    ids = tuple(7 * place % VOCAB for place in range(70))
    [together] = engine.forward([SequenceStep("together", ids, 70)])
    for place in range(70):
        [row] = engine.forward([SequenceStep("alone", ids[place : place + 1], 1)])
        assert torch.equal(row[0], together[place])


def test_rows_that_share_a_scale_are_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs the model, and its description says what the model does."""
    from vllm.model_executor.models.llama import LlamaMLP

    save("llama", tmp_path, dtype=torch.bfloat16)
    config = TargetConfig(
        model="tiny",
        directory=str(tmp_path),
        engine="vllm",
        device="cpu",
        dtype="bfloat16",
        kv_cache_memory_bytes=2**24,
        enforce_eager=True,
    )
    assert build_engine(config, 1).info.row_coupling == 0
    plain = LlamaMLP.forward

    def quantised(block: Any, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().mean() / 16  # Differs between any two sets of rows.
        found: torch.Tensor = plain(block, (rows / scale).round() * scale)
        return found

    monkeypatch.setattr(LlamaMLP, "forward", quantised)
    assert build_engine(config, 1).info.row_coupling > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_does_not_let_a_processor_emulate_bfloat16(
    tmp_path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """For vLLM, `auto` means bfloat16 even if the weights are in float32."""
    save("llama", tmp_path, dtype=dtype)
    assert make_engine(tmp_path, dtype="auto").info.dtype == "bfloat16"
    monkeypatch.setattr(processor, "has_bfloat16", lambda: False)
    info = make_engine(tmp_path, dtype="auto").info
    assert info.dtype == "float32"
    assert bool(info.dtype_note) is (dtype == torch.bfloat16)


def test_engines_of_one_process_step_at_once(tmp_path: Path, make_engine: MakeEngine) -> None:
    save("llama", tmp_path)
    engines = [make_engine(tmp_path, deterministic=True) for _ in range(2)]

    def write(engine: Any) -> torch.Tensor:
        rows = []
        for place in range(0, 240, 4):
            ids = tuple(7 * one % VOCAB for one in range(place, place + 4))
            rows += engine.forward([SequenceStep("a", ids, 4)])
        engine.release("a")
        return torch.cat(rows)

    expected = write(engines[0])
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda engine: [write(engine) for _ in range(5)], engines):
            assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"kv_cache_memory_bytes": 1000}, "hold no page"),
        ("llama", {"max_model_len": MAX_MODEL_LEN + 1}, "cannot be loaded"),
        # MLA on a CPU, as the engine's test at its start finds out.
        ("deepseek_v2", {}, "cannot run a text in parts"),
        ("mamba", {}, "cannot be removed"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, make_engine: MakeEngine, family: str, changes: dict[str, int], words: str
) -> None:
    save(family, tmp_path)
    with pytest.raises(ConfigError, match=words):
        make_engine(tmp_path, **changes)
