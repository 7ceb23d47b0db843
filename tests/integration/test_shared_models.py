"""The leader's engine of a shared model gives the same results as that of the whole model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from outrider.config.deployment import TargetConfig
from outrider.engine.paged_engine import PagedEngine
from outrider.engine.tensor_parallel.group import SUM_BYTES_MAX
from outrider.errors import BadRequest
from outrider.interfaces.engine import Engine, SequenceStep
from outrider.models.compatibility import row_coupling
from outrider.models.loading import load_model
from outrider.replica.engines import build_engine
from outrider.replica.rank_process import RankLeader, engine_of_a_replica
from target_service.actor import self_drafter_of
from tests.support.models import save_tiny_eagle3, tiny_config, tiny_module
from tests.support.rank_processes import JOIN_S, follow_model, processes
from tests.support.same_tokens import check_tokens
from tests.support.stack import NUM_SEQUENCES, running_stack


@contextmanager
def _shared(config: TargetConfig, size: int) -> Iterator[tuple[Engine, list[Any]]]:
    """The leader's engine, and the processes of the other ranks."""
    leadership = RankLeader(size, True, JOIN_S)
    arguments = [(config, leadership.rendezvous, rank) for rank in range(1, size)]
    with processes(follow_model, arguments) as followers:
        engine: Any = engine_of_a_replica(config, 1, leadership)
        try:
            yield engine, followers
        finally:
            engine.close()


def _config(path: Path, dtype: str) -> TargetConfig:
    return TargetConfig(
        model="tiny", directory=str(path), dtype=dtype, device="cpu", num_threads=1, max_num_seqs=4
    )


def _whole(config: TargetConfig) -> PagedEngine:
    module, info = load_model(
        Path(config.directory), name=config.model, dtype=config.dtype, device="cpu"
    )
    return PagedEngine(module, info, max_num_seqs=config.max_num_seqs)


def _run(engine: Engine) -> list[torch.Tensor]:
    """All kinds of engine calls: chunks, a batch, tokens that are removed, a branch, a proposal
    that is cut, a shared prefix, and steps without logits."""
    first, second = tuple(range(1, 36)), tuple(range(36, 3, -1))
    logits = engine.forward([SequenceStep("a", first[:20], 2), SequenceStep("b", second, 1)])
    logits += engine.forward([SequenceStep("a", first[20:], 0)])
    engine.keep("a", 30)
    engine.fork("a", "branch")
    logits += engine.forward([SequenceStep("a", (5, 6, 7), 3), SequenceStep("branch", (8, 9), 2)])
    engine.keep("a", 32)
    engine.release("branch")
    held = engine.attach("c", (*first[:30], 3))
    assert 0 < held < 31
    logits += engine.forward(
        [SequenceStep("c", (*first[:30], 3)[held:], 1), SequenceStep("a", (4,), 1)]
    )
    engine.release("c")
    logits += engine.forward([SequenceStep("b", (1, 2), 2)])
    return logits


def test_a_shared_engine_gives_what_the_whole_one_gives(tmp_path: Path) -> None:
    """Logits agree in float64 to 1e-10 in every kind of call, also after a refused request."""
    model = tiny_config("llama", vocab_size=37)
    model.num_key_value_heads = 4
    tiny_module(model, dtype=torch.float64).save_pretrained(tmp_path)
    config = _config(tmp_path, "float64")
    whole = _whole(config)
    row_coupling(whole)  # As a target does at its start. A page of this trial stays in the cache.
    with _shared(config, 2) as (engine, _):
        assert engine.info == whole.info
        with pytest.raises(BadRequest):
            engine.forward([SequenceStep("a", (37,), 1)])
        for ours, theirs in zip(_run(engine), _run(whole), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        assert engine.page_counts() == whole.page_counts()


@pytest.mark.parametrize(
    ("size", "temperature"), [(3, 1.0), pytest.param(2, 0.0, marks=pytest.mark.full)]
)
async def test_a_head_drafts_on_the_leader(size: int, temperature: float, tmp_path: Path) -> None:
    """The head drafts as on the whole model, and all ranks hold the same pages. The text, coupled
    or greedy, is the same for any number of draft tokens."""
    model = tiny_config("llama", vocab_size=37)
    model.hidden_size = model.intermediate_size = 48
    model.num_attention_heads = model.num_key_value_heads = 6
    model.num_hidden_layers = 3
    module = tiny_module(model, dtype=torch.float64)
    module.save_pretrained(tmp_path / "model")
    head = save_tiny_eagle3(tmp_path / "head", tmp_path / "model", range(0, 37, 2))
    config = replace(
        _config(tmp_path / "model", "float64"),
        kv_cache_memory_bytes=2**20,
        max_num_seqs=NUM_SEQUENCES,
        head="head",
        head_kind="eagle3",
        head_directory=str(head),
    )
    whole: Any = build_engine(config, 1)
    with _shared(config, size) as (engine, _):
        shared: Any = engine
        assert shared.draft_layer.note == whole.draft_layer.note
        # A rank's share of the model is smaller, but the leader's pages also hold the head's part.
        assert shared.page_counts().num_pages > whole.page_counts().num_pages
        for one in (shared, whole):
            one.forward([SequenceStep("a", tuple(range(1, 36)), 3)])
            one.fork("a", "branch")
        drafted = [SequenceStep(name, (5,), 1) for name in ("a", "branch")]
        found = [
            [*one.features(), *one.forward_draft(drafted, [one.features()[0][2]] * 2)]
            for one in (shared, whole)
        ]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
        for name in ("a", "branch"):
            shared.keep(name, 35)
            shared.release(name)
        drafter: Any = self_drafter_of(shared)
        drafter.propose = Mock(wraps=drafter.propose)
        async with running_stack(shared, None, tmp_path, self_drafter=drafter) as stack:
            prompts = [(3, 1, 4, 1, 5), tuple(range(30)), tuple(range(32))]
            await check_tokens(stack, prompts, 16, 1, temperature)
        assert drafter.propose.call_count > 10


def test_a_deterministic_shared_engine_gives_one_answer(tmp_path: Path) -> None:
    """In bfloat16, a sequence's logits are bit-equal alone and beside many other sequences, whose
    rows make the sum too large for the algorithm for small sums."""
    model = tiny_config("llama", vocab_size=37)
    model.hidden_size, model.num_attention_heads, model.num_key_value_heads = 384, 6, 3
    tiny_module(model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = replace(_config(tmp_path, "bfloat16"), max_model_len=40, deterministic=True)
    tokens = tuple(range(1, 36))
    with _shared(config, 3) as (engine, _):
        (alone,) = engine.forward([SequenceStep("alone", tokens, 35)])
        engine.release("alone")
        others = [SequenceStep(str(number), tokens, 1) for number in range(3)]
        assert sum(len(step.token_ids) for step in others) * 384 * 2 > SUM_BYTES_MAX
        *_, beside = engine.forward([*others, SequenceStep("beside", tokens, 35)])
        assert torch.equal(alone, beside)
