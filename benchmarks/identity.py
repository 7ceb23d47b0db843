"""`python -m benchmarks.identity`: whether answers are the same with drafts as without.

Every prompt is answered plainly and alone, and then with every K: alone, beside others, and behind
a long context. All answers but the first find their prompt in the prefix cache. Greedy and coupled
tokens must be equal where `outrider status` says `bit-equal rows`. Exit code 1 where any differ, or
where no draft token was accepted. Start the deployment with `--no-length-control --draft-model
demo-drafter`, so that a model drafts K tokens in each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from outrider.client import Client, GenerateRequest, SamplingParams
from outrider.errors import OutriderError
from outrider.limits import NUM_DRAFT_TOKENS_MAX, SESSIONS_PER_COORDINATOR_MAX
from outrider.request import ChatMessage, Prompt
from outrider.settings import check_range
from outrider.speculation.sampling_params import Rule

from .number_options import whole_numbers
from .prompts import BenchPrompt, built_in_prompts, read_prompts

_CONTEXT: Final = "The lighthouse keeper wrote down the wind, the tide and the ships that passed. "
WAYS: Final = ("alone", "beside", "context")


@dataclass(frozen=True, slots=True)
class WayReport:
    """How many answers of one way were those of plain decoding alone."""

    way: str
    rule: str
    num_draft_tokens: int
    num_prompts: int
    num_same: int
    num_accepted_draft_tokens: int
    different: tuple[int, ...]
    """Prompts, from 0 on."""


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: tuple[int, ...]
    num_accepted: int


class Identity:
    """Asks one deployment."""

    def __init__(
        self, client: Client, prompts: Sequence[BenchPrompt], max_tokens: int, context_words: int
    ) -> None:
        """A context has about so many words."""
        self._client = client
        self._texts = [prompt.text for prompt in prompts]
        self._max_tokens = max_tokens
        self._context = _CONTEXT * (context_words // len(_CONTEXT.split()))

    async def reports(
        self,
        ways: Sequence[str],
        rules: Sequence[Rule],
        draft_tokens: Sequence[int],
        at_once: int,
    ) -> list[WayReport]:
        """One for each rule, way and K; `at_once` prompts share the steps of `beside`."""
        found: list[WayReport] = []
        for rule in rules:
            plain: dict[bool, list[_Answer]] = {}
            for way in ways:
                has_context = way == "context"
                if has_context not in plain:
                    plain[has_context] = await self._answers(rule, 0, 1, has_context=has_context)
                expected = plain[has_context]
                for num in draft_tokens:
                    number = at_once if way == "beside" else 1
                    got = await self._answers(rule, num, number, has_context=has_context)
                    found.append(_report(way, rule, num, expected, got))
                    sys.stderr.write(json.dumps(asdict(found[-1])) + "\n")
        return found

    async def _answers(
        self, rule: Rule, num_draft_tokens: int, at_once: int, *, has_context: bool
    ) -> list[_Answer]:
        gate = asyncio.Semaphore(at_once)

        async def one(index: int, prompt: Prompt) -> _Answer:
            greedy = rule is Rule.GREEDY
            request = GenerateRequest(
                prompt,
                sampling=SamplingParams(temperature=0.0 if greedy else 1.0),
                max_tokens=self._max_tokens,
                seed=None if greedy else index,
                rule=rule,
                num_draft_tokens=num_draft_tokens,
            )
            async with gate:
                answer = await self._client.complete(request)
            return _Answer(answer.token_ids, answer.metrics.num_accepted_draft_tokens)

        asked = (one(i, prompt) for i, prompt in enumerate(self._prompts(has_context=has_context)))
        return list(await asyncio.gather(*asked))

    def _prompts(self, *, has_context: bool) -> Iterator[Prompt]:
        for text in self._texts:
            whole = f"{self._context}\n\n{text}" if has_context else text
            yield (ChatMessage("user", whole),)


def _report(
    way: str, rule: Rule, num: int, expected: Sequence[_Answer], got: Sequence[_Answer]
) -> WayReport:
    pairs = zip(expected, got, strict=True)
    different = tuple(i for i, (a, b) in enumerate(pairs) if a.token_ids != b.token_ids)
    return WayReport(
        way=way,
        rule=rule.value,
        num_draft_tokens=num,
        num_prompts=len(got),
        num_same=len(got) - len(different),
        num_accepted_draft_tokens=sum(answer.num_accepted for answer in got),
        different=different,
    )


def passes(reports: Sequence[WayReport]) -> bool:
    """Whether all answers are the same, and drafts were accepted in every way that has any."""
    return all(not report.different and report.num_accepted_draft_tokens > 0 for report in reports)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.identity", description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", help="coordinator [%(default)s]")
    parser.add_argument("--prompts", type=Path, help="JSON lines of `prompt` [built-in]")
    parser.add_argument("--num-prompts", type=int, default=48, help="[%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=128, help="[%(default)s]")
    parser.add_argument(
        "--num-draft-tokens", type=whole_numbers, default=(1, 4, 8), metavar="K[,K..]",
        help="each K that is compared with plain decoding [1,4,8]",
    )  # fmt: skip
    parser.add_argument(
        "--rules", nargs="+", choices=("greedy", "coupled"), default=("greedy", "coupled"),
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--at-once", type=int, default=8, help="of `beside` [%(default)s]")
    parser.add_argument(
        "--context-words", type=int, default=3000, help="of `context` [%(default)s]"
    )
    return parser


async def run(arguments: argparse.Namespace) -> list[WayReport]:
    """Raises what the deployment refuses a request with, and `SettingError`."""
    check_range("at_once", arguments.at_once, 1, SESSIONS_PER_COORDINATOR_MAX)
    for number in arguments.num_draft_tokens:
        check_range("num_draft_tokens", number, 1, NUM_DRAFT_TOKENS_MAX)
    given = arguments.prompts
    prompts = built_in_prompts() if given is None else read_prompts(given)
    async with Client(arguments.server) as client:
        identity = Identity(
            client,
            prompts[: arguments.num_prompts],
            arguments.max_tokens,
            arguments.context_words,
        )
        rules = [Rule(rule) for rule in arguments.rules]
        return await identity.reports(
            arguments.ways, rules, arguments.num_draft_tokens, arguments.at_once
        )


def main() -> int:
    """Prints one JSON array, or in one line what is wrong. Returns the exit code."""
    try:
        reports = asyncio.run(run(_parser().parse_args()))
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps([asdict(report) for report in reports]) + "\n")
    return 0 if passes(reports) else 1


if __name__ == "__main__":
    sys.exit(main())
