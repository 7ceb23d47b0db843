"""Checks that a request's tokens depend neither on drafts nor on other requests."""

import asyncio
from collections.abc import Sequence

from outrider.interfaces.request import GenerateRequest
from outrider.speculation.sampling_params import SamplingParams
from tests.support.stack import Stack

NUM_DRAFT_TOKENS = (0, 3, 8)
Prompt = tuple[int, ...]


def request(
    prompt: Prompt, seed: int | None, k: int, num_tokens: int, temperature: float = 1.0
) -> GenerateRequest:
    """Coupled is the default of a request with a seed."""
    return GenerateRequest(
        prompt,
        sampling=SamplingParams(temperature=temperature),
        max_tokens=num_tokens,
        seed=seed,
        num_draft_tokens=k,
    )


async def complete(stack: Stack, wanted: GenerateRequest) -> tuple[int, ...]:
    return (await stack.client.complete(wanted)).token_ids


async def check_tokens(
    stack: Stack,
    prompts: Sequence[Prompt],
    num_tokens: int,
    num_alone: int,
    temperature: float = 1.0,
) -> None:
    """Runs K = 0 alone for every prompt, the other K alone for some prompts, then all at once."""
    expected = []

    async def text(seed: int, k: int) -> tuple[int, ...]:
        return await complete(stack, request(prompts[seed], seed, k, num_tokens, temperature))

    for seed in range(len(prompts)):
        expected.append(await text(seed, 0))
        assert 1 <= len(expected[-1]) <= num_tokens
        for k in NUM_DRAFT_TOKENS[1:] if seed < num_alone else ():
            assert await text(seed, k) == expected[-1]
    for first in range(len(NUM_DRAFT_TOKENS)):
        ks = [NUM_DRAFT_TOKENS[(first + seed) % 3] for seed in range(len(prompts))]
        assert await asyncio.gather(*[text(seed, k) for seed, k in enumerate(ks)]) == expected
