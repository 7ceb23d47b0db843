"""vLLM's tensor parallelism on Outrider's ranks, each in a process of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config.deployment import TargetConfig
from outrider.interfaces.engine import SequenceStep
from outrider.replica.engines import build_engine
from outrider.replica.rank_process import RankLeader, engine_of_a_replica
from tests.support.rank_processes import JOIN_S, follow_model, processes
from tests.support.vllm_models import MAX_MODEL_LEN, leave_groups, save
from tests.support.vllm_pairs import Pair, ids, saved_eagle3, saved_mtp

TOLERANCE = 1e-3


@pytest.mark.parametrize(
    ("family", "size"), [("llama", 2), ("llama", 3), ("gemma3", 2), ("mixtral", 2)]
)
def test_ranks_give_the_logits_of_the_library(family: str, size: int, tmp_path: Path) -> None:
    # vLLM divides vocabularies whose size is a multiple of 64.
    module = save(
        family,
        tmp_path,
        hidden_size=96,
        vocab_size=64 * size,
        num_attention_heads=2 * size,
        num_key_value_heads=2 * size,
    )
    config = TargetConfig(
        engine="vllm",
        enforce_eager=True,
        model="tiny",
        directory=str(tmp_path),
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_num_seqs=4,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=2**24,
        tensor_parallel_size=size,
    )
    ids = tuple(7 * place % 64 for place in range(90))
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([ids])).logits[0]
    leadership = RankLeader(size, True, JOIN_S)
    arguments = [(config, leadership.rendezvous, rank) for rank in range(1, size)]
    with processes(follow_model, arguments):
        engine: Any = engine_of_a_replica(config, 1, leadership)
        try:
            engine.forward([SequenceStep("a", ids[:70], 1)])
            engine.keep("a", 40)
            engine.fork("a", "b")
            steps = [SequenceStep("a", ids[40:45], 5), SequenceStep("b", ids[40:], 50)]
            found = engine.forward(steps)
        finally:
            leave_groups()
            engine.close()
    assert (found[0] - expected[40:45]).abs().max() <= TOLERANCE
    assert (found[1] - expected[40:]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("make", [saved_eagle3, saved_mtp])
def test_a_head_drafts_on_the_leader(make: Callable[[Path], TargetConfig], tmp_path: Path) -> None:
    """The head drafts as on the native engine, once all ranks have read the text of its check."""
    config = replace(make(tmp_path), tensor_parallel_size=2, enforce_eager=True)
    native = replace(config, engine="transformers", tensor_parallel_size=1)
    leadership = RankLeader(2, True, JOIN_S)
    with processes(follow_model, [(config, leadership.rendezvous, 1)]):
        engine: Any = engine_of_a_replica(config, 1, leadership)
        try:
            pair = Pair(engine, build_engine(native, 1))
            pair.forward(SequenceStep("a", ids(70), 2))
            pair.draft("a")
            pair.call("fork", "a", "branch")
            pair.draft("branch", "a")
            pair.forward(SequenceStep("branch", ids(3), 3), SequenceStep("a", ids(2), 2))
            pair.draft("branch", "a")
        finally:
            leave_groups()
            engine.close()
