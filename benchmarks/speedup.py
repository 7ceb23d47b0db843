"""`outrider bench speedup`: what drafting gains over plain decoding through the same services."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from outrider.client import Client
from outrider.errors import SettingError, Unavailable, check
from outrider.limits import DEADLINE_MS_MAX, SESSIONS_PER_COORDINATOR_MAX, TEMPERATURE_MAX
from outrider.request import ChatMessage, GenerateRequest
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import SamplingParams

from .measurement import (
    BenchClient,
    Completion,
    Contestant,
    Decoding,
    Progress,
    Side,
    SideResult,
    measure,
)
from .options import DecodingOptions, option
from .prompts import BenchPrompt
from .references import ReferenceModel, ReferenceProcess
from .report import Report, table

PLAIN_SHARE_MIN: Final = 0.9
"""What plain decoding through the services must reach of each reference's tokens/s: a slow baseline
is not a speed-up."""


@dataclass(frozen=True, kw_only=True)
class SpeedupOptions(DecodingOptions):
    """What `bench speedup` is asked for."""

    temperature: float = option(
        0.0, "0 = always the likeliest token", low=0, high=TEMPERATURE_MAX, metavar="T"
    )
    concurrency: tuple[int, ...] = option(
        (1,), "requests at a time; above 1 the speed-up is the ratio of totals. Of several numbers "
        "each is measured, on a deployment of its own where the command starts them",
        low=1, high=SESSIONS_PER_COORDINATOR_MAX, metavar="N[,N..]",
    )  # fmt: skip
    no_reference: bool = option(
        False, "do not measure the engine alone and transformers generate beside it"
    )

    def __post_init__(self) -> None:
        if not 0 < len(set(self.concurrency)) == len(self.concurrency):
            given = ",".join(map(str, self.concurrency))
            raise SettingError(
                "concurrency", f"{given!r} is wrong; it must be one number, or several that differ"
            )

    def levels(self) -> tuple[SpeedupOptions, ...]:
        """The same for each concurrency alone. References run one request at a time in any case,
        so they are measured once."""
        return tuple(
            replace(self, concurrency=(number,), no_reference=self.no_reference or index > 0)
            for index, number in enumerate(self.concurrency)
        )


class AskedPrompts:
    """The prompts that measurements have asked one deployment, as digests in a file."""

    def __init__(self, path: Path | None, deployment: str) -> None:
        """`deployment` is its name; what the file says of another is forgotten. None = a deployment
        that is new, and ends with the measurement."""
        self._path = path
        self._deployment = deployment
        self._digests: set[str] = set()
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(path.read_text("utf-8")) if path is not None else {}
            if found["deployment"] == deployment:
                self._digests = {str(digest) for digest in found["prompts"]}

    def count(self, prompts: Sequence[BenchPrompt]) -> int:
        """How many of these have been asked."""
        return sum(_digest(prompt) in self._digests for prompt in prompts)

    def add(self, prompts: Sequence[BenchPrompt]) -> None:
        """Notes that these are asked."""
        self._digests |= {_digest(prompt) for prompt in prompts}
        value = {"deployment": self._deployment, "prompts": sorted(self._digests)}
        if self._path is not None:
            with suppress(OSError):  # Then no later measurement is warned of these.
                self._path.write_text(json.dumps(value), encoding="utf-8")


def _digest(prompt: BenchPrompt) -> str:
    return hashlib.blake2b(prompt.text.encode(), digest_size=16).hexdigest()


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
    keeps_answers: bool
    """Whether its drafts may copy from what it answered before, as suffix decoding does."""
    asked: AskedPrompts | None
    """What measurements have asked it before; None where that is not known."""
    http_url: str = ""
    """Where it answers by HTTP; empty where it does not, or that is not known."""
    api_key: str = field(default="", repr=False)

    def replay_warnings(self, prompts: Sequence[BenchPrompt]) -> list[str]:
        """Why its speed may be that of repeating itself, a line each. Notes that it is asked these
        prompts now."""
        if not self.keeps_answers:
            return []
        found = []
        copies = "warning: drafts may copy from earlier answers, and"
        advice = "A deployment that the command starts, where none runs, has nothing to copy"
        if self.asked is None:
            found.append(
                f"{copies} it is not known what this server was asked before: prompts that it was "
                f"asked are not measured as new ones are. {advice}"
            )
        else:
            if num_asked := self.asked.count(prompts):
                found.append(
                    f"{copies} {num_asked} of the prompts were measured on this deployment before: "
                    f"their speed is that of repeating an answer. {advice}"
                )
            self.asked.add(prompts)
        num_again = len(prompts) - len({prompt.text for prompt in prompts})
        if num_again:
            found.append(
                f"{copies} {num_again} of the prompts are there already: their speed is that of "
                "repeating an answer"
            )
        return found


class ServiceClient(BenchClient):
    """A coordinator as the measurement calls it."""

    def __init__(self, client: Client, *, raw: bool) -> None:
        self._client = client
        self._raw = raw

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """One request, from sending it to its final event. Raises what the coordinator refuses it
        with, and `Unavailable` where it was cut short: its time would mean nothing."""
        request = GenerateRequest(
            prompt=prompt.text if self._raw else (ChatMessage("user", prompt.text),),
            sampling=SamplingParams(temperature=decoding.temperature),
            max_tokens=decoding.max_tokens,
            seed=decoding.seed,
            rule=decoding.rule,
            num_draft_tokens=decoding.num_draft_tokens,
            deadline_ms=DEADLINE_MS_MAX,
            constraint=prompt.constraint,
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
            first_token_s=found.metrics.time_to_first_token_ms / 1000,
        )


Level = Mapping[str, Any]
"""The figures at one concurrency, by names in JSON."""


async def run(options: SpeedupOptions, subject: Subject, progress: Progress) -> Level:
    """Measures `subject` at one concurrency. Raises `SettingError` for prompts that are wrong, and
    what a side refuses a request with."""
    (concurrency,) = options.concurrency
    prompts = options.load_prompts()
    drafted = options.drafted(subject.num_draft_tokens, options.temperature)
    plain = replace(drafted, num_draft_tokens=0)
    for warning in subject.replay_warnings(prompts):
        progress(warning)
    async with AsyncExitStack() as stack:
        contestants = [
            Contestant(Side.PLAIN, subject.client, plain, concurrency),
            Contestant(Side.SPECULATIVE, subject.client, drafted, concurrency),
        ]
        if not options.no_reference and subject.reference is not None:
            advice = " (--no-reference measures without it)"
            for side in (Side.ENGINE, Side.TRANSFORMERS):
                progress(f"loading the model once more: {side.value}")
                process = ReferenceProcess(side, subject.reference, options.raw, advice)
                client = await stack.enter_async_context(process)
                contestants.append(Contestant(side, client, plain, 1))
        results = await measure(prompts, contestants, progress)
    setup = {
        "model": subject.model,
        "draft_model": subject.draft_model,
        "dtype": subject.dtype,
        "num_draft_tokens": drafted.num_draft_tokens,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "rule": drafted.rule.value,
        "concurrency": concurrency,
    }
    return setup | compared(prompts, results, concurrency > 1)


def compared(
    prompts: Sequence[BenchPrompt], results: Mapping[str, SideResult], several: bool
) -> dict[str, Any]:
    """Of all prompts and of each category, with `several` requests at a time or one by one. With
    several a category's wall time is the sum over its requests, since categories run side by
    side."""
    plain, fast = results[Side.PLAIN], results[Side.SPECULATIVE]
    check(
        len(plain.completions) == len(fast.completions) == len(prompts) > 0,
        "both sides must have decoded every prompt",
    )
    places: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        places.setdefault(prompt.category, []).append(index)

    def rate(side: Side) -> float | None:
        return results[side].tokens_per_second if side in results else None

    return _compare(plain, fast, several) | {
        "categories": {
            name: _compare(_part(plain, chosen), _part(fast, chosen), several)
            for name, chosen in places.items()
        },
        "engine_tokens_per_second": rate(Side.ENGINE),
        "transformers_generate_tokens_per_second": rate(Side.TRANSFORMERS),
    }


def _part(result: SideResult, chosen: Sequence[int]) -> SideResult:
    """What a side did of the chosen prompts alone; its time is the sum over them."""
    completions = tuple(result.completions[index] for index in chosen)
    return SideResult(completions, sum(completion.seconds for completion in completions))


def _compare(plain: SideResult, speculative: SideResult, several: bool) -> dict[str, Any]:
    """Two sides that decoded the same prompts. `speedup` is the median over the prompts of the
    ratios of tokens a second, or with several at a time the ratio of the totals; rates are all
    tokens over all wall time, prefill included; `num_identical` counts the prompts on which both
    wrote the same tokens, at temperature 0 all but for near ties."""
    pairs = list(zip(plain.completions, speculative.completions, strict=True))
    if several:
        speedup = speculative.tokens_per_second / plain.tokens_per_second
    else:
        speedup = median(fast.tokens_per_second / slow.tokens_per_second for slow, fast in pairs)
    drafted = sum(entry.num_draft_tokens for entry in speculative.completions)
    accepted = sum(entry.num_accepted_draft_tokens for entry in speculative.completions)
    num_rounds = sum(entry.num_rounds for entry in speculative.completions)
    check(num_rounds > 0, "tokens were committed without a round")
    return {
        "num_prompts": len(pairs),
        "speedup": speedup,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speculative_tokens_per_second": speculative.tokens_per_second,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_round": speculative.num_tokens / num_rounds,
        "num_tokens_plain": plain.num_tokens,
        "num_tokens_speculative": speculative.num_tokens,
        "num_identical": sum(slow.token_ids == fast.token_ids for slow, fast in pairs),
    }


def report(levels: Sequence[Level]) -> Report:
    """The values are the first level's; of several, with each one's comparisons under
    `by_concurrency` besides."""
    values = dict(levels[0])
    if len(levels) > 1:
        setup = list(values)[: list(values).index("concurrency") + 1]
        values["by_concurrency"] = {
            str(level["concurrency"]): {k: v for k, v in level.items() if k not in setup}
            for level in levels
        }
    shown: list[Any] = []
    warnings = []
    for level in levels:
        lines, slow = _beside_references(level)
        shown += [_table(level), *lines, _headline(level)]
        warnings += slow
    return Report(values, shown, warnings)


def _beside_references(level: Level) -> tuple[list[str], list[str]]:
    """Plain decoding beside each reference that was measured, a line each, and warnings of a slow
    baseline."""
    plain = level["plain_tokens_per_second"]
    lines, warnings = [], []
    for name, key in (
        ("the engine alone", "engine_tokens_per_second"),
        ("transformers generate", "transformers_generate_tokens_per_second"),
    ):
        if (rate := level[key]) is None:
            continue
        share = plain / rate
        lines.append(
            f"plain decoding through the services runs at {share:.2f}x the speed of {name} "
            f"({plain:.1f} against {rate:.1f} tokens/s over all)"
        )
        if share < PLAIN_SHARE_MIN:
            warnings.append(
                f"warning: plain decoding runs at {share:.2f}x the speed of {name}; under "
                f"{PLAIN_SHARE_MIN:.2f}x the speed-up is over a slow baseline"
            )
    return lines, warnings


def _headline(level: Level) -> str:
    return (
        f"speculative decoding runs at {level['speedup']:.2f}x the speed of plain decoding, the "
        f"median over the prompts; over all {level['speculative_tokens_per_second']:.1f} against "
        f"{level['plain_tokens_per_second']:.1f} tokens/s"
    )


def _table(level: Level) -> Any:
    shown = table(
        "{model} with {draft_model}, K <= {num_draft_tokens}, {dtype}, temperature "
        "{temperature:g}, rule {rule}, {concurrency} at a time; tokens/s".format(**level),
        ("prompts", "number", "plain", "speculative", "accepted", "per round",
         "speed-up" if level["concurrency"] > 1 else "median speed-up"),
        [_row(name, found) for name, found in level["categories"].items()],
    )  # fmt: skip
    shown.add_section()
    shown.add_row(*_row("all", level))
    return shown


def _row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    accepted = found["acceptance_rate"]
    return (
        name,
        str(found["num_prompts"]),
        f"{found['plain_tokens_per_second']:.1f}",
        f"{found['speculative_tokens_per_second']:.1f}",
        "-" if accepted is None else f"{accepted:.0%}",
        f"{found['tokens_per_round']:.2f}",
        f"{found['speedup']:.2f}x",
    )
