"""`outrider bench serve`: what a server does under load, with the flags and figures of `vllm bench
serve`.

With a rate, requests come at their own times whether or not others are answered; one that finds no
place under `max_concurrency` waits in this client, which is told apart from its latency. Without a
rate all come at once, or, with `max_concurrency`, one whenever there is a place.

| figure | of each request that did not fail |
| --- | --- |
| TTFT | from sending to the first chunk with tokens |
| E2EL | from sending to the last chunk |
| TPOT | (E2EL - TTFT) / (output tokens - 1); requests of one token have none |
| ITL | each gap between two chunks that follow each other, of all requests together |

A request is good where it meets every goal; its TPOT counts as 0 where it has none. Failed requests
count in `failed` alone.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import click
import numpy as np
from pydantic import Field

from outrider.errors import ConfigError, OutriderError, SettingError
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.settings import Internal, between, checked

from .measurement import BenchClient, Completion, Decoding, Progress
from .options import Kind, MaxTokens, PromptOptions, Temperature
from .prompts import BenchPrompt
from .report import Report, percentile

GOALS = ("ttft", "tpot", "e2el")
"""What `--goodput` may bound."""
REQUESTS_MAX = 1_000_000
LAG_PERIOD_S = 0.05
"""How often this client looks whether its own event loop is late."""
LAG_MS_MAX = 10.0
"""Where this client is later than that once in a hundred times, its own times are told to be too
long."""
ERRORS_SHOWN = 3
STATISTICS: Mapping[str, Any] = {
    "mean": np.mean, "median": np.median, "std": np.std, "p99": lambda ms: np.percentile(ms, 99),
}  # fmt: skip
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>bench serve</title>
<pre style="font-family: monospace; line-height: 1.2">{code}</pre>
"""
"""As Rich fills it in; the plots follow."""


def goal(text: str) -> tuple[str, float]:
    """One of `--goodput`."""
    name, _, value = text.partition(":")
    with suppress(ValueError):
        if name in GOALS and float(value) >= 0:
            return name, float(value)
    raise click.BadParameter(f"{text!r} is wrong; it must be NAME:MS, a name of {', '.join(GOALS)}")


@checked()
class ServeOptions(PromptOptions):
    """What `bench serve` is asked for."""

    base_url: str | None = None
    """A server with OpenAI's interface, such as http://127.0.0.1:8000; unset = a deployment of
    ours, by gRPC."""
    num_prompts: Annotated[int | None, between(1, REQUESTS_MAX)] = None
    """Requests in all; prompts are repeated where there are fewer; unset = one for each prompt."""
    request_rate: Annotated[float, Field(ge=1e-3)] = math.inf
    """Requests a second, at random times; inf = all at once."""
    burstiness: Annotated[float, Field(ge=1e-3)] = 1.0
    """Of the gaps' Gamma law: 1 = Poisson, less = bursts, inf = even."""
    max_concurrency: Annotated[int | None, between(1, 4_096)] = None
    """Requests at a time; more wait in this client; unset = no bound."""
    duration: Annotated[float | None, between(1, 86_400)] = None
    """Send requests for so many seconds, then wait for those that run."""
    max_tokens: MaxTokens = 128
    """Tokens of an answer whose prompt does not say."""
    temperature: Temperature = 0.0
    """0 = always the likeliest token."""
    ignore_eos: bool = False
    """Go on past the model's own end (not of OpenAI's)."""
    num_draft_tokens: Annotated[int | None, between(0, NUM_DRAFT_TOKENS_MAX)] = None
    """By gRPC: draft tokens a round; 0 = plain decoding; unset = the deployment's own."""
    goodput: Internal[tuple[tuple[str, float], ...]] = ()
    report: Path | None = None
    """Write one page with plots."""

    @classmethod
    def params(cls, kind: Callable[..., Kind]) -> list[Kind]:
        """With `--goodput`, which takes several words."""
        goodput = kind(
            ["--goodput"], type=goal, several=True, metavar="NAME:MS",
            help=f"what a good request keeps to: {', '.join(GOALS)}, such as ttft:200 tpot:50",
        )  # fmt: skip
        return [*super().params(kind), goodput]

    def __post_init__(self) -> None:
        if self.report is not None and not self.report.parent.is_dir():  # Before all is measured.
            raise SettingError("report", f"{self.report.parent} is no folder")

    def settings(self, backend: str, server: str, model: str) -> dict[str, object]:
        """What was asked for, as a result says it. `server` is HOST:PORT."""
        values = asdict(self) | {"goodput": dict(self.goodput)}
        named = {"backend": backend, "server": server, "model_id": model}
        return named | {
            name: str(value) if value == math.inf or isinstance(value, Path) else value
            for name, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class Record:
    """One request that is over. Times are seconds since the load began."""

    due_s: float
    """When it came."""
    started_s: float
    """When it was sent: later where `--max-concurrency` held it back, or this client was late."""
    done: Completion | str
    """Or why it failed."""


@dataclass(frozen=True, slots=True)
class Load:
    """What was measured of the requests, in the order of their ends."""

    duration_s: float
    most_running: int
    records: Sequence[Record]
    lags_s: Sequence[float]
    """How late this client's event loop was, each time it looked: what was read then was read so
    much later than it came."""

    @property
    def completed(self) -> list[tuple[Record, Completion]]:
        """Those that did not fail."""
        return [(one, one.done) for one in self.records if isinstance(one.done, Completion)]

    @property
    def errors(self) -> Counter[str]:
        """Why the others failed."""
        return Counter(one.done for one in self.records if isinstance(one.done, str))


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning at which requests come, without end, ascending.

    Gaps are Gamma(shape `burstiness`, mean 1 / `rate`), as those of `vllm bench serve`: 1 is a
    Poisson process, less comes in bursts, more is more even, infinity is a metronome. The first
    request comes after a gap, too. An infinite rate: all at 0. Unlike vLLM's, the times are not
    stretched so that the last of them falls on its mean."""
    generator = random.Random(seed)  # noqa: S311 (times, not secrecy)
    is_even = math.inf in (rate, burstiness)
    now = 0.0
    while True:
        now += 1 / rate if is_even else generator.gammavariate(burstiness, 1 / (rate * burstiness))
        yield now


async def measure(options: ServeOptions, client: BenchClient, tell: Progress) -> Load:
    """Sends all requests and waits for them; their failures are in their records. `tell` is told
    how far it is, often."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    records: list[Record] = []
    lags_s: list[float] = []
    prompts = [*options.load_prompts()]
    random.Random(options.seed).shuffle(prompts)  # noqa: S311 (order, not secrecy)
    places = asyncio.Semaphore(options.max_concurrency or REQUESTS_MAX)
    has_rate = options.request_rate != math.inf
    has_end = options.duration is not None and (has_rate or options.max_concurrency)
    most = options.num_prompts or (REQUESTS_MAX if has_end else len(prompts))
    decoding = Decoding(
        options.max_tokens, options.temperature, num_draft_tokens=options.num_draft_tokens,
        ignore_eos=options.ignore_eos,
    )  # fmt: skip
    num_running = most_running = 0

    async def ask(prompt: BenchPrompt, due_s: float) -> None:
        nonlocal num_running, most_running
        if has_rate:
            await places.acquire()
        started_s = clock() - began_s
        num_running += 1
        most_running = max(most_running, num_running)
        length = prompt.max_tokens or options.max_tokens
        done: Completion | str
        try:
            done = await client.generate(prompt, replace(decoding, max_tokens=length))
        except OutriderError as error:
            done = error.message
        finally:
            num_running -= 1
            places.release()
        records.append(Record(due_s, started_s, done))
        tell(f"{len(records)} requests over, {num_running} running")

    async def watch_lag() -> None:
        while True:
            due = clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            lags_s.append(max(0.0, clock() - due))

    times = arrival_times(options.request_rate, options.burstiness, options.seed)
    watch = asyncio.create_task(watch_lag())
    try:
        async with asyncio.TaskGroup() as group:
            for due_s, prompt in islice(zip(times, cycle(prompts), strict=False), most):
                if not has_rate:
                    await places.acquire()
                    due_s = clock() - began_s
                if due_s >= (options.duration or math.inf):
                    break
                await asyncio.sleep(max(0.0, began_s + due_s - clock()))
                group.create_task(ask(prompt, due_s))
    finally:
        watch.cancel()
    return Load(clock() - began_s, most_running, records, lags_s)


def report(options: ServeOptions, settings: Mapping[str, object], load: Load) -> Report:
    """By vLLM's names and with its units; None = not measured. Rates are over `duration`, and over
    requests that did not fail. `settings` are those of `ServeOptions.settings`."""
    done = [one for _, one in load.completed]
    seconds = load.duration_s or math.inf
    inputs, outputs, steps, drafted, accepted = (
        sum(getattr(one, name) for one in done)
        for name in (
            "prompt_tokens", "num_tokens", "num_rounds", "num_draft_tokens",
            "num_accepted_draft_tokens",
        )
    )  # fmt: skip
    goals = dict(options.goodput)
    lag_ms = 1e3 * percentile(load.lags_s, 99) if load.lags_s else 0.0
    figures: dict[str, Any] = {
        "duration": load.duration_s,
        "completed": len(done),
        "failed": load.errors.total(),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(is_good(one, goals) for one in done) / seconds if goals else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": float(tokens_by_second(load).max()),
        "max_concurrent_requests": load.most_running,
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / steps if steps else None,
        "spec_decode_num_drafts": steps,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "client_lag_p99_ms": lag_ms,
    }
    figures |= {
        f"{name}_{metric}_ms": float(of(ms)) if ms else None
        for metric, ms in samples(load).items()
        for name, of in STATISTICS.items()
    }
    warnings = []
    if lag_ms > LAG_MS_MAX:
        warnings.append(
            f"warning: this client was up to {lag_ms:.0f} ms late itself (99 of 100 times); "
            "latencies are too long by as much: give it a core of its own, or less load"
        )
    if load.errors:
        reasons = "; ".join(f"{n}x {text}" for text, n in load.errors.most_common(ERRORS_SHOWN))
        warnings.append(
            f"warning: {load.errors.total()} of {len(load.records)} requests failed: {reasons}"
        )
    title = f"{settings['model_id']} by {settings['backend']}"
    return Report({**settings, **figures}, Report.of(title, figures).shown, warnings)


def latencies(done: Completion) -> dict[str, float | None]:
    """Of a request, ms. An answer of one token has no TPOT, and the TTFT of one without a chunk of
    tokens is to its end."""
    first_s, rest = done.first_token_s or done.seconds, done.num_tokens - 1
    return {
        "ttft": 1e3 * first_s,
        "tpot": 1e3 * (done.seconds - first_s) / rest if rest else None,
        "e2el": 1e3 * done.seconds,
    }


def samples(load: Load) -> dict[str, list[float]]:
    """By metric, ms."""
    each = [latencies(one) for _, one in load.completed]
    found = {name: [ms for one in each if (ms := one[name]) is not None] for name in GOALS}
    found["itl"] = [1e3 * (b - a) for _, one in load.completed for a, b in pairwise(one.chunk_s)]
    found["client_queue_time"] = [1e3 * (one.started_s - one.due_s) for one, _ in load.completed]
    return found


def is_good(done: Completion, goals: Mapping[str, float]) -> bool:
    """Whether a request meets every goal, by name, ms."""
    measured = latencies(done)
    return all((measured[name] or 0.0) <= bound for name, bound in goals.items())


def tokens_by_second(load: Load) -> Any:
    """Tokens that came in each second of the load: an answer's are shared out evenly over its
    chunks. vLLM counts a chunk as one token here."""
    pairs = [
        (record.started_s + at_s, done.num_tokens / len(done.chunk_s))
        for record, done in load.completed
        for at_s in done.chunk_s
    ]
    times, tokens = np.array(pairs).reshape(-1, 2).T
    return np.bincount(times.astype(int), tokens, minlength=1)


def page(found: Report, load: Load) -> str:
    """One HTML file that loads nothing: settings, figures and plots. Raises `ConfigError` without
    matplotlib."""
    from rich.console import Console

    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--report needs matplotlib: pip install 'outrider[bench]'") from error
    figure = Figure(figsize=(24, 3), layout="constrained")
    *places, over_time = figure.subplots(1, 6).flat
    for axes, (name, values) in zip(places, samples(load).items(), strict=True):
        axes.ecdf(values or [0.0])
        axes.set(title=f"{name}: share that took at most", xlabel="ms")
    over_time.stairs(tokens_by_second(load))
    over_time.set(title="output tokens in each second", xlabel="s")
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    console = Console(record=True, file=StringIO(), width=120)
    console.print(*Report.of("bench serve", found.values).shown)
    text = console.export_html(code_format=PAGE, inline_styles=True)
    return text + drawn.getvalue()[drawn.getvalue().index("<svg") :]
