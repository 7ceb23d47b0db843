"""The audit of completions that are held to a schema: what the grammar forbids is not expected."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from constrained import CONSTRAINTS, EndingEngine, grammars, hf_tokenizer
from stack import running_stack
from test_audited_sessions import Heard, z

from outrider.request import GenerateRequest
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokenizer import TokenizerText

NUM_SESSIONS = 12
REQUEST = GenerateRequest(
    (1, 2, 3), sampling=SamplingParams(temperature=1.0), rule=Rule.TOKEN, max_tokens=60,
    num_draft_tokens=3, constraint=CONSTRAINTS["schema"],
)  # fmt: skip


async def test_constrained_completions_are_within_chance(tmp_path: Path) -> None:
    """Beyond 5 once in 1.7 million runs. Under the target's law without the mask most tokens would
    be far more surprising than is expected."""
    heard = Heard()
    async with running_stack(
        EndingEngine(1), EndingEngine(2), tmp_path, grammars=grammars,
        text=TokenizerText(hf_tokenizer(), "toy"), observation=heard, audit_share=1.0,
    ) as stack:  # fmt: skip
        asked = [replace(REQUEST, seed=seed) for seed in range(NUM_SESSIONS)]
        answers = await asyncio.gather(*(stack.client.complete(request) for request in asked))
        async with asyncio.timeout(60):
            while len(heard.outcomes) < NUM_SESSIONS:
                await asyncio.sleep(0.05)
    assert heard.outcomes == ["audited"] * NUM_SESSIONS
    sums = heard.sums["token"]
    assert sums.num_tokens == sum(answer.usage.completion_tokens for answer in answers) > 200
    assert sums.num_impossible == 0
    assert sums.variance > 20
    assert abs(z(sums)) < 5
