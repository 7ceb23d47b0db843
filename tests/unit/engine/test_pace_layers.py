"""All layers in one call of TorchScript are what they are in Python, bit for bit."""

import pytest
import torch
from models import tiny_config, tiny_module
from paged_engines import pace_kernels

from outrider.engine.attention import find_layers
from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.cpu.decoder import FusedDecoder
from outrider.engine.cpu.fused_steps import SPAN_TOKENS_MAX, FusedSteps
from outrider.engine.interface import SequenceStep
from outrider.kv_cache.storage import BlockedKeysAndValues, KVCache
from outrider.models.module_replacement import speed_up

VOCAB = 64
NUM_PAGES = 8
PAGE = 16
MAX_MODEL_LEN = NUM_PAGES * PAGE


def decoder_of(family: str) -> tuple[FusedDecoder, list[BlockedKeysAndValues]]:
    config = tiny_config(
        family, VOCAB, MAX_MODEL_LEN, hidden_size=128, intermediate_size=128,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    kernels, module = pace_kernels(), tiny_module(config, dtype=torch.bfloat16)
    speed_up(module, kernels=kernels)
    layers = find_layers(module, MAX_MODEL_LEN)
    caches = KVCache([layer.shape for layer in layers], NUM_PAGES, PAGE, is_blocked=True).layers
    return FusedDecoder(module, layers, MAX_MODEL_LEN, kernels), caches


@torch.inference_mode()
def outputs(steps: FusedSteps) -> list[torch.Tensor]:
    """Outputs of steps of one and of two sequences, most of them of different lengths, some of them
    longer than a span."""
    first, second = [3, 1, 5], [0, 4, 2]
    ids = [int(number) for number in torch.arange(60) * 7 % VOCAB]
    run = [
        [held("a", ids[:20], 0, first), held("b", ids[20:50], 0, second)],
        [held("a", ids[:5], 20, first)],
        [held("a", ids[:1], 25, first), held("b", ids[7:8], 30, second)],
        [held("a", ids[:3], 26, first), held("b", ids[9 : 10 + SPAN_TOKENS_MAX], 31, second)],
    ]
    return [steps.run(HeldStep(sequences, PAGE)) for sequences in run]


def held(name: str, ids: list[int], length: int, pages: list[int]) -> HeldSequence:
    return HeldSequence(SequenceStep(name, tuple(ids), len(ids)), length, pages)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_one_call_is_what_operators_make_one_by_one(family: str) -> None:
    """Layers have windows, a bias, norms of queries and keys, or four norms."""
    decoder, caches = decoder_of(family)
    steps = FusedSteps(decoder, caches)
    at_once = outputs(steps)
    written = [torch.cat([cache.keys, cache.values]) for cache in caches]
    assert [row.isfinite().all() for row in at_once] == [True] * 4
    for cache in caches:
        cache.keys.zero_()
        cache.values.zero_()
    steps._layers = decoder.layers
    for mine, theirs in zip(at_once, outputs(steps), strict=True):
        assert torch.equal(mine, theirs)
    for cache, before in zip(caches, written, strict=True):
        assert torch.equal(torch.cat([cache.keys, cache.values]), before)
