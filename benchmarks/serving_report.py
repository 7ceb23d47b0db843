"""The result of `bench serve`: vLLM's names in JSON, a table for people, and what to beware of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from .figures import figures_table, percentile, to_json
from .serving import METRICS, ServingOptions
from .serving_records import Record
from .serving_statistics import (
    MS,
    Samples,
    Spread,
    first_errors,
    is_good,
    round_values,
    running,
    speculation_values,
    tokens_by_time,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """One load. `values` defines the figures."""

    date: str
    """When it began, as vLLM writes it: YYYYMMDD-HHMMSS, local time."""
    settings: Mapping[str, object]
    """By `serving.shown_settings`."""
    options: ServingOptions
    duration_s: float
    """From the first moment to the last request's end."""
    records: tuple[Record, ...]
    """Of all requests that are over, in the order of arrival."""
    is_over: bool
    """False where the load was interrupted: requests that ran then are in no figure."""
    lags_s: Sequence[float]
    """How late this client itself was, at times that are evenly spread."""

    @property
    def completed(self) -> list[Record]:
        """Those that did not fail."""
        return [record for record in self.records if not record.error]

    def spreads(self) -> dict[str, Spread]:
        """By metric, with the percentiles that were asked for."""
        samples = Samples.of(self.completed)
        return {
            name: Spread.of(
                getattr(samples, name),
                self.options.metric_percentiles if name in self.options.percentile_metrics else (),
            )
            for name in METRICS
        }

    def values(self) -> dict[str, object]:
        """All of it by its names in JSON; null = not measured. `serving_statistics` says what the
        latencies are; rates are over `duration`, and over requests that did not fail."""
        good, seconds = self.completed, self.duration_s
        inputs = sum(record.input_tokens or 0 for record in good)
        outputs = sum(record.num_tokens for record in good)
        goals = dict(self.options.goodput)
        per_second = tokens_by_time(good)
        found: dict[str, object] = {
            "date": self.date,
            **self.settings,
            "interrupted": not self.is_over,
            "duration": seconds,
            "completed": len(good),
            "failed": len(self.records) - len(good),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": _rate(len(good), seconds),
            "request_goodput": (
                _rate(sum(is_good(record, goals) for record in good), seconds) if goals else None
            ),
            "output_throughput": _rate(outputs, seconds),
            "total_token_throughput": _rate(inputs + outputs, seconds),
        }
        for name, spread in self.spreads().items():
            found |= spread.named(name)
        found["max_output_tokens_per_s"] = float(per_second.max()) if per_second.size else 0.0
        found["max_concurrent_requests"] = max((number for _, number in running(good)), default=0)
        found |= self._queue_values()
        found |= speculation_values(good)
        found |= round_values(good)
        found["client_lag_p99_ms"] = self.lag_p99_ms
        return found

    @property
    def lag_p99_ms(self) -> float | None:
        """How late this client was, at most in 99 of 100 looks."""
        return MS * percentile(self.lags_s, 99) if self.lags_s else None

    def _queue_values(self) -> dict[str, float | None]:
        """How long requests of a stated rate waited in this client before they were sent."""
        if self.options.request_rate == float("inf"):
            return Spread.of((), (99.0,)).named("client_queue_time")
        waits = [record.started_s - record.due_s for record in self.completed]
        return Spread.of(waits, (99.0,)).named("client_queue_time")

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(self.values())

    def to_detailed_json(self) -> str:
        """The same with the times of each request, in the order of arrival, s; vLLM's names."""
        each = self.records
        return to_json(
            self.values()
            | {
                "categories": [record.category for record in each],
                "input_lens": [record.input_tokens for record in each],
                "output_lens": [0 if record.error else record.num_tokens for record in each],
                "ttfts": [0.0 if record.error else record.ttft_s for record in each],
                "itls": [record.itl_s for record in each],
                "latencies": [record.latency_s for record in each],
                "start_times": [record.started_s for record in each],
                "queue_times": [record.started_s - record.due_s for record in each],
                "errors": [record.error for record in each],
            }
        )


def _rate(number: float, seconds: float) -> float:
    return number / seconds if seconds > 0 else 0.0


def shown_figures(report: ServingReport) -> list[tuple[str, str]]:
    """Names and figures for people; what was not measured is left out."""
    values = report.values()
    return [
        (name, form.format(values[key])) for name, key, form in _SHOWN if values[key] is not None
    ]


def latency_rows(report: ServingReport) -> tuple[list[str], list[list[str]]]:
    """A heading, and a row for each metric: mean, median, deviation and percentiles, ms."""
    shares = [f"p{share:g}" for share in report.options.metric_percentiles]
    heading = ["ms", "mean", "median", "std", *shares]
    rows = []
    for name, spread in report.spreads().items():
        ends: dict[str, float | None] = {f"p{share:g}": end for share, end in spread.percentiles}
        figures = [spread.mean, spread.median, spread.std, *(ends.get(share) for share in shares)]
        shown = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
        rows.append([f"{NAMES[name]} ({name.upper()})", *shown])
    return heading, rows


def render(report: ServingReport) -> tuple[Table, Table]:
    """The report for people."""
    settings = report.settings
    title = f"{settings['model_id']} by {settings['backend']}"
    heading, rows = latency_rows(report)
    latencies = Table()
    latencies.add_column(heading[0])
    for name in heading[1:]:
        latencies.add_column(name, justify="right")
    for row in rows:
        latencies.add_row(*row)
    return figures_table(title, shown_figures(report)), latencies


def warnings(report: ServingReport) -> list[str]:
    """What forbids to take the figures as they stand, a line each."""
    found = []
    if not report.is_over:
        found.append("interrupted: these figures are of the requests that were over by then")
    lag = report.lag_p99_ms
    if lag is not None and lag > LAG_MS_MAX:
        found.append(
            f"warning: this client was up to {lag:.0f} ms late itself (99 of 100 times); latencies "
            "are too long by as much: give it a core of its own, or less load"
        )
    silent = sum(record.output_tokens is None for record in report.completed)
    if silent:
        found.append(
            f"warning: of {silent} requests the server told no usage; each of their chunks counts "
            "as one token"
        )
    return found


def failures(report: ServingReport) -> list[str]:
    """How many requests failed and why, a line each; empty if none did."""
    failed = [record for record in report.records if record.error]
    if not failed:
        return []
    lines = [f"{len(failed)} of {len(report.records)} requests failed"]
    lines += [f"  {number}x {error}" for error, number in first_errors(failed, ERRORS_SHOWN)]
    return lines
