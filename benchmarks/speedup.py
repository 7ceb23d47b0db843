"""`outrider bench speedup`: what drafting gains over plain decoding through the same services."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.client import Client
from outrider.errors import SettingError, Unavailable
from outrider.generation import ChatMessage, GenerateRequest, Prompt
from outrider.limits import (
    DEADLINE_MS_MAX,
    MAX_TOKENS_DEFAULT,
    NUM_DRAFT_TOKENS_MAX,
    SEED_MAX,
    SESSIONS_PER_COORDINATOR_MAX,
    TEMPERATURE_MAX,
)
from outrider.sessions.store import FinishReason
from outrider.settings import check_range
from outrider.speculation.sampling import Rule, SamplingParams, resolve_rule

from .measurement import BenchClient, Completion, Contestant, Decoding, Progress, Side, measure
from .prompts import PROMPTS_MAX, BenchPrompt, built_in_prompts, read_prompts, select_prompts
from .references import ReferenceModel, ReferenceProcess
from .report import Setup, SpeedupReport, summarise

RULES: Final = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
"""Rules of a temperature above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupOptions:
    """What `bench speedup` is asked for. Wrong values raise `SettingError`."""

    prompts: Path | None = None
    """JSONL file of `prompt` and, if wanted, `category`; None = the built-in prompts."""
    num_prompts: int | None = None
    """Of all categories together; None = all."""
    max_tokens: int = 256
    """Of a completion; an EOS ends it sooner."""
    temperature: float = 0.0
    rule: Rule = Rule.TOKEN
    """Of a temperature above 0."""
    num_draft_tokens: int | None = None
    """Bound K; None = the deployment's own."""
    concurrency: int = 1
    """Requests at a time."""
    seed: int = 0
    """Of the first prompt; each one after it has the next."""
    raw: bool = False
    """Whether prompts go in as they are, without the model's chat template."""
    reference: bool = True
    """Whether the engine alone and the library's `generate` are measured too."""

    def __post_init__(self) -> None:
        check_range("num_prompts", self.num_prompts, 1, PROMPTS_MAX)
        check_range("max_tokens", self.max_tokens, 1, MAX_TOKENS_DEFAULT)
        check_range("temperature", self.temperature, 0, TEMPERATURE_MAX)
        check_range("num_draft_tokens", self.num_draft_tokens, 1, NUM_DRAFT_TOKENS_MAX)
        check_range("concurrency", self.concurrency, 1, SESSIONS_PER_COORDINATOR_MAX)
        check_range("seed", self.seed, 0, SEED_MAX)
        if self.rule not in RULES:
            allowed = ", ".join(rule.value for rule in RULES)
            raise SettingError("rule", f"{self.rule.value!r} is wrong; it must be one of {allowed}")

    @classmethod
    def from_arguments(
        cls, arguments: argparse.Namespace, *, num_draft_tokens: int | None = None
    ) -> SpeedupOptions:
        """From what a parser with `add_arguments` returned. `num_draft_tokens` is not among those:
        it is a setting of the deployment as well, whose flag the caller has."""
        return cls(
            prompts=arguments.prompts,
            num_prompts=arguments.num_prompts,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            rule=Rule(arguments.rule),
            num_draft_tokens=num_draft_tokens,
            concurrency=arguments.concurrency,
            raw=arguments.raw,
            reference=not arguments.no_reference,
        )

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to measure with. Raises `SettingError` for a file that is wrong."""
        prompts = built_in_prompts() if self.prompts is None else read_prompts(self.prompts)
        return prompts if self.num_prompts is None else select_prompts(prompts, self.num_prompts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench speedup`, but for those that describe a deployment."""
    defaults = SpeedupOptions()
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="JSONL of `prompt` and, if wanted, `category` [48 built-in prompts]",
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", type=int, metavar="N",
        help="take the first N/categories of each category, one at least [all]",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=defaults.max_tokens, metavar="N",
        help="tokens of a completion [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=defaults.temperature, metavar="T",
        help="0 = always the likeliest token [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--rule", choices=[rule.value for rule in RULES], default=defaults.rule.value,
        help="how drafts are accepted at a temperature above 0 [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, default=defaults.concurrency, metavar="N",
        help="requests at a time; above 1 the speed-up is the ratio of totals "
        "[%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )  # fmt: skip
    parser.add_argument(
        "--no-reference", action="store_true",
        help="do not measure the engine alone and transformers generate beside it",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The deployment that is measured."""

    client: BenchClient
    """Calls its coordinator."""
    model: str
    draft_model: str
    dtype: str
    num_draft_tokens: int
    """What it drafts where a request does not say."""
    reference: ReferenceModel | None
    """The target's files; None where there are none to run without services."""


class ServiceClient:
    """A coordinator as the measurement calls it."""

    def __init__(self, client: Client, *, raw: bool) -> None:
        self._client = client
        self._raw = raw

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """One request, from sending it to its final event. Raises what the coordinator refuses it
        with, and `Unavailable` where it was cut short: its time would mean nothing."""
        request = GenerateRequest(
            prompt=_service_prompt(prompt, self._raw),
            sampling=SamplingParams(temperature=decoding.temperature),
            max_tokens=decoding.max_tokens,
            seed=decoding.seed,
            rule=decoding.rule,
            num_draft_tokens=decoding.num_draft_tokens,
            deadline_ms=DEADLINE_MS_MAX,
        )
        started_s = time.perf_counter()
        found = await self._client.complete(request)
        seconds = time.perf_counter() - started_s
        if found.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise Unavailable(f"a measured request ended early: {found.finish_reason.value}")
        return Completion(
            token_ids=found.token_ids,
            started_s=started_s,
            seconds=seconds,
            num_rounds=found.metrics.num_rounds,
            num_draft_tokens=found.metrics.num_draft_tokens,
            num_accepted_draft_tokens=found.metrics.num_accepted_draft_tokens,
        )


async def run(
    options: SpeedupOptions, subject: Subject, progress: Progress | None = None
) -> SpeedupReport:
    """Measures `subject`. `progress` is told what happens; by default standard error is.
    Raises `SettingError` for prompts that are wrong, and what a side refuses a request with."""
    progress = progress or _to_standard_error
    prompts = options.load_prompts()
    rule = resolve_rule(SamplingParams(temperature=options.temperature), options.rule, seeded=True)
    bound = options.num_draft_tokens or subject.num_draft_tokens
    if bound == 0:
        raise SettingError("num_draft_tokens", "0 is plain decoding; there is nothing to compare")

    def contestant(side: Side, client: BenchClient, num_draft_tokens: int) -> Contestant:
        decoding = Decoding(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            rule=rule,
            seed=options.seed,
            num_draft_tokens=num_draft_tokens,
        )
        services = side in (Side.PLAIN, Side.SPECULATIVE)
        return Contestant(side, client, decoding, options.concurrency if services else 1)

    async with _references(options, subject, progress) as references:
        contestants = [
            contestant(Side.PLAIN, subject.client, 0),
            contestant(Side.SPECULATIVE, subject.client, bound),
            *(contestant(side, client, 0) for side, client in references.items()),
        ]
        results = await measure(prompts, contestants, progress)
    setup = Setup(
        model=subject.model,
        draft_model=subject.draft_model,
        dtype=subject.dtype,
        num_draft_tokens=bound,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        rule=rule.value,
        concurrency=options.concurrency,
    )
    return summarise(setup, prompts, results)


@asynccontextmanager
async def _references(
    options: SpeedupOptions, subject: Subject, progress: Progress
) -> AsyncIterator[dict[Side, BenchClient]]:
    """The sides beside the services, with their models loaded."""
    references: dict[Side, BenchClient] = {}
    async with AsyncExitStack() as stack:
        if options.reference and subject.reference is not None:
            for side in (Side.ENGINE, Side.TRANSFORMERS):
                progress(f"loading the model once more: {side.value}")
                process = ReferenceProcess(side, subject.reference, raw=options.raw)
                references[side] = await stack.enter_async_context(process)
        yield references


def _service_prompt(prompt: BenchPrompt, raw: bool) -> Prompt:
    return prompt.text if raw else (ChatMessage("user", prompt.text),)


def _to_standard_error(line: str) -> None:
    sys.stderr.write(line + "\n")
