"""`outrider bench speedup`: what drafting gains over plain decoding through the same services."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.client import Client
from outrider.errors import SettingError, Unavailable
from outrider.limits import DEADLINE_MS_MAX, SESSIONS_PER_COORDINATOR_MAX
from outrider.request import ChatMessage, GenerateRequest, Prompt
from outrider.sessions.store import FinishReason
from outrider.settings import check_range
from outrider.speculation.sampling_params import SamplingParams

from .decoding_options import DecodingOptions, add_decoding_arguments, decoding_values
from .measurement import BenchClient, Completion, Contestant, Decoding, Progress, Side, measure
from .number_options import whole_numbers
from .prompts import BenchPrompt
from .references import ReferenceModel, ReferenceProcess
from .report import Setup, SpeedupReport, summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupOptions(DecodingOptions):
    """What `bench speedup` is asked for. Wrong values raise `SettingError`."""

    concurrency: tuple[int, ...] = (1,)
    """Requests at a time; of several numbers each is measured, one after the other."""
    reference: bool = True
    """Whether the engine alone and the library's `generate` are measured too."""

    def __post_init__(self) -> None:
        DecodingOptions.__post_init__(self)
        for number in self.concurrency:
            check_range("concurrency", number, 1, SESSIONS_PER_COORDINATOR_MAX)
        if not 0 < len(set(self.concurrency)) == len(self.concurrency):
            given = ",".join(map(str, self.concurrency))
            raise SettingError(
                "concurrency", f"{given!r} is wrong; it must be one number, or several that differ"
            )

    def levels(self) -> tuple[SpeedupOptions, ...]:
        """The same for each concurrency alone. References run one request at a time in any case,
        so they are measured once."""
        return tuple(
            replace(self, concurrency=(number,), reference=self.reference and index == 0)
            for index, number in enumerate(self.concurrency)
        )

    @classmethod
    def from_arguments(
        cls, arguments: argparse.Namespace, *, num_draft_tokens: int | None = None
    ) -> SpeedupOptions:
        """From what a parser with `add_arguments` returned, and the bound K."""
        return cls(
            **decoding_values(arguments),
            num_draft_tokens=num_draft_tokens,
            concurrency=arguments.concurrency,
            reference=not arguments.no_reference,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench speedup`, but for those that describe a deployment."""
    add_decoding_arguments(parser)
    parser.add_argument(
        "--concurrency", type=whole_numbers, metavar="N[,N..]",
        default=SpeedupOptions().concurrency,
        help="requests at a time; above 1 the speed-up is the ratio of totals. Of several numbers "
        "each is measured, on a deployment of its own where the command starts them [1]",
    )  # fmt: skip
    parser.add_argument(
        "--no-reference", action="store_true",
        help="do not measure the engine alone and transformers generate beside it",
    )  # fmt: skip


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
        if self.asked is None:
            found.append(
                "warning: drafts may copy from earlier answers, and it is not known what this "
                "server was asked before: prompts that it was asked are not measured as new ones "
                "are. A deployment that the command starts, where none runs, has nothing to copy"
            )
        elif num_asked := self.asked.count(prompts):
            found.append(
                f"warning: drafts may copy from earlier answers, and {num_asked} of the prompts "
                "were measured on this deployment before: their speed is that of repeating an "
                "answer. A deployment that the command starts, where none runs, has nothing to copy"
            )
        if self.asked is not None:
            self.asked.add(prompts)
        num_again = len(prompts) - len({prompt.text for prompt in prompts})
        if num_again:
            found.append(
                f"warning: drafts may copy from earlier answers, and {num_again} of the prompts "
                "are there already: their speed is that of repeating an answer"
            )
        return found


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
            first_token_s=found.metrics.time_to_first_token_ms / 1000,
        )


async def run(
    options: SpeedupOptions, subject: Subject, progress: Progress | None = None
) -> SpeedupReport:
    """Measures `subject` at one concurrency. `progress` is told what happens; by default standard
    error is. Raises `SettingError` for prompts that are wrong, and what a side refuses a request
    with."""
    progress = progress or _to_standard_error
    (concurrency,) = options.concurrency
    prompts = options.load_prompts()
    drafted = options.drafted(subject.num_draft_tokens)
    plain = replace(drafted, num_draft_tokens=0)
    for warning in subject.replay_warnings(prompts):
        progress(warning)
    async with _references(options, subject, progress) as references:
        contestants = [
            Contestant(Side.PLAIN, subject.client, plain, concurrency),
            Contestant(Side.SPECULATIVE, subject.client, drafted, concurrency),
            *(Contestant(side, client, plain, 1) for side, client in references.items()),
        ]
        results = await measure(prompts, contestants, progress)
    setup = Setup(
        model=subject.model,
        draft_model=subject.draft_model,
        dtype=subject.dtype,
        num_draft_tokens=drafted.num_draft_tokens,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        rule=drafted.rule.value,
        concurrency=concurrency,
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
                process = ReferenceProcess(
                    side,
                    subject.reference,
                    raw=options.raw,
                    advice=" (--no-reference measures without it)",
                )
                references[side] = await stack.enter_async_context(process)
        yield references


def _service_prompt(prompt: BenchPrompt, raw: bool) -> Prompt:
    return prompt.text if raw else (ChatMessage("user", prompt.text),)


def _to_standard_error(line: str) -> None:
    sys.stderr.write(line + "\n")
