"""`outrider bench serve`: a load test with the options and figures of `vllm bench serve`.

With a request rate, requests arrive at random times, whether or not earlier requests have been
answered. Without a rate, all requests arrive at once. At most `max_concurrency` requests run at a
time. Further requests wait in this client. The times below do not include this wait.

| figure | time, for each request that did not fail |
| --- | --- |
| TTFT | from sending to the first chunk with tokens |
| E2EL | from sending to the last chunk |
| TPOT | (E2EL - TTFT) / (output tokens - 1); none if the answer has one token |
| ITL | each gap between two successive chunks of a request |

A request counts for goodput if it meets every goal. Requests without a TPOT always meet a goal for
TPOT. Failed requests count only in `failed`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from outrider.errors import OutriderError
from outrider.foundation.settings import between, checked
from outrider.limits import NUM_DRAFT_TOKENS_MAX

from .options import MaxTokens, PromptOptions, Temperature
from .prompts import BenchPrompt
from .report import Report, table

if TYPE_CHECKING:
    from .measurement import BenchClient, Completion, Progress

GOALS = ("ttft", "tpot", "e2el")
Goal = Annotated[
    str,
    Field(
        pattern=rf"^({'|'.join(GOALS)}):\d+(\.\d+)?$",
        title=f"NAME:MS, where NAME is one of {', '.join(GOALS)}",
    ),
]
REQUESTS_MAX = 100_000
ERRORS_SHOWN = 3
STATISTICS = ("mean", "median", "std", "p99")
UNITS: Mapping[str, str] = {
    "duration": "s",
    "request_throughput": "requests/s",
    "request_goodput": "requests/s",
    "output_throughput": "tokens/s",
    "total_token_throughput": "tokens/s",
    "spec_decode_acceptance_rate": "%",
    "spec_decode_acceptance_length": "tokens",
}


@checked()
class ServeOptions(PromptOptions):
    """Options of `bench serve`."""

    base_url: str | None = None
    """URL of a server with OpenAI's API, such as http://127.0.0.1:8000; unset = an Outrider
    deployment, called by gRPC."""
    num_prompts: Annotated[int | None, between(1, REQUESTS_MAX)] = None
    """Number of requests; prompts are repeated as needed; unset = one request for each prompt."""
    request_rate: Annotated[float, Field(ge=1e-3)] = math.inf
    """Requests a second, at random times; inf = all at once."""
    burstiness: Annotated[float, Field(ge=1e-3)] = 1.0
    """Shape of the Gamma distribution of the gaps between arrivals: 1 = a Poisson process, below 1
    = bursts, inf = equal gaps."""
    max_concurrency: Annotated[int | None, between(1, 4_096)] = None
    """Maximum number of running requests; others wait in this client; unset = no limit."""
    max_tokens: MaxTokens = 128
    """Maximum number of tokens of an answer, unless the prompt has its own `max_tokens`."""
    temperature: Temperature = 0.0
    """0 = greedy."""
    ignore_eos: bool = False
    """Do not stop at the EOS token (OpenAI's own servers refuse this field)."""
    num_draft_tokens: Annotated[int | None, between(0, NUM_DRAFT_TOKENS_MAX)] = None
    """Maximum number of draft tokens of a round, for an Outrider deployment; 0 = plain decoding;
    unset = the deployment's default."""
    goodput: tuple[Goal, ...] = ()
    """Goals that a request must meet for goodput, as NAME:MS; NAME is ttft, tpot or e2el."""

    @property
    def goals(self) -> dict[str, float]:
        """The goals in `goodput`, ms, by metric."""
        return {name: float(ms) for name, ms in (text.split(":") for text in self.goodput)}

    def settings(self, backend: str, server: str, model: str) -> dict[str, object]:
        """The options, for `Report.values`. `server` is HOST:PORT."""
        values = {"backend": backend, "server": server, "model_id": model, **asdict(self)}
        return {
            name: str(value) if value == math.inf or isinstance(value, Path) else value
            for name, value in (values | {"goodput": self.goals}).items()
        }


@dataclass(frozen=True, slots=True)
class Load:
    duration_s: float
    most_running: int
    answers: Sequence[Completion | str]
    """The answer to each request, or the error message."""

    @property
    def completed(self) -> list[Completion]:
        return [answer for answer in self.answers if not isinstance(answer, str)]

    @property
    def errors(self) -> Counter[str]:
        return Counter(answer for answer in self.answers if isinstance(answer, str))


def arrival_times(rate: float, burstiness: float) -> Iterator[float]:
    """An endless sequence of arrival times, s.

    Gaps have the distribution Gamma(shape `burstiness`, mean 1 / `rate`), as in `vllm bench serve`.
    If `burstiness` is infinite, all gaps are equal. If `rate` is infinite, all times are 0. vLLM
    also rescales the times so that the last one has its expected value; this function does not."""
    generator = random.Random(0)  # noqa: S311 (times, not secrecy)
    is_even = math.inf in (rate, burstiness)
    now = 0.0
    while True:
        now += 1 / rate if is_even else generator.gammavariate(burstiness, 1 / (rate * burstiness))
        yield now


async def measure(options: ServeOptions, client: BenchClient, tell: Progress) -> Load:
    """Sends all requests and waits for all answers. `tell` gets a line after each answer."""
    from .measurement import bench_request

    clock = asyncio.get_running_loop().time
    began_s = clock()
    answers: list[Completion | str] = []
    prompts = [*options.load_prompts()]
    num_requests = options.num_prompts or len(prompts)
    random.Random(0).shuffle(prompts)  # noqa: S311 (order, not secrecy)
    places = asyncio.Semaphore(options.max_concurrency or REQUESTS_MAX)
    num_running = most_running = 0

    async def ask(prompt: BenchPrompt) -> None:
        nonlocal num_running, most_running
        async with places:
            num_running += 1
            most_running = max(most_running, num_running)
            request = bench_request(
                prompt.text,
                prompt.max_tokens or options.max_tokens,
                options.temperature,
                num_draft_tokens=options.num_draft_tokens,
                ignore_eos=options.ignore_eos,
            )
            try:
                answers.append(await client.generate(request))
            except OutriderError as error:
                answers.append(error.message)
            num_running -= 1
        tell(f"{len(answers)} of {num_requests} requests done, {num_running} running")

    times = arrival_times(options.request_rate, options.burstiness)
    arrivals = zip(times, cycle(prompts), strict=False)
    async with asyncio.TaskGroup() as group:
        for due_s, prompt in islice(arrivals, num_requests):
            await asyncio.sleep(max(0.0, began_s + due_s - clock()))
            group.create_task(ask(prompt))
    return Load(clock() - began_s, most_running, answers)


def report(options: ServeOptions, settings: Mapping[str, object], load: Load) -> Report:
    """The figures, with vLLM's names and units; None = not measured. Rates do not count requests
    that failed. As in vLLM, the acceptance length is 1 + accepted draft tokens / rounds with draft
    tokens. `settings` are from `ServeOptions.settings`."""
    done = load.completed
    seconds = load.duration_s or math.inf
    counted = "prompt_tokens num_tokens num_drafts num_draft_tokens num_accepted_draft_tokens"
    inputs, outputs, drafts, drafted, accepted = (
        sum(getattr(completion, name) for completion in done) for name in counted.split()
    )
    goals = options.goals
    figures: dict[str, Any] = {
        "duration": load.duration_s,
        "completed": len(done),
        "failed": load.errors.total(),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(is_good(completion, goals) for completion in done) / seconds
        if goals
        else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_concurrent_requests": load.most_running,
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else None,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
    }
    figures |= {
        f"{name}_{metric}_ms": value
        for metric, ms in samples(done).items()
        for name, value in zip(STATISTICS, _statistics(ms), strict=True)
    }
    reasons = "; ".join(f"{n}x {text}" for text, n in load.errors.most_common(ERRORS_SHOWN))
    failed = f"{load.errors.total()} of {len(load.answers)} requests failed: {reasons}"
    warnings = [f"warning: {failed}"] if reasons else []
    title = f"{settings['model_id']} by {settings['backend']}"
    rows = [
        {
            "figure": name.removesuffix("_ms").replace("_", " "),
            "value": value,
            "unit": unit_of(name),
        }
        for name, value in figures.items()
        if value is not None
    ]
    return Report({**settings, **figures}, [table(title, rows)], warnings)


def _statistics(ms: Sequence[float]) -> Sequence[float | None]:
    """The `STATISTICS` of latencies."""
    if not ms:
        return [None] * len(STATISTICS)
    import numpy as np

    return [*map(float, (np.mean(ms), np.median(ms), np.std(ms), np.percentile(ms, 99)))]


def unit_of(name: str) -> str:
    """The unit of a figure; empty for a number of things."""
    return "ms" if name.endswith("_ms") else UNITS.get(name, "")


def latencies(done: Completion) -> dict[str, float | None]:
    """The latencies of a request, ms. If no chunk had tokens, TTFT equals E2EL."""
    first_s, rest = next(iter(done.chunk_s), done.seconds), done.num_tokens - 1
    return {
        "ttft": 1e3 * first_s,
        "tpot": 1e3 * (done.seconds - first_s) / rest if rest else None,
        "e2el": 1e3 * done.seconds,
    }


def samples(completed: Sequence[Completion]) -> dict[str, list[float]]:
    each = [latencies(completion) for completion in completed]
    by_metric = {
        name: [ms for latency in each if (ms := latency[name]) is not None] for name in GOALS
    }
    return by_metric | {
        "itl": [1e3 * (b - a) for completion in completed for a, b in pairwise(completion.chunk_s)]
    }


def is_good(done: Completion, goals: Mapping[str, float]) -> bool:
    measured = latencies(done)
    return all((measured[name] or 0.0) <= bound for name, bound in goals.items())
