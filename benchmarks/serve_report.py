"""The result of `bench serve`, defined as `vllm bench serve` does: JSON, tables and a page.

| figure | of each request that did not fail |
| --- | --- |
| TTFT | from sending to the first chunk with tokens |
| E2EL | from sending to the last chunk |
| TPOT | (E2EL - TTFT) / (output tokens - 1); requests of one token have none |
| ITL | each gap between two chunks that follow each other, of all requests together |

A chunk may hold several tokens, and with speculative decoding most do: ITL is of chunks, TPOT of
tokens. A request is good where it meets every goal; its TPOT counts as 0 where it has none. Failed
requests count in `failed` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from importlib.resources import files
from io import StringIO
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from outrider.errors import ConfigError

from .report import Report, percentile, table, to_json
from .serve import METRICS, Load, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MS: Final = 1e3
NAMES: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between chunks",
    "e2el": "end to end",
}
ERRORS_SHOWN: Final = 3
LAG_MS_MAX: Final = 10.0
"""Where this client is later than that once in a hundred times, its own times are told to be too
long."""
TIMELINE_ROWS_MAX: Final = 400
"""Requests on the page's timeline: the first ones."""
BINS: Final = 48
"""Of the page's rate over time."""
_ROUND_TIMES: Final = ("draft_ms", "wire_ms", "queue_ms", "verify_ms", "commit_ms")
_SHOWN: Final = (
    ("requests that were answered", "completed", "{:.0f}"),
    ("requests that failed", "failed", "{:.0f}"),
    ("duration", "duration", "{:.2f} s"),
    ("input tokens", "total_input_tokens", "{:.0f}"),
    ("output tokens", "total_output_tokens", "{:.0f}"),
    ("requests a second", "request_throughput", "{:.2f}"),
    ("good requests a second", "request_goodput", "{:.2f}"),
    ("output tokens a second", "output_throughput", "{:.1f}"),
    ("output tokens in the best second", "max_output_tokens_per_s", "{:.0f}"),
    ("all tokens a second", "total_token_throughput", "{:.1f}"),
    ("most requests at a time", "max_concurrent_requests", "{:.0f}"),
    ("acceptance rate", "spec_decode_acceptance_rate", "{:.1f} %"),
    ("acceptance length", "spec_decode_acceptance_length", "{:.2f}"),
    ("look-ahead hits, of 1", "look_ahead_hit_rate", "{:.2f}"),
    ("a round: draft", "mean_round_draft_ms", "{:.2f} ms"),
    ("a round: on the wire", "mean_round_wire_ms", "{:.2f} ms"),
    ("a round: queued", "mean_round_queue_ms", "{:.2f} ms"),
    ("a round: verify", "mean_round_verify_ms", "{:.2f} ms"),
    ("a round: commit", "mean_round_commit_ms", "{:.2f} ms"),
    ("waited in this client, mean", "mean_client_queue_time_ms", "{:.2f} ms"),
    ("waited in this client, 99 of 100 at most", "p99_client_queue_time_ms", "{:.2f} ms"),
)
"""What the table says first, and the names of it in JSON."""


def spread(metric: str, values_s: Sequence[float], shares: Iterable[float]) -> dict[str, Any]:
    """Mean, median, deviation and percentiles of values in seconds, by vLLM's names such as
    `p99_ttft_ms`; None where there are none."""
    values = MS * np.asarray(values_s, dtype=np.float64)
    found: dict[str, Any] = {
        "mean": values.mean, "median": lambda: np.median(values), "std": values.std,
        **{f"p{share:g}": lambda share=share: np.percentile(values, share) for share in shares},
    }  # fmt: skip
    return {
        f"{name}_{metric}_ms": float(of()) if values.size else None for name, of in found.items()
    }


class ServeReport:
    """What a load comes to, once it is over or interrupted."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.records = sorted(load.records, key=lambda record: record.index)
        """Of all requests that are over, in the order of arrival."""
        self.completed = [record for record in self.records if not record.error]
        self._lag_ms = MS * percentile(load.lags_s, 99) if load.lags_s else None

    def samples(self) -> dict[str, list[float]]:
        """By metric, s."""
        good = self.completed
        return {
            "ttft": [record.ttft_s for record in good],
            "tpot": [record.tpot_s for record in good if record.tpot_s is not None],
            "itl": [gap for record in good for gap in record.itl_s],
            "e2el": [record.latency_s for record in good],
        }

    @cached_property
    def values(self) -> dict[str, Any]:
        """All of it by its names in JSON; null = not measured. Rates are over `duration`, and over
        requests that did not fail."""
        good, load, options = self.completed, self.load, self.load.options
        inputs = sum(record.answer.input_tokens or 0 for record in good)
        outputs = sum(record.num_tokens for record in good)
        goals = dict(options.goodput)
        num_good = sum(is_good(record, goals) for record in good)
        seconds = load.duration_s or inf
        found = {
            "date": load.date,
            **load.settings,
            "interrupted": not load.is_over,
            "duration": load.duration_s,
            "completed": len(good),
            "failed": len(self.records) - len(good),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": len(good) / seconds,
            "request_goodput": num_good / seconds if goals else None,
            "output_throughput": outputs / seconds,
            "total_token_throughput": (inputs + outputs) / seconds,
        }
        for name, values in self.samples().items():
            shown = name in options.percentile_metrics
            found |= spread(name, values, options.metric_percentiles if shown else ())
        found["max_output_tokens_per_s"] = float(max(tokens_by_time(good), default=0.0))
        found["max_concurrent_requests"] = max((number for _, number in running(good)), default=0)
        waits = [r.started_s - r.due_s for r in good] if options.request_rate != inf else []
        found |= spread("client_queue_time", waits, (99.0,))
        found |= speculation_values(good) | round_values(good)
        return found | {"client_lag_p99_ms": self._lag_ms}

    def detailed_values(self) -> dict[str, object]:
        """The same with the times of each request, in the order of arrival, s; vLLM's names."""
        each = self.records
        return self.values | {
            "categories": [record.category for record in each],
            "input_lens": [record.answer.input_tokens for record in each],
            "output_lens": [0 if record.error else record.num_tokens for record in each],
            "ttfts": [0.0 if record.error else record.ttft_s for record in each],
            "itls": [record.itl_s for record in each],
            "latencies": [record.latency_s for record in each],
            "start_times": [record.started_s for record in each],
            "queue_times": [record.started_s - record.due_s for record in each],
            "errors": [record.error for record in each],
        }

    @property
    def title(self) -> str:
        """Model and backend."""
        return "{model_id} by {backend}".format(**self.load.settings)

    def report(self) -> Report:
        """With its tables."""
        tables = [
            table(self.title, ("figure", "value"), self.figures()),
            table("", *self.latencies()),
        ]
        return Report(self.values, tables, self.warnings())

    def figures(self) -> list[tuple[str, str]]:
        """Names and figures for people; what was not measured is left out."""
        values = self.values
        return [
            (name, form.format(values[key]))
            for name, key, form in _SHOWN
            if values[key] is not None
        ]

    def latencies(self) -> tuple[list[str], list[list[str]]]:
        """A heading, and a row for each metric: mean, median, deviation and percentiles, ms."""
        shares = self.load.options.metric_percentiles
        heading = ["mean", "median", "std", *(f"p{share:g}" for share in shares)]
        rows = []
        for name in METRICS:
            found = [self.values.get(f"{column}_{name}_ms") for column in heading]
            shown = ["-" if figure is None else f"{figure:.2f}" for figure in found]
            rows.append([f"{NAMES[name]} ({name.upper()})", *shown])
        return ["ms", *heading], rows

    def warnings(self) -> list[str]:
        """What forbids to take the figures as they stand, a line each."""
        found = []
        if not self.load.is_over:
            found.append(
                "warning: interrupted: these figures are of the requests that were over by then"
            )
        if (self._lag_ms or 0.0) > LAG_MS_MAX:
            found.append(
                f"warning: this client was up to {self._lag_ms:.0f} ms late itself (99 of 100 "
                "times); latencies are too long by as much: give it a core of its own, or less load"
            )
        if silent := sum(record.answer.output_tokens is None for record in self.completed):
            found.append(
                f"warning: of {silent} requests the server told no usage; each of their chunks "
                "counts as one token"
            )
        return found

    def failures(self) -> list[str]:
        """How many requests failed and why, a line each; empty if none did."""
        errors = Counter(record.error for record in self.records if record.error)
        if not errors:
            return []
        lines = [f"  {number}x {error}" for error, number in errors.items()]
        return [
            f"{errors.total()} of {len(self.records)} requests failed", *lines[:ERRORS_SHOWN]
        ]  # fmt: skip

    def page(self) -> str:
        """One HTML file that loads nothing: settings, tables and plots; the JSON object is in it,
        too, as `#result`. Raises `ConfigError` where what draws is not installed."""
        try:
            import matplotlib as mpl
            from jinja2 import Environment
        except ImportError as error:
            raise ConfigError(f"--report needs `pip install outrider[bench]` ({error})") from error
        mpl.use("svg")
        settings = {
            name.replace("_", " "): " ".join(f"{key}:{bound:g}" for key, bound in value.items())
            if isinstance(value, dict)
            else value
            for name, value in self.load.settings.items()
            if value not in (None, "", {})
        }
        template = files("benchmarks").joinpath("serve_report.html").read_text("utf-8")
        return (
            Environment(autoescape=True)
            .from_string(template)
            .render(
                title=self.title,
                date=datetime.strptime(self.load.date, "%Y%m%d-%H%M%S"),
                told=[*self.failures(), *self.warnings()],
                figures=self.figures(),
                settings=settings.items(),
                latencies=self.latencies(),
                plots=_plots(self),
                data=to_json(self.values).replace("<", "\\u003c"),
            )
        )


def is_good(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request that did not fail meets every goal, by name, ms."""
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.latency_s}
    return all(MS * measured[name] <= bound for name, bound in goals.items())


def tokens_by_time(records: Sequence[Record], bin_s: float = 1.0) -> npt.NDArray[np.float64]:
    """Tokens that were read in each `bin_s` seconds since the first of these requests was sent; an
    answer's tokens are shared out evenly over its chunks where only their sum is known. vLLM
    counts a chunk as one token here."""
    if not records:
        return np.zeros(0)
    first = min(record.started_s for record in records)
    last = max(record.ended_s for record in records)
    counts = np.zeros(ceil((last - first) / bin_s) + 1)
    for record in records:
        chunks = len(record.times.chunk_s)
        tokens: Sequence[float] = (
            record.times.chunk_tokens or [record.num_tokens / max(1, chunks)] * chunks
        )
        for at_s, number in zip(record.times.chunk_s, tokens, strict=True):
            counts[int((at_s - first) / bin_s)] += number
    return counts


def running(records: Iterable[Record]) -> list[tuple[float, int]]:
    """How many requests run from each time on at which that changes, ascending. One that ends when
    another is sent does not meet it."""
    changes: Counter[float] = Counter()
    for record in records:
        changes[record.started_s] += 1
        changes[record.ended_s] -= 1
    number, found = 0, []
    for at_s in sorted(changes):
        number += changes[at_s]
        found.append((at_s, number))
    return found


def speculation_values(records: Iterable[Record]) -> dict[str, float | None]:
    """By vLLM's names, with its units: a rate in per cent, and 1 + accepted / steps. None where no
    server said anything of it."""
    told = [
        record.answer.speculation for record in records if record.answer.speculation is not None
    ]
    steps = sum(entry.num_rounds for entry in told)
    drafted = sum(entry.num_draft_tokens for entry in told)
    accepted = sum(entry.num_accepted for entry in told)
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / steps if steps else None,
        "spec_decode_num_drafts": steps if told else None,
        "spec_decode_draft_tokens": drafted if told else None,
        "spec_decode_accepted_tokens": accepted if told else None,
    }


def round_values(records: Iterable[Record]) -> dict[str, float | None]:
    """The part of rounds that look-ahead was ready for, and the means of what a round takes, ms;
    None where rounds were not reported."""
    told = [entry for record in records for entry in record.answer.rounds or ()]

    def mean(name: str) -> float | None:
        return sum(getattr(entry, name) for entry in told) / len(told) if told else None

    return {"look_ahead_hit_rate": mean("look_ahead_hit")} | {
        f"mean_round_{name}": mean(name) for name in _ROUND_TIMES
    }


def _plots(report: ServeReport) -> dict[str, list[str]]:
    """SVG elements by the heading above them."""
    good = report.completed
    first_s = min((record.started_s for record in good), default=0.0)
    span = max((record.ended_s for record in good), default=1.0) - first_s
    bin_s = max(span / BINS, 1e-3)

    def tokens(axes: Axes) -> None:
        rates = tokens_by_time(good, bin_s) / bin_s
        axes.bar(np.arange(len(rates)) * bin_s, rates, bin_s, align="edge")
        axes.set(title="output tokens a second", xlabel="s")

    def at_a_time(axes: Axes) -> None:
        times = [(at_s - first_s, number) for at_s, number in running(good)]
        axes.step(*zip(*times, strict=True), where="post") if times else None
        axes.set(title="requests at a time", xlabel="s")

    def curve(name: str, values_s: Sequence[float]) -> Any:
        def draw(axes: Axes) -> None:
            values = [MS * value for value in values_s]
            if values:
                axes.ecdf(values)
                for share, at in ((50, "median"), (99, "p99")):
                    place = percentile(values, share)
                    axes.axvline(place, linestyle=":", label=f"{at} {place:.2f} ms")
                axes.legend(loc="lower right")
            axes.set(title=f"{NAMES[name]} ({name.upper()}): share that took at most", xlabel="ms")

        return draw

    return {
        "Distributions": [_svg(curve(name, found)) for name, found in report.samples().items()],
        "Over time": [_svg(tokens), _svg(at_a_time)],
        "Requests": [_svg(lambda axes: _timeline(axes, report.records), 12)],
    }


def _timeline(axes: Axes, records: Sequence[Record]) -> None:
    rows = records[:TIMELINE_ROWS_MAX]
    for place, record in enumerate(rows):
        first = record.ended_s if record.error else record.started_s + record.ttft_s
        kind = "tab:red" if record.error else "tab:orange"
        spans = (
            (record.due_s, record.started_s),
            (record.started_s, first),
            (first, record.ended_s),
        )
        axes.broken_barh(
            [(begin, end - begin) for begin, end in spans],
            (place, 0.8),
            facecolors=("lightgrey", kind, "tab:blue"),
        )
    axes.invert_yaxis()
    title = (
        "each request: to its first token, and from there; grey: it waited in this client; red: "
    )
    title += "it failed"
    if len(rows) < len(records):
        title += f" (the first {len(rows)} of {len(records)})"
    axes.set(title=title, xlabel="s")


def _svg(draw: Any, width: float = 6.0) -> str:
    """An `<svg>` of a plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3), layout="constrained")
    draw(figure.subplots())
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
