"""Large trees, rounds that are looked ahead of, and bursts, through all services and gRPC."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from stack import running_stack
from toy_engine import ToyEngine

from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.errors import OutriderError
from outrider.limits import TREE_TOKENS_MAX
from outrider.request import GenerateRequest, RoundReport, Tokens
from outrider.speculation.sampling_params import Rule, SamplingParams

pytestmark = pytest.mark.xdist_group("redis")


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY])
async def test_large_trees_write_what_plain_decoding_does(rule: Rule, tmp_path: Path) -> None:
    """With more tokens than any chain has: the same tokens and log-probabilities, siblings accepted
    among them, and reports that say who followed whom."""
    sampling = SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0)
    target, draft = ToyEngine(salt=1, max_model_len=64), ToyEngine(salt=2, max_model_len=64)
    largest = beside = 0
    async with running_stack(target, draft, tmp_path, draft_siblings=8) as stack:
        for seed in range(4):
            request = GenerateRequest(
                prompt=(1, 2, 3), sampling=sampling, rule=rule, seed=seed, max_tokens=40,
                logprobs=1, num_draft_tokens=4, include_rounds=True,
            )  # fmt: skip
            expected = await stack.client.complete(replace(request, num_draft_tokens=0))
            tokens: list[int] = []
            logprobs: list[object] = []
            async for event in stack.client.generate(request):
                if isinstance(event, RoundReport):
                    largest = max(largest, len(event.proposed_token_ids))
                    parents = event.proposed_parents
                    assert len(parents) in (0, len(event.proposed_token_ids))
                    roots = [
                        token_id
                        for token_id, parent in zip(event.proposed_token_ids, parents, strict=False)
                        if parent == -1
                    ]
                    known = len(tokens)
                    if event.num_accepted and roots and known < 39:
                        beside += expected.token_ids[known] in roots[1:]
                tokens += getattr(event, "token_ids", ())
                logprobs += getattr(event, "logprobs", ())
            assert tuple(tokens) == tuple(expected.token_ids)
            assert logprobs == list(expected.logprobs)
    assert 16 < largest <= TREE_TOKENS_MAX
    assert beside > 0


SPEC = EmulatedSpec(
    vocab_size=400, support=16, deviation=0.3, verify_ms=40.0, verify_tokens=64, draft_ms=0.5
)
"""A verdict takes as long as dozens of passes of the draft: pushes come in time on any machine."""


NUM_TOKENS = 96


K = 4


async def decoded(rule: Rule, look_ahead: int, directory: Path) -> tuple[list[int], list[bool]]:
    """The tokens, and of each round that could be looked ahead of whether it was a hit."""
    request = GenerateRequest(
        (1, 2, 3),
        sampling=SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0),
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        seed=5,
        rule=rule,
        num_draft_tokens=K,
        include_rounds=True,
    )
    engines = EmulatedEngine(SPEC, "target"), EmulatedEngine(SPEC, "draft")
    tokens: list[int] = []
    hits: list[bool] = []
    async with running_stack(*engines, directory, look_ahead=look_ahead) as stack:
        async for event in stack.client.generate(request):
            if isinstance(event, Tokens):
                tokens += event.token_ids
            elif isinstance(event, RoundReport) and event.index > 0:
                hits.append(event.look_ahead_hit)
    return tokens, hits


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY, Rule.TOKEN])
async def test_most_rounds_are_there_before_they_begin(rule: Rule, tmp_path: Path) -> None:
    """Of 16 outcomes that a draft works out of each round; under coupled and greedy without a
    say in the tokens. With no look-ahead there are no hits."""
    tokens, hits = await decoded(rule, 16, tmp_path / "ahead")
    assert len(tokens) == NUM_TOKENS
    assert sum(hits) > 0.7 * len(hits)
    if rule.absolute_noise:
        as_ever, none = await decoded(rule, 0, tmp_path / "plain")
        assert tokens == as_ever
        assert not any(none)


NUM_REQUESTS = 1_400


QUICK = EmulatedSpec(vocab_size=16, support=8, verify_ms=1.0, draft_ms=0.1)


async def test_a_burst_of_requests_is_served_whole(tmp_path: Path) -> None:
    """Slower, but nobody is turned away."""

    async def outcome(number: int) -> str:
        request = GenerateRequest((1, 2, 3), max_tokens=2, seed=number, num_draft_tokens=0)
        try:
            return f"{len((await stack.client.complete(request)).token_ids)} tokens"
        except OutriderError as error:
            return f"{type(error).__name__}: {error}"

    engines = EmulatedEngine(QUICK, "target"), EmulatedEngine(QUICK, "draft")
    async with running_stack(*engines, tmp_path, max_sessions=NUM_REQUESTS) as stack:
        outcomes = await asyncio.gather(*(outcome(number) for number in range(NUM_REQUESTS)))
    assert Counter(outcomes) == {"2 tokens": NUM_REQUESTS}
