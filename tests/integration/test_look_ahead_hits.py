"""Look-ahead through the whole stack: proposals that are there before their round begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from stack import running_stack

from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.request import GenerateRequest, RoundReport, Tokens
from outrider.speculation.sampling_params import Rule, SamplingParams

pytestmark = pytest.mark.xdist_group("redis")

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
