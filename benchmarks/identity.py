"""`python -m benchmarks.identity`: whether answers are the same with drafts as without.

Every prompt is answered plainly and alone, and then with every K: alone, beside others, and behind
a long context. All answers but the first find their prompt in the prefix cache. Greedy and coupled
tokens must be equal where `outrider status` says `bit-equal rows`. Exit code 1 where any differ, or
where no draft token was accepted. Start the deployment with `--no-length-control --draft-model
demo-drafter`, so that a model drafts K tokens in each round.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import click

from outrider.client import Client
from outrider.errors import OutriderError
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.speculation.sampling_params import Rule

from .clients import GrpcClient
from .measurement import BenchClient, Completion, Decoding
from .options import PromptOptions, option
from .prompts import BenchPrompt

WAYS: Final = {"alone": 1, "beside": 8, "context": 1}
"""Requests at a time."""
CONTEXT: Final = 214 * (
    "The lighthouse keeper wrote down the wind, the tide and the ships that passed. "
)
"""Some 4,000 tokens."""


@dataclass(frozen=True, kw_only=True)
class IdentityOptions(PromptOptions):
    """What is asked for."""

    max_tokens: int = 128
    server: str = option("127.0.0.1:50051", "coordinator", metavar="HOST:PORT")
    num_draft_tokens: tuple[int, ...] = option(
        (1, 4, 8), "each K that is compared with plain decoding", low=1, high=NUM_DRAFT_TOKENS_MAX,
        metavar="K[,K..]",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WayReport:
    """How many answers of one way were those of plain decoding alone."""

    way: str
    rule: Rule
    num_draft_tokens: int
    num_prompts: int
    num_accepted_draft_tokens: int
    different: tuple[int, ...]
    """Prompts, from 0 on."""

    @property
    def passes(self) -> bool:
        """Whether all answers are the same, and drafts were accepted."""
        return not self.different and self.num_accepted_draft_tokens > 0


async def compare(client: BenchClient, options: IdentityOptions) -> list[WayReport]:
    """A report for each rule, way and K. Raises what the deployment refuses a request with."""
    found: list[WayReport] = []
    for rule in (Rule.GREEDY, Rule.COUPLED):
        decoding = Decoding(options.max_tokens, 0.0 if rule is Rule.GREEDY else 1.0, rule, 0, 0)
        expected: dict[str, list[Completion]] = {}
        for way, at_once in WAYS.items():
            context = CONTEXT + "\n\n" if way == "context" else ""
            prompts = [BenchPrompt(context + one.text, way) for one in options.load_prompts()]
            if context not in expected:
                expected[context] = await _answers(client, prompts, decoding, 1)
            for number in options.num_draft_tokens:
                drafted = replace(decoding, num_draft_tokens=number)
                got = await _answers(client, prompts, drafted, at_once)
                pairs = enumerate(zip(expected[context], got, strict=True))
                different = tuple(i for i, (a, b) in pairs if a.token_ids != b.token_ids)
                accepted = sum(answer.num_accepted_draft_tokens for answer in got)
                report = WayReport(way, rule, number, len(got), accepted, different)
                found.append(report)
                click.echo(json.dumps(asdict(report)), err=True)
    return found


async def _answers(
    client: BenchClient, prompts: Sequence[BenchPrompt], decoding: Decoding, at_once: int
) -> list[Completion]:
    jobs = [(prompt, decoding.for_prompt(index)) for index, prompt in enumerate(prompts)]
    return await client.generate_all(jobs, at_once)


def _main(**values: Any) -> None:
    """Prints one JSON array, or in one line what is wrong."""

    async def run(options: IdentityOptions) -> list[WayReport]:
        async with Client(options.server) as client:
            return await compare(GrpcClient(client, raw=options.raw), options)

    try:
        reports = asyncio.run(run(IdentityOptions(**values)))
    except OutriderError as error:
        raise click.UsageError(str(error)) from error
    click.echo(json.dumps([asdict(report) for report in reports]))
    raise SystemExit(0 if all(report.passes for report in reports) else 1)


main: Final = click.Command(
    "python -m benchmarks.identity", help=__doc__, callback=_main,
    params=[*IdentityOptions.params(click.Option)],
)  # fmt: skip

if __name__ == "__main__":
    main()
