"""`outrider bench engine`: many sessions at once, and steps against the library's.

Every session continues a prompt of its own, 256 tokens, by its likeliest 128; EOS does not end it.
Tokens a second are new tokens over the time from the first request to the last token, prefill
included. The sides take turns in processes of their own, and every figure is a median of rounds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from rich.table import Table

from outrider.config import TargetConfig
from outrider.errors import SettingError
from outrider.settings import check_range
from outrider.transport.grpc_link import target_link

from .answering import AnsweringProcess
from .engine_load import DECODING_TIMEOUT_S, Load, Prompts
from .engine_steps import CACHED_TOKENS, ROWS_SESSIONS
from .engine_waits import Waits, figure_rows, measure_waits
from .figures import figures_table, to_json
from .measurement import Progress
from .references import reference_environment

PROMPT_TOKENS: Final = 256
NEW_TOKENS: Final = 128
SESSIONS: Final = (1, 4, 16, 32)
_WARM_UP_SESSIONS: Final = (1, 4)
LIBRARY_SESSIONS: Final = 16
"""Prompts that the library's continuous batching is given at once."""
ONE_BY_ONE: Final = 4
"""Prompts of its `generate`, one after the other."""
REPETITIONS_MAX: Final = 100
TOKENS_MAX: Final = 65_536
DESCRIBE_TIMEOUT_S: Final = 10.0
_ROLES: Final = {
    "service": "service", "engine": "engine", "generate_batch": "library", "generate": "library",
}  # fmt: skip
"""The processes, and what each plays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What `bench engine` is asked for. Wrong values raise `SettingError`."""

    repetitions: int = 3
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("repetitions", self.repetitions, 1, REPETITIONS_MAX),
            ("prompt_tokens", self.prompt_tokens, 1, TOKENS_MAX),
            ("new_tokens", self.new_tokens, 1, TOKENS_MAX),
        ):
            check_range(name, value, low, high)

    def check_fits(self, max_model_len: int) -> None:
        """Raises `SettingError` unless a session's tokens fit a model that takes so many."""
        if self.prompt_tokens + self.new_tokens > max_model_len:
            raise SettingError(
                "prompt_tokens",
                f"{self.prompt_tokens} and {self.new_tokens} new tokens are more than the "
                f"{max_model_len} that the model takes",
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> EngineOptions:
        """From what a parser with `add_arguments` returned."""
        return cls(
            repetitions=arguments.repetitions,
            prompt_tokens=arguments.prompt_tokens,
            new_tokens=arguments.new_tokens,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench engine`, but for those that describe the target."""
    defaults = EngineOptions()
    for name, value, purpose in (
        ("--repetitions", defaults.repetitions, "rounds of all sides, of which medians are taken"),
        ("--prompt-tokens", defaults.prompt_tokens, "tokens of each session's prompt"),
        ("--new-tokens", defaults.new_tokens, "tokens that each session decodes"),
    ):
        parser.add_argument(
            name, type=int, default=value, metavar="N", help=f"{purpose} [%(default)s]"
        )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What some sessions reach together."""

    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The result of one `bench engine`; medians over `repetitions`."""

    model: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    repetitions: int
    sessions: Mapping[str, Rate]
    """By number of sessions: through the target service."""
    engine_sessions: Mapping[str, Rate]
    """The engine alone."""
    transformers_continuous_batching_tokens_per_second: float
    """The library's `generate_batch`, `LIBRARY_SESSIONS` prompts at once."""
    transformers_generate_tokens_per_second: float
    """Its `generate`, one prompt after the other."""
    verify_step_ms: float
    """5 new tokens over 256 cached ones, one session."""
    transformers_forward_ms: float
    """The same in the library."""
    generic_verify_step_ms: float
    """As `verify_step_ms`, of a random GPT-NeoX in bfloat16 (`engine_steps.GENERIC_SHAPE`)."""
    generic_transformers_forward_ms: float
    """The same in the library."""
    rows_80_over_16: float
    """A step of 16 sessions with 5 tokens each over one with a token each."""
    waits: Waits
    """Through the target service."""

    def to_json(self) -> str:
        """One JSON object on one line, `waits` among the others; null where there is no figure."""
        figures = asdict(self)
        waits = figures.pop("waits")
        return to_json(figures | waits)


async def run(
    options: EngineOptions, target: TargetConfig, token_ids: Sequence[int], progress: Progress
) -> EngineReport:
    """Measures `target`; prompts are cut out of `token_ids`. Raises `Unavailable` where a process
    breaks off, and `ConfigError`."""
    prompts = Prompts(token_ids)
    async with AsyncExitStack() as stack:
        processes = {}
        for name, role in _ROLES.items():
            progress(f"starting: {name}")
            processes[name] = await stack.enter_async_context(_process(role, target))
        link = target_link(str(processes["service"].ready["address"]))
        stack.push_async_callback(link.close)
        described = await link.describe(DESCRIBE_TIMEOUT_S)
        options.check_fits(described.max_model_len)
        load = Load(link)
        sides = _Sides(options, prompts, load, processes)
        await sides.warm_up(progress)
        rates = [await sides.rates(progress) for _ in range(options.repetitions)]
        progress("waits")
        waits = await measure_waits(load, prompts, described.max_model_len, options.repetitions)
        progress("steps")
        steps = await processes["engine"].ask(
            {"measure": "steps", "prompts": prompts.take(ROWS_SESSIONS, CACHED_TOKENS)},
            DECODING_TIMEOUT_S,
        )
        progress("steps of a random GPT-NeoX")
        steps |= await processes["engine"].ask({"measure": "generic"}, DECODING_TIMEOUT_S)
    middle = {name: median(rate[name] for rate in rates) for name in rates[0]}
    return EngineReport(
        model=target.model,
        dtype=str(processes["engine"].ready["dtype"]),
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repetitions=options.repetitions,
        sessions={str(n): Rate(tokens_per_second=middle[f"service {n}"]) for n in SESSIONS},
        engine_sessions={str(n): Rate(tokens_per_second=middle[f"engine {n}"]) for n in SESSIONS},
        transformers_continuous_batching_tokens_per_second=middle["generate_batch"],
        transformers_generate_tokens_per_second=middle["generate"],
        waits=waits,
        **steps,
    )


def _process(role: str, target: TargetConfig) -> AnsweringProcess:
    return AnsweringProcess(
        "benchmarks.engine_roles",
        f"the {role} process",
        {"role": role, "config": asdict(target)},
        environment=reference_environment(os.environ),
    )


class _Sides:
    """Who is measured, one at a time."""

    def __init__(
        self,
        options: EngineOptions,
        prompts: Prompts,
        load: Load,
        processes: Mapping[str, AnsweringProcess],
    ) -> None:
        self._options = options
        self._prompts = prompts
        self._load = load
        self._processes = processes

    async def warm_up(self, progress: Progress) -> None:
        """What is slow only once is over afterwards. The first call of `generate_batch` says how
        many sessions it will ever take side by side."""
        for number in _WARM_UP_SESSIONS:
            progress(f"warming up: {number} sessions")
            await self._served(number)
            await self._alone(number)
        progress("warming up: the library")
        await self._of_library("generate_batch", LIBRARY_SESSIONS)
        await self._of_library("generate", 1)

    async def rates(self, progress: Progress) -> dict[str, float]:
        """Tokens a second of each, by name."""
        found = {}
        for number in SESSIONS:
            progress(f"{number} sessions")
            found[f"service {number}"] = await self._served(number)
            found[f"engine {number}"] = await self._alone(number)
        progress("the library")
        found["generate_batch"] = await self._of_library("generate_batch", LIBRARY_SESSIONS)
        found["generate"] = await self._of_library("generate", ONE_BY_ONE)
        return found

    async def _served(self, number: int) -> float:
        seconds = await self._load.decode(self._take(number), self._options.new_tokens)
        return number * self._options.new_tokens / seconds

    async def _alone(self, number: int) -> float:
        answer = await self._ask("engine", "decode", number)
        return number * self._options.new_tokens / float(answer["seconds"])

    async def _of_library(self, way: str, number: int) -> float:
        answer = await self._ask(way, way, number)
        return float(answer["num_tokens"]) / float(answer["seconds"])

    async def _ask(self, name: str, measure: str, number: int) -> dict[str, Any]:
        question = {
            "measure": measure,
            "prompts": self._take(number),
            "num_tokens": self._options.new_tokens,
        }
        return await self._processes[name].ask(question, DECODING_TIMEOUT_S)

    def _take(self, number: int) -> list[list[int]]:
        return self._prompts.take(number, self._options.prompt_tokens)


def render(report: EngineReport) -> Table:
    """The report for people."""
    rows = [
        (f"{name} sessions, {where}", f"{rate.tokens_per_second:.1f} tokens/s")
        for where, rates in (
            ("target service", report.sessions), ("engine alone", report.engine_sessions),
        )
        for name, rate in rates.items()
    ]  # fmt: skip
    batched = report.transformers_continuous_batching_tokens_per_second
    rows += [
        (f"transformers generate_batch, {LIBRARY_SESSIONS} prompts", f"{batched:.1f} tokens/s"),
        ("transformers generate", f"{report.transformers_generate_tokens_per_second:.1f} tokens/s"),
        ("step of 5 tokens", f"{report.verify_step_ms:.2f} ms"),
        ("the same in transformers", f"{report.transformers_forward_ms:.2f} ms"),
        ("step of 5 tokens, random GPT-NeoX", f"{report.generic_verify_step_ms:.2f} ms"),
        ("the same in transformers", f"{report.generic_transformers_forward_ms:.2f} ms"),
        ("step of 16 x 5 tokens over one of 16 x 1", f"{report.rows_80_over_16:.2f}"),
        *figure_rows(report.waits),
    ]
    title = (
        f"{report.model}, {report.dtype}: {report.prompt_tokens} prompt tokens, "
        f"{report.new_tokens} new ones"
    )
    return figures_table(title, rows)
