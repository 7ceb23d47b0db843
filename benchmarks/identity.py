"""`outrider bench identity`: checks that answers are the same with drafts as without.

Each prompt is decoded without drafts, then with each K alone, and then with each K beside other
requests. Then a long text is put before each prompt, and this longer prompt is decoded without
drafts, and with each K alone. If `outrider status` shows `bit-equal rows`, answers with and without
drafts must be equal under the rules greedy and coupled.

The check fails if any token differs, or if no draft token was accepted. Run it on a deployment with
`--no-length-control --draft-model demo-drafter`, so that a model drafts K tokens in each round.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.settings import checked
from outrider.speculation.sampling_params import Rule

from .measurement import BenchClient, Completion, Decoding, Progress
from .options import DraftTokens, MaxTokens, PromptOptions
from .prompts import BenchPrompt
from .report import Report, table
from .speedup import Subject

WAYS = {"alone": 1, "beside": 8, "context": 1}
"""Ways to decode prompts with drafts, and the number of requests at a time."""
CONTEXT = 214 * ("The lighthouse keeper wrote down the wind, the tide and the ships that passed. ")
"""The long text, of about 4,000 tokens."""


@checked()
class IdentityOptions(PromptOptions):
    max_tokens: MaxTokens = 128
    num_draft_tokens: tuple[DraftTokens, ...] = (1, 4, 8)
    """Values of K to compare with plain decoding."""


async def run(options: IdentityOptions, subject: Subject, progress: Progress) -> Report:
    """Reports a row for each rule, entry of `WAYS`, and K."""
    rows: list[dict[str, Any]] = []
    for rule in (Rule.GREEDY, Rule.COUPLED):
        decoding = Decoding(options.max_tokens, 0.0 if rule is Rule.GREEDY else 1.0, rule, 0, 0)
        expected: dict[str, list[Completion]] = {}
        for way, at_once in WAYS.items():
            context = CONTEXT + "\n\n" if way == "context" else ""
            prompts = [BenchPrompt(context + one.text, way) for one in options.load_prompts()]
            if context not in expected:
                expected[context] = await _answers(subject.client, prompts, decoding, 1)
            for number in options.num_draft_tokens:
                progress(f"{rule}, {way}, K = {number}")
                drafted = replace(decoding, num_draft_tokens=number)
                got = await _answers(subject.client, prompts, drafted, at_once)
                pairs = enumerate(zip(expected[context], got, strict=True))
                rows.append({
                    "rule": rule.value,
                    "way": way,
                    "num_draft_tokens": number,
                    "num_prompts": len(got),
                    "num_accepted_draft_tokens": sum(one.num_accepted_draft_tokens for one in got),
                    "different": [i for i, (a, b) in pairs if a.token_ids != b.token_ids],
                })  # fmt: skip
    failed = [row for row in rows if row["different"] or not row["num_accepted_draft_tokens"]]
    values = {"failed": len(failed), "ways": rows}
    return Report(
        values, [table("different: indices, from 0, of prompts whose answers differ", rows)]
    )


async def _answers(
    client: BenchClient, prompts: Sequence[BenchPrompt], decoding: Decoding, at_once: int
) -> list[Completion]:
    jobs = [(prompt, decoding.for_prompt(index)) for index, prompt in enumerate(prompts)]
    return await client.generate_all(jobs, at_once)
