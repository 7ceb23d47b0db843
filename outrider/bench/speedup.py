"""`outrider bench speedup`: compares decoding with and without drafts through the same services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from outrider.config.deployment import TargetConfig
from outrider.foundation.settings import checked
from outrider.interfaces.request import GenerateRequest

from .libraries import ENGINE, TRANSFORMERS, LibraryProcess, TargetInputs
from .measurement import BenchClient, Contestant, Progress, SideResult, measure
from .options import Concurrency, DecodingOptions, Temperature
from .prompts import BenchPrompt
from .rates import LEVEL, REPETITIONS_MIN, Work, ratio_of_rates
from .report import Report, table

PLAIN = "plain"
SPECULATIVE = "speculative"
REFERENCES = (
    ("the engine alone", "engine_tokens_per_second", ENGINE),
    ("transformers generate", "transformers_generate_tokens_per_second", TRANSFORMERS),
)
COLUMNS = {
    "num_prompts": "num",
    "speedup": "speed up",
    "speedup_interval": f"{LEVEL:.0%} interval",
    "plain_tokens_per_second": "plain tokens per second",
    "speculative_tokens_per_second": "tokens per second with drafts",
    "acceptance_rate": "share accepted",
    "tokens_per_round": "tokens per round",
    "num_identical": "same answers",
}
"""Key of the JSON object -> its column, short enough for a terminal of 80 columns."""
PLAIN_SHARE_MIN = 0.9
"""The report warns if plain decoding is slower than this share of a reference's tokens/s."""


@checked()
class SpeedupOptions(DecodingOptions):
    """Options of `bench speedup`."""

    temperature: Temperature = 0.0
    """0 = greedy."""
    concurrency: Concurrency = 1
    """Requests at a time. Above 1, a repetition decodes several prompts."""
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
    bit_equal_rows: bool | None = None
    """Whether all targets report bit-equal rows. None = the targets cannot be asked."""
    target: TargetConfig | None
    """The references and the systems of `bench peers` load the target's model with this
    configuration. None = the target's files are not on this machine."""

    def setup(self, drafted: GenerateRequest) -> dict[str, Any]:
        """Fields of the JSON report that describe the deployment and the decoding."""
        return {
            "model": self.model,
            "draft_model": self.draft_model,
            "dtype": self.dtype,
            "bit_equal_rows": self.bit_equal_rows,
            "threads": self.target and self.target.num_threads,
            "num_draft_tokens": drafted.num_draft_tokens,
            "max_tokens": drafted.max_tokens,
        }


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
        "temperature": options.temperature,
        "rule": drafted.rule,
        "concurrency": concurrency,
    }
    return report(setup | compared(prompts, results, drafted.seed is not None))


def compared(
    prompts: Sequence[BenchPrompt], results: Mapping[str, SideResult], is_fixed: bool
) -> dict[str, Any]:
    plain, fast = results[PLAIN], results[SPECULATIVE]
    comparison = _compare(plain, fast, is_fixed)
    has_single_prompts = len(plain.turns) == len(prompts)
    comparison["categories"] = {
        name: _compare(
            _part(plain, prompts, name), _part(fast, prompts, name), is_fixed, has_single_prompts
        )
        for name in dict.fromkeys(prompt.category for prompt in prompts)
    }
    for name, key, _ in REFERENCES:
        comparison[key] = results[name].tokens_per_second if name in results else None
    return comparison


def _part(result: SideResult, prompts: Sequence[BenchPrompt], category: str) -> SideResult:
    """A side's completions of one category. Each one counts as a repetition with the time of its
    request, because requests of several categories may run at the same time. So the times of a
    turn's requests are not independent."""
    pairs = zip(prompts, result.completions, strict=True)
    done = tuple(completion for prompt, completion in pairs if prompt.category == category)
    return SideResult(
        done, tuple(Work(completion.num_tokens, completion.seconds) for completion in done)
    )


def _compare(
    plain: SideResult, fast: SideResult, is_fixed: bool, is_independent: bool = True
) -> dict[str, Any]:
    """Compares sides that decoded the same prompts. A rate is the number of all tokens, divided by
    the seconds of all repetitions including prefill. `speedup` is the ratio of the two rates, and
    `speedup_interval` its interval over the repetitions (`ratio_of_rates`); both are None if
    nothing was drafted. There is no interval if the repetitions are few or not independent.
    `num_identical` counts answers with the same tokens on both sides. It is None unless the tokens
    are fixed by the prompt and the seed, which they are not under the rules token and block."""
    drafted, accepted, num_rounds = (
        sum(getattr(completion, name) for completion in fast.completions)
        for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_rounds")
    )
    speedup, interval = ratio_of_rates(fast.turns, plain.turns) if drafted else (None, None)
    pairs = list(zip(plain.completions, fast.completions, strict=True))
    num_identical = sum(a.token_ids == b.token_ids for a, b in pairs)
    return {
        "num_prompts": len(pairs),
        "repetitions": len(fast.turns),
        "speedup": speedup,
        "speedup_interval": interval if is_independent else None,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speculative_tokens_per_second": fast.tokens_per_second,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_round": fast.num_tokens / num_rounds,
        "num_identical": num_identical if is_fixed else None,
    }


def report(values: Mapping[str, Any]) -> Report:
    title = (
        "{model} with {draft_model}, K <= {num_draft_tokens}, {dtype}, temperature {temperature:g},"
        " rule {rule}, {concurrency} at a time".format(**values)
    )
    groups = values["categories"] | {"all": values}
    rows = [
        {"prompts": group} | {column: figures[key] for key, column in COLUMNS.items()}
        for group, figures in groups.items()
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
    if values["num_identical"] is not None:
        shown.append(_about_identical(values))
    return Report(values, [*shown, headline(values)], warnings)


def _about_identical(values: Mapping[str, Any]) -> str:
    """Says how many answers are identical, and how many should be."""
    count = "{num_identical} of {num_prompts} answers have the same tokens".format(**values)
    if values["bit_equal_rows"]:
        why = "all should, because the target's rows are bit-equal (`outrider status`)"
    elif values["bit_equal_rows"] is None:
        why = "all should if `outrider status` shows bit-equal rows for the target"
    else:
        why = (
            "others may differ where two tokens are almost equally likely, because the target's "
            "rows are not bit-equal (`outrider status`). They are with the kernels of amd-pace "
            "(`outrider collect-env`: cpu_kernels) or with --deterministic"
        )
    return f"{count} with and without drafts; {why}"


def headline(values: Mapping[str, Any]) -> str:
    """One sentence about the speed-up of all prompts."""
    speedup, interval = values["speedup"], values["speedup_interval"]
    if speedup is None:
        return "no drafts were proposed, so both sides decoded plainly"
    ratio = f"speculative decoding runs at {speedup:.2f}x the speed of plain decoding"
    if interval is None:
        return (
            f"{ratio}; too few repetitions for an interval ({values['repetitions']}, at least "
            f"{REPETITIONS_MIN}): give more prompts, with --num-prompts or --prompts"
        )
    low, high = interval
    known = (
        f"{LEVEL:.0%} interval {low:.2f}x to {high:.2f}x over {values['repetitions']} repetitions"
    )
    if low <= 1.0 <= high:
        return f"no measurable difference between speculative and plain decoding ({known})"
    return f"{ratio} ({known})"
