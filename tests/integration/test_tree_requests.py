"""Requests whose proposals are large trees, through the three services, gRPC and Redis."""

from __future__ import annotations

from pathlib import Path

import pytest
from stack import running_stack
from toy_engine import ToyEngine

from outrider.limits import TREE_TOKENS_MAX
from outrider.request import GenerateRequest, RoundReport
from outrider.speculation.sampling_params import Rule, SamplingParams


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
            plain = GenerateRequest(
                prompt=(1, 2, 3), sampling=sampling, rule=rule, seed=seed, max_tokens=40,
                logprobs=1, num_draft_tokens=0,
            )  # fmt: skip
            expected = await stack.client.complete(plain)
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
