"""Deterministic engines through the services, in bfloat16, with fused kernels and on OpenVINO: a
request's tokens are those that it gets alone and without a draft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.models.loading import load_model
from outrider.models.module_replacement import speed_up
from outrider.models.sources import resolve_model
from tests.support.models import tiny_config, tiny_module
from tests.support.paged_engines import openvino_kernels, pace_kernels
from tests.support.same_tokens import check_tokens
from tests.support.stack import running_stack

NUM_SESSIONS = 8
VOCAB = 32
MAX_MODEL_LEN = 256


def engine_of(module: Any, info: ModelInfo) -> PagedEngine:
    speed_up(module)
    return PagedEngine(module, info, max_num_seqs=NUM_SESSIONS, deterministic=True)


def fused_engine_of(module: Any, info: ModelInfo) -> PagedEngine:
    kernels = pace_kernels()
    speed_up(module, kernels=kernels)
    engine = PagedEngine(module, info, max_num_seqs=NUM_SESSIONS, kernels=kernels)
    assert engine.kernels_name == kernels.name
    return engine


def tiny_engine(family: str, seed: int) -> PagedEngine:
    module = tiny_module(tiny_config(family, VOCAB, MAX_MODEL_LEN), seed, torch.bfloat16)
    return engine_of(module, ModelInfo("tiny", VOCAB, MAX_MODEL_LEN, "bfloat16", (), "", ""))


def openvino_engine(family: str, seed: int) -> PagedEngine:
    kernels = openvino_kernels()
    module = tiny_module(tiny_config(family, VOCAB, MAX_MODEL_LEN), seed, torch.float32)
    speed_up(module, packs_linears=False)
    info = ModelInfo("tiny", VOCAB, MAX_MODEL_LEN, "float32", (), "", "")
    engine = PagedEngine(
        module, info, max_num_seqs=NUM_SESSIONS, deterministic=True, kernels=kernels
    )
    assert engine.kernels_name == kernels.name
    return engine


@pytest.mark.parametrize(
    ("family", "make"),
    [("llama", tiny_engine), ("gpt_neox", tiny_engine), ("gemma3", openvino_engine)],
)
async def test_tokens_depend_on_neither_k_nor_the_batch(
    family: str, make: Callable[[str, int], PagedEngine], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    prompts = [tuple(range(1, 30)) + tuple(range(1, 3 + 2 * i)) for i in range(NUM_SESSIONS)]
    async with running_stack(make(family, 1), make(family, 2), tmp_path) as stack:
        await check_tokens(stack, prompts, num_tokens=24, num_alone=2)


@pytest.mark.real_model
@pytest.mark.xdist_group("identity")
@pytest.mark.parametrize("num_threads", [pytest.param(1, marks=pytest.mark.full), 2])
def test_rows_of_fused_steps_are_bit_equal(num_threads: int) -> None:
    """The demo target computes logits at the end of 1,180 tokens: token by token, in chunks, beside
    other sequences, after a shared prefix, and before and after rejected draft tokens."""
    torch.set_num_threads(num_threads)
    engine = fused_engine_of(*load_model(resolve_model("demo"), name="demo", dtype="bfloat16"))
    assert engine.info.numerics
    context = tuple((7919 * i + 1) % 40_000 for i in range(1_180))
    begun, rest = context[:1_168], context[1_168:]
    engine.forward([SequenceStep("alone", begun, 1)])
    alone = torch.cat([engine.forward([SequenceStep("alone", (i,), 1)])[0] for i in rest])
    for name, size in (("pairs", 2), ("chunk", 12)):
        for start in range(0, len(begun), 400 + size):
            engine.forward([SequenceStep(name, begun[start : start + 400 + size], 0)])
        others = [SequenceStep(f"beside {name} {i}", context[: 9 * i + 1], 1) for i in range(4)]
        rows = []
        for start in range(0, len(rest), size):
            own = SequenceStep(name, rest[start : start + size], min(size, len(rest) - start))
            rows.append(engine.forward([*others, own])[-1])
            for other in others:
                engine.release(other.sequence_id)
        assert torch.equal(torch.cat(rows), alone), name
    assert engine.attach("shared", context) > 1_100
    held = engine.length("shared")
    [found] = engine.forward([SequenceStep("shared", context[held:], len(context) - held)])
    assert torch.equal(found, alone[held - len(begun) :])
    engine.keep("shared", len(begun))
    [found] = engine.forward([SequenceStep("shared", (*rest[:3], 5, 6, 7), 6)])
    assert torch.equal(found[:3], alone[:3])
    engine.keep("shared", len(begun) + 3)
    [found] = engine.forward([SequenceStep("shared", rest[3:], len(rest) - 3)])
    assert torch.equal(found, alone[3:])
