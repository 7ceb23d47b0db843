"""Token identity in float32, real target, real services: greedy equals `transformers`' generate;
coupled gives the same tokens whatever drafts, and however far."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import depth_cut, twin
from stack import Stack, running_stack

from outrider.engine.loading import load_model
from outrider.engine.paged_engine import PagedEngine
from outrider.engine.sources import resolve_model
from outrider.generation import GenerateRequest
from outrider.speculation.sampling import SamplingParams
from outrider.text import TokenizerText

pytestmark = pytest.mark.xdist_group("identity")

NEAR_TIE = 1e-3
"""Logit gap of the library's two likeliest tokens under which either may win in float32."""
DRAFT_LAYERS = 4
NUM_DRAFT_TOKENS = (0, 3, 8)

SUBJECTS = (
    "a lighthouse keeper", "prime numbers", "the smell of rain", "a broken bicycle",
    "an honest thief", "how bread rises", "a map of the moon", "the last train home",
    "a stubborn mule", "why leaves fall",
)  # fmt: skip
FORMS = (
    "Write two sentences about {}.",
    "Once upon a time there was {}. There was {}, and",
    "List five words about {}:\n1.",
    "Q: What should one know about {}?\nA:",
    "def describe():\n    '''Tell of {}.'''\n    return",
)
PROMPTS = [form.replace("{}", subject) for subject in SUBJECTS for form in FORMS]


@dataclass
class Real:
    """The demo target in float32, loaded once."""

    directory: Path
    module: Any
    info: Any
    text: TokenizerText


@pytest.fixture(scope="module")
def real() -> Real:
    torch.set_num_threads(2)
    directory = resolve_model("demo")
    module, info = load_model(directory, name="demo", dtype="float32")
    return Real(directory, module, info, TokenizerText.load(directory))


def draft_engine(real: Real, directory: Path) -> PagedEngine:
    cut = depth_cut(real.directory, directory / "cut", DRAFT_LAYERS)
    module, info = load_model(cut, name="cut", dtype="float32")
    return PagedEngine(module, info, max_num_seqs=8)


@pytest.fixture
async def with_cut(real: Real, tmp_path: Path) -> AsyncIterator[Stack]:
    target = PagedEngine(twin(real.module), real.info, max_num_seqs=8)
    async with running_stack(target, draft_engine(real, tmp_path), tmp_path) as stack:
        yield stack


@pytest.fixture
async def with_ngram(real: Real, tmp_path: Path) -> AsyncIterator[Stack]:
    target = PagedEngine(twin(real.module), real.info, max_num_seqs=8)
    async with running_stack(target, None, tmp_path) as stack:
        yield stack


async def complete(stack: Stack, prompt: tuple[int, ...], num_tokens: int, k: int) -> list[int]:
    request = GenerateRequest(
        prompt,
        sampling=SamplingParams(temperature=0.0),
        max_tokens=num_tokens,
        num_draft_tokens=k,
    )
    return list((await stack.client.complete(request)).token_ids)


def reference(
    real: Real, prompt: tuple[int, ...], num_tokens: int
) -> tuple[list[int], list[float]]:
    """The library's greedy tokens, and the gap between its two likeliest logits at each."""
    ids = torch.tensor([prompt])
    out = real.module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    gaps = [float(row[0].topk(2).values.diff().abs()) for row in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), gaps


def assert_equal_up_to_ties(got: list[int], expected: list[int], gaps: list[float]) -> None:
    """Equal, or first different where the library itself all but tied."""
    for position, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        if mine != theirs:
            assert gaps[position] < NEAR_TIE, f"token {position}: {mine}, the library {theirs}"
            return
    assert len(got) == len(expected)


async def check_greedy(stack: Stack, real: Real, prompts: list[str], num_tokens: int) -> None:
    for prompt in prompts:
        ids = tuple(real.text.encode(prompt))
        expected, gaps = reference(real, ids, num_tokens)
        for k in NUM_DRAFT_TOKENS:
            assert_equal_up_to_ties(await complete(stack, ids, num_tokens, k), expected, gaps)


@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_greedy_equals_the_library(with_cut: Stack, real: Real) -> None:
    """6 prompts x 32 tokens, K in {0, 3, 8}, a 4-layer cut of the target as draft."""
    await check_greedy(with_cut, real, PROMPTS[:: len(PROMPTS) // 6][:6], 32)


@pytest.mark.full
@pytest.mark.real_model
@pytest.mark.timeout(3600)
async def test_greedy_equals_the_library_on_many_prompts(with_cut: Stack, real: Real) -> None:
    """50 prompts x 64 tokens."""
    await check_greedy(with_cut, real, PROMPTS, 64)


async def coupled(stack: Stack, prompt: tuple[int, ...], seed: int, k: int) -> tuple[int, ...]:
    request = GenerateRequest(
        prompt, sampling=SamplingParams(), max_tokens=32, seed=seed, num_draft_tokens=k
    )
    return (await stack.client.complete(request)).token_ids


@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_coupled_tokens_do_not_depend_on_the_draft(
    with_cut: Stack, real: Real, tmp_path: Path
) -> None:
    """Temperature 1, coupled: the same tokens for K = 0, 3, 8 and for two drafters (n-gram and a
    4-layer cut of the target)."""
    prompts = [tuple(real.text.encode(prompt)) for prompt in PROMPTS[3:7]]
    expected = {
        (prompt, seed): await coupled(with_cut, prompt, seed, 0)
        for seed, prompt in enumerate(prompts)
    }
    for (prompt, seed), tokens in expected.items():
        for k in NUM_DRAFT_TOKENS[1:]:
            assert await coupled(with_cut, prompt, seed, k) == tokens
    target = PagedEngine(twin(real.module), real.info, max_num_seqs=8)
    async with running_stack(target, None, tmp_path / "ngram") as with_ngram:
        for (prompt, seed), tokens in expected.items():
            for k in NUM_DRAFT_TOKENS:
                assert await coupled(with_ngram, prompt, seed, k) == tokens
