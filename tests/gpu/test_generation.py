"""Whole generations with target and draft on a CUDA device, through the three services. They are
compared with the library's own generation."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from outrider.engine.cuda.table_steps import find_backend
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo
from outrider.interfaces.request import GenerateRequest
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.models import tiny_module, twin
from tests.support.stack import running_stack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
VOCAB = 1_000
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_p=0.9)
KEYS = 2**26
"""Bytes of pages of each engine."""


@pytest.fixture(scope="module")
def modules() -> tuple[Any, Any]:
    """A target, and a draft that mostly agrees with it: the target's weights with some noise."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=1_024,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    target, draft = (tiny_module(config).to("cuda") for _ in range(2))
    for module in (target, draft):
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.15)
        module.get_output_embeddings().weight.mul_(10)
    generator = torch.Generator("cuda").manual_seed(5)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device="cuda")
        parameter.add_(noise * parameter.std() * 0.05 if parameter.dim() > 1 else 0)
    return target, draft


def engine_of(module: Any) -> PagedEngine:
    info = ModelInfo("tiny", VOCAB, 1_024, "float32", (), "", "")
    backend = find_backend(torch.device("cuda"), torch.float32)
    engine = PagedEngine(
        twin(module), info, max_num_seqs=64, kv_cache_memory_bytes=KEYS, backend=backend
    )
    assert engine._backend is backend
    return engine


def prompt(seed: int, length: int = 40) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def continued(module: Any, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The library's text: its likeliest token at each step."""
    ids = torch.tensor([token_ids], device="cuda")
    found = module.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, use_cache=True)
    return tuple(found[0, len(token_ids) :].tolist())


def asked(seed: int, sampling: SamplingParams, rule: Rule, num_draft: int) -> GenerateRequest:
    return GenerateRequest(
        prompt(seed),
        sampling=sampling,
        rule=rule,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        seed=seed,
        num_draft_tokens=num_draft,
    )


async def test_texts_are_those_of_the_library(modules: tuple[Any, Any], tmp_path: Path) -> None:
    """Eight sessions at once have greedy texts, with drafts. Sampled texts under `coupled` are the
    same with drafts as without."""
    library = twin(modules[0])
    target, draft = (engine_of(module) for module in modules)
    async with running_stack(target, draft, tmp_path / "redis") as stack:

        async def texts(sampling: SamplingParams, rule: Rule, num_draft: int) -> list[Any]:
            requests = [asked(seed, sampling, rule, num_draft) for seed in range(8)]
            answers = await asyncio.gather(*map(stack.client.complete, requests))
            print(sampling, rule, num_draft, answers[0].usage)
            return [answer.token_ids for answer in answers]

        greedy = await texts(GREEDY, Rule.GREEDY, 4)
        expected = [continued(library, prompt(seed)) for seed in range(8)]
        assert [*map(tuple, greedy)] == expected
        drafted = await texts(WARM, Rule.COUPLED, 4)
        assert drafted == await texts(WARM, Rule.COUPLED, 0)
        await texts(WARM, Rule.TOKEN, 4)
        await texts(WARM, Rule.BLOCK, 4)
