"""`outrider bench speedup`: compares decoding with and without drafts through the same services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from outrider.config import TargetConfig
from outrider.request import GenerateRequest
from outrider.settings import checked

from .libraries import ENGINE, TRANSFORMERS, LibraryProcess, TargetInputs
from .measurement import BenchClient, Contestant, Progress, SideResult, measure
from .options import Concurrency, DecodingOptions, Temperature
from .prompts import BenchPrompt
from .report import Report, table

PLAIN = "plain"
SPECULATIVE = "speculative"
REFERENCES = (
    ("the engine alone", "engine_tokens_per_second", ENGINE),
    ("transformers generate", "transformers_generate_tokens_per_second", TRANSFORMERS),
)
PLAIN_SHARE_MIN = 0.9
"""The report warns if plain decoding is slower than this share of a reference's tokens/s."""


@checked()
class SpeedupOptions(DecodingOptions):
    """Options of `bench speedup`."""

    temperature: Temperature = 0.0
    """0 = greedy."""
    concurrency: Concurrency = 1
    """Requests at a time. Above 1, the speed-up is the ratio of the total tokens/s."""
    no_reference: bool = False
    """Do not measure the references, which are the engine alone and `generate` of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The deployment to measure."""

    client: BenchClient
    model: str
    draft_model: str
    dtype: str
    num_draft_tokens: int
    """The default of a request's `num_draft_tokens`."""
    target: TargetConfig | None
    """The references and the systems of `bench peers` load the target's model with this
    configuration. None = the target's files are not on this machine."""

    def setup(self, drafted: GenerateRequest) -> dict[str, Any]:
        """Fields of the JSON report that describe the deployment and the decoding."""
        return {
            "model": self.model, "draft_model": self.draft_model, "dtype": self.dtype,
            "threads": self.target and self.target.num_threads,
            "num_draft_tokens": drafted.num_draft_tokens, "max_tokens": drafted.max_tokens,
        }  # fmt: skip


async def run(options: SpeedupOptions, subject: Subject, progress: Progress) -> Report:
    concurrency, prompts = options.concurrency, options.load_prompts()
    drafted = options.drafted(subject.num_draft_tokens, options.temperature)
    plain = replace(drafted, num_draft_tokens=0)
    contestants = [
        Contestant(PLAIN, subject.client, plain, concurrency),
        Contestant(SPECULATIVE, subject.client, drafted, concurrency),
    ]
    async with AsyncExitStack() as stack:
        if not options.no_reference and subject.target is not None:
            inputs = TargetInputs.load(subject.target, prompts, options)
            for name, _, library in REFERENCES:
                progress(f"loading the model once more: {name}")
                process = LibraryProcess(library, library.bindings[0], inputs)
                client = await stack.enter_async_context(process)
                contestants.append(Contestant(name, client, plain, 1))
        results = await measure(prompts, contestants, progress)
    setup = subject.setup(drafted) | {
        "temperature": options.temperature, "rule": drafted.rule, "concurrency": concurrency,
    }  # fmt: skip
    return report(setup | compared(prompts, results, concurrency > 1))


def compared(
    prompts: Sequence[BenchPrompt], results: Mapping[str, SideResult], several: bool
) -> dict[str, Any]:
    plain, fast = results[PLAIN], results[SPECULATIVE]
    found = _compare(plain, fast, several)
    found["categories"] = {
        name: _compare(_part(plain, prompts, name), _part(fast, prompts, name), several)
        for name in dict.fromkeys(prompt.category for prompt in prompts)
    }
    for name, key, _ in REFERENCES:
        found[key] = results[name].tokens_per_second if name in results else None
    return found


def _part(result: SideResult, prompts: Sequence[BenchPrompt], category: str) -> SideResult:
    """A side's completions of one category. `seconds` is the sum of the times of requests, because
    requests of several categories may run at the same time."""
    pairs = zip(prompts, result.completions, strict=True)
    done = tuple(one for prompt, one in pairs if prompt.category == category)
    return SideResult(done, sum(one.seconds for one in done))


def _compare(plain: SideResult, fast: SideResult, several: bool) -> dict[str, Any]:
    """Compares sides that decoded the same prompts. A rate is the number of tokens, divided by the
    wall time including prefill. If `several` requests ran at a time, `speedup` is the ratio of the
    total rates. Otherwise it is the median of the prompts' ratios. `num_identical` counts answers
    with the same tokens on both sides. At temperature 0, two answers should begin to differ only
    where two tokens are almost equally likely."""
    pairs = list(zip(plain.completions, fast.completions, strict=True))
    speedup = fast.tokens_per_second / plain.tokens_per_second
    if not several:
        speedup = median(one.tokens_per_second / slow.tokens_per_second for slow, one in pairs)
    drafted, accepted, num_rounds = (
        sum(getattr(one, name) for one in fast.completions)
        for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_rounds")
    )
    return {
        "num_prompts": len(pairs),
        "speedup": speedup,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speculative_tokens_per_second": fast.tokens_per_second,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_round": fast.num_tokens / num_rounds,
        "num_identical": sum(slow.token_ids == one.token_ids for slow, one in pairs),
    }


def report(values: Mapping[str, Any]) -> Report:
    several = values["concurrency"] > 1
    title = (
        "{model} with {draft_model}, K <= {num_draft_tokens}, {dtype}, temperature {temperature:g},"
        " rule {rule}, {concurrency} at a time".format(**values)
    )
    groups = values["categories"] | {"all": values}
    names = values["categories"][next(iter(groups))]
    rows = [
        {"prompts": group} | {name: found[name] for name in names}
        for group, found in groups.items()
    ]
    shown: list[Any] = [table(title, rows)]
    warnings = []
    for name, key, _ in REFERENCES:
        if values[key] is None:
            continue
        share = values["plain_tokens_per_second"] / values[key]
        line = f"plain decoding runs at {share:.2f}x the speed of {name}"
        shown.append(f"{line} ({values[key]:.1f} tokens/s)")
        if share < PLAIN_SHARE_MIN:
            warnings.append(
                f"warning: {line}; below {PLAIN_SHARE_MIN:.2f}x, the speed-up is exaggerated"
            )
    over = "in total" if several else "in the median over the prompts"
    shown.append(
        f"speculative decoding runs at {values['speedup']:.2f}x the speed of plain decoding, {over}"
    )
    return Report(values, shown, warnings)
