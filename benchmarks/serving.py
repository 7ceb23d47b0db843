"""`outrider bench serve`: what a server does under load, with the flags and figures of `vllm bench
serve`. What it is asked for; `serving_load` measures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from outrider.errors import SettingError
from outrider.limits import (
    MAX_TOKENS_DEFAULT,
    NUM_DRAFT_TOKENS_MAX,
    SEED_MAX,
    TEMPERATURE_MAX,
)
from outrider.settings import check_range

from .number_options import numbers
from .prompts import BenchPrompt, built_in_prompts, read_prompts

METRICS: Final = ("ttft", "tpot", "itl", "e2el")
GOALS: Final = ("ttft", "tpot", "e2el")
"""What `--goodput` may bound."""
REQUESTS_MAX: Final = 1_000_000
RATE_MIN, RATE_MAX = 1e-3, 1e5
BURSTINESS_MIN, BURSTINESS_MAX = 1e-3, 1e6
CONCURRENCY_MAX: Final = 4_096
WARMUPS_MAX: Final = 10_000
DURATION_MAX: Final = 86_400
GOAL_MS_MAX: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What `bench serve` is asked for, whatever the server. Wrong values raise `SettingError`."""

    prompts: Path | None = None
    """JSONL file of `prompt` and, if wanted, `category` and `max_tokens`; None = the built-in
    prompts."""
    num_prompts: int | None = None
    """Requests in all; None = one for each prompt, or no bound where there is a duration."""
    num_warmups: int = 0
    """Requests before anything is measured; one of them that fails ends the command."""
    request_rate: float = math.inf
    """Requests a second; inf = all at once, or as soon as there is a place."""
    burstiness: float = 1.0
    """Shape of the Gamma law of gaps at a finite rate: 1 = Poisson, less = bursts."""
    max_concurrency: int | None = None
    """Requests at a time; None = no bound."""
    duration: float | None = None
    """Seconds in which requests are sent; those that run then are waited for."""
    max_tokens: int = 128
    """Of an answer whose prompt does not say."""
    temperature: float = 0.0
    ignore_eos: bool = False
    """Whether answers go on to `max_tokens`."""
    raw: bool = False
    """Whether prompts go in as they are, without the model's chat template."""
    num_draft_tokens: int | None = None
    """Bound K of each request; 0 = plain decoding; None = the deployment's own. By gRPC."""
    rounds: bool = False
    """Whether each round is reported: look-ahead, and where its time goes. By gRPC; it costs a
    message a round, so it is not for figures that are to be compared."""
    seed: int = 0
    """Of the arrivals."""
    goodput: tuple[tuple[str, float], ...] = ()
    """Goals that a good request meets, all of them: of `GOALS`, ms."""
    percentile_metrics: tuple[str, ...] = METRICS
    """Those of `METRICS` whose percentiles are reported."""
    metric_percentiles: tuple[float, ...] = (99.0,)

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if not (name == "request_rate" or name == "burstiness") or value != math.inf:
                check_range(name, value, low, high)
        if self.burstiness != 1 and self.request_rate == math.inf:
            raise SettingError("burstiness", "needs --request-rate: it is of the gaps between")
        names = [name for name, _ in self.goodput]
        if len(set(names)) != len(names) or not set(names) <= set(GOALS):
            raise SettingError(
                "goodput", f"{' '.join(names)} is wrong; it must be each of {', '.join(GOALS)} once"
            )
        for _, goal in self.goodput:
            check_range("goodput", goal, 0, GOAL_MS_MAX)
        if not set(self.percentile_metrics) <= set(METRICS):
            raise SettingError(
                "percentile_metrics",
                f"{','.join(self.percentile_metrics)} is wrong; it must be some of "
                f"{', '.join(METRICS)}, with commas between",
            )
        for share in self.metric_percentiles:
            check_range("metric_percentiles", share, 0, 100)
        if self.duration is not None and self._all_at_once and self.num_prompts is None:
            raise SettingError(
                "duration",
                "needs --request-rate or --max-concurrency: without them requests without end "
                "would come at once",
            )

    @property
    def _all_at_once(self) -> bool:
        return self.request_rate == math.inf and self.max_concurrency is None

    @classmethod
    def from_arguments(
        cls, arguments: argparse.Namespace, num_draft_tokens: int | None
    ) -> ServingOptions:
        """From what a parser with `add_arguments` returned."""
        own = {field.name for field in fields(cls)} - {"num_draft_tokens"}
        values: dict[str, Any] = {name: getattr(arguments, name) for name in own}
        return cls(
            **values | {"goodput": tuple(values["goodput"])}, num_draft_tokens=num_draft_tokens
        )

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to send. Raises `SettingError` for a file that is wrong."""
        prompts = built_in_prompts() if self.prompts is None else read_prompts(self.prompts)
        return tuple(by_turns(prompts))

    def num_requests(self, prompts: tuple[BenchPrompt, ...]) -> int | None:
        """How many there will be, of these prompts; None = as many as the duration has room for."""
        if self.num_prompts is not None:
            return self.num_prompts
        return len(prompts) if self.duration is None else None

    def requests(self, prompts: tuple[BenchPrompt, ...]) -> Iterator[BenchPrompt]:
        """The prompts in their order, over and over where more are wanted than there are."""
        most = self.num_requests(prompts) or REQUESTS_MAX
        for _, prompt in zip(range(most), cycle(prompts), strict=False):
            yield prompt


_BOUNDS: Final[tuple[tuple[str, float, float], ...]] = (
    ("num_prompts", 1, REQUESTS_MAX),
    ("num_warmups", 0, WARMUPS_MAX),
    ("request_rate", RATE_MIN, RATE_MAX),
    ("burstiness", BURSTINESS_MIN, BURSTINESS_MAX),
    ("max_concurrency", 1, CONCURRENCY_MAX),
    ("duration", 1, DURATION_MAX),
    ("max_tokens", 1, MAX_TOKENS_DEFAULT),
    ("temperature", 0, TEMPERATURE_MAX),
    ("num_draft_tokens", 0, NUM_DRAFT_TOKENS_MAX),
    ("seed", 0, SEED_MAX),
)


def by_turns(prompts: tuple[BenchPrompt, ...]) -> list[BenchPrompt]:
    """One prompt of each category in turn, so that any first N of them are of all kinds. Within a
    category their order stays."""
    waiting: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        waiting.setdefault(prompt.category, []).append(prompt)
    most = max(map(len, waiting.values()))
    return [each[turn] for turn in range(most) for each in waiting.values() if turn < len(each)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench serve`, but for those that say which server."""
    defaults = ServingOptions()
    _add_load(parser.add_argument_group("load"), defaults)
    _add_requests(parser.add_argument_group("requests"), defaults)
    _add_results(parser.add_argument_group("results"), defaults)


def _add_load(group: Any, defaults: ServingOptions) -> None:
    for name, kind, metavar, purpose in (
        ("--num-prompts", int, "N", "requests in all; prompts are repeated where there are fewer "
         "[one for each prompt]"),
        ("--num-warmups", int, "N", "requests before anything is measured [%(default)s]"),
        ("--request-rate", float, "R", "requests a second, at random times; inf = all at once "
         "[%(default)s]"),
        ("--burstiness", float, "SHAPE", "of the gaps' Gamma law: 1 = Poisson, less = bursts, inf "
         "= even [%(default)s]"),
        ("--max-concurrency", int, "N", "requests at a time; more wait in this client [no bound]"),
        ("--duration", float, "S", "send requests for so long, then wait for those that run"),
        ("--seed", int, "N", "of the random times [%(default)s]"),
    ):  # fmt: skip
        default = getattr(defaults, name[2:].replace("-", "_"))
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=purpose)


def _add_requests(group: Any, defaults: ServingOptions) -> None:
    group.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="JSONL of `prompt` and, if wanted, `category` and `max_tokens` "
        f"[{len(built_in_prompts())} built-in prompts]",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens", type=int, default=defaults.max_tokens, metavar="N",
        help="tokens of an answer whose prompt does not say [%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--temperature", type=float, default=defaults.temperature, metavar="T",
        help="0 = always the likeliest token [%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's own end (not of OpenAI's)"
    )
    group.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    group.add_argument(
        "--rounds", action="store_true",
        help="by gRPC: let each round be reported, for look-ahead and where rounds spend their "
        "time; costs a message a round",
    )  # fmt: skip


def _add_results(group: Any, defaults: ServingOptions) -> None:
    group.add_argument(
        "--goodput", nargs="+", type=goal, default=(), metavar="NAME:MS",
        help=f"what a good request keeps to: {', '.join(GOALS)}, such as ttft:200 tpot:50",
    )  # fmt: skip
    group.add_argument(
        "--percentile-metrics", type=words, default=defaults.percentile_metrics, metavar="NAMES",
        help=f"whose percentiles to report [{','.join(METRICS)}]",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles", type=numbers, default=defaults.metric_percentiles, metavar="P,..",
        help="which percentiles [99]",
    )  # fmt: skip
    group.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
    group.add_argument(
        "--save-result", type=Path, metavar="FILE", help="write the same object to a file"
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="with the times of each request in that file"
    )
    group.add_argument(
        "--report", type=Path, metavar="FILE.html", help="write one page with plots"
    )  # fmt: skip


def goal(text: str) -> tuple[str, float]:
    """One of `--goodput`, for `type=` of an argument."""
    name, _, value = text.partition(":")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is wrong; it must be NAME:MS, a name of {', '.join(GOALS)}"
        ) from None


def words(text: str) -> tuple[str, ...]:
    """Names with commas between, for `type=` of an argument."""
    return tuple(part.strip() for part in text.split(","))


def shown_settings(
    options: ServingOptions, backend: str, server: str, model: str
) -> Mapping[str, object]:
    """What was asked for, by vLLM's names in a result where it has one; infinity is text, as
    JSON has no number for it. `server` is HOST:PORT."""

    def finite(value: float) -> float | str:
        return value if math.isfinite(value) else "inf"

    return {
        "backend": backend,
        "server": server,
        "model_id": model,
        "num_prompts": options.num_prompts,
        "num_warmups": options.num_warmups,
        "request_rate": finite(options.request_rate),
        "burstiness": finite(options.burstiness),
        "max_concurrency": options.max_concurrency,
        "duration_limit": options.duration,
        "prompts": "built-in" if options.prompts is None else options.prompts.name,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "raw": options.raw,
        "num_draft_tokens": options.num_draft_tokens,
        "seed": options.seed,
        "goodput": dict(options.goodput),
    }
