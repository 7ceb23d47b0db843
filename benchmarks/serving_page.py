"""The page that `bench serve --report` writes: one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from .serving_plots import Bar, bars, curve, nice_step, steps, timeline
from .serving_records import Record
from .serving_report import (
    NAMES,
    ServingReport,
    failures,
    latency_rows,
    shown_figures,
    warnings,
)
from .serving_statistics import MS, Samples, running, tokens_by_time

TIMELINE_ROWS_MAX: Final = 400
"""Requests on the timeline: the first ones."""
BINS: Final = 48
"""Of a rate over time, at most."""
_STYLE: Final = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2128; --soft: #667; --grid: #e4e7ec;
  --main: #2f6fde; --area: #2f6fdeb0; --fill: #f0a63c; --bad: #d23f45; --wait: #b9c0cb; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --text: #e6e9ee; --soft: #98a2b1;
  --grid: #2a303a; --main: #7aa7ff; --area: #7aa7ffa8; --fill: #d99a3f; --bad: #ff7278;
  --wait: #4a5361; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--back);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; color: var(--soft); } .told { color: var(--bad); white-space: pre-wrap; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--grid); text-align: left;
  font-weight: normal; } td { text-align: right; } thead th { color: var(--soft); }
thead th + th { text-align: right; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .85rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .label { fill: var(--text); stroke: var(--back); stroke-width: 3px; paint-order: stroke; }
.grid { stroke: var(--grid); } .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.line { stroke: var(--main); stroke-width: 1.6; fill: none; } .area { fill: var(--area); }
.fill { fill: var(--fill); } .bad { fill: var(--bad); } .wait { fill: var(--wait); }
.first { fill: var(--text); }
"""


def page(report: ServingReport) -> str:
    """The whole file. What stands in it as text is what the table says; the JSON object is in it,
    too, as `#result`."""
    settings = report.settings
    title = f"{settings['model_id']} by {settings['backend']}"
    told = [*failures(report), *warnings(report)]
    data = report.to_json().replace("<", "\\u003c")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>bench serve: {escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>outrider bench serve, {escape(_moment(report.date))}</p>",
        *(f'<p class="told">{escape(line)}</p>' for line in told),
        '<div class="row"><div><h2>Results</h2>',
        _pairs(shown_figures(report)),
        "</div><div><h2>Settings</h2>",
        _pairs(_settings(report)),
        "</div></div><h2>Latencies</h2>",
        _table(*latency_rows(report)),
        _plots(report),
        f'<script type="application/json" id="result">{data}</script></body></html>',
    ]
    return "\n".join(parts) + "\n"


def _plots(report: ServingReport) -> str:
    good = report.completed
    samples = Samples.of(good)
    spreads = report.spreads()
    curves = []
    for name in ("ttft", "itl", "e2el", "tpot"):
        spread = spreads[name]
        marks = [("median", spread.median)]
        marks += [(f"p{share:g}", value) for share, value in spread.percentiles[:2]]
        values = [MS * value for value in getattr(samples, name)]
        shown = [(mark, value) for mark, value in marks if value is not None]
        caption = f"{NAMES[name]} ({name.upper()}): the part of them that took at most so long"
        curves.append(_figure(caption, curve(values, "ms", shown)))
    bin_s = _bin_s(good)
    rates = [float(count) / bin_s for count in tokens_by_time(good, bin_s)]
    began_s = min((record.started_s for record in good), default=0.0)
    number = [(at_s - began_s, float(count)) for at_s, count in running(good)]
    over_time = [
        _figure(f"output tokens a second, by {bin_s:g} s", bars(rates, bin_s)),
        _figure("requests at a time", steps(number)),
    ]
    rows = report.records[:TIMELINE_ROWS_MAX]
    caption = (
        "each request: orange to its first token, blue from there; grey: it waited in this client; "
        "red: it failed"
    )
    if len(rows) < len(report.records):
        caption += f" (the first {len(rows)} of {len(report.records)})"
    return (
        f'<h2>Distributions</h2><div class="row">{"".join(curves)}</div>'
        f'<h2>Over time</h2><div class="row">{"".join(over_time)}</div>'
        f"<h2>Requests</h2>{_figure(caption, timeline([_bar(record) for record in rows]))}"
    )


def _bin_s(records: Sequence[Record]) -> float:
    """A round number of seconds of which `BINS` are enough."""
    if not records:
        return 1.0
    span = max(r.ended_s for r in records) - min(r.started_s for r in records)
    return nice_step(span, BINS) if span > 0 else 1.0


def _bar(record: Record) -> Bar:
    told = f"request {record.index} ({record.category}): "
    if record.error:
        told += f"failed after {record.latency_s:.3f} s: {record.error}"
    else:
        told += (
            f"{record.num_tokens} tokens, first after {record.ttft_s:.3f} s, all after "
            f"{record.latency_s:.3f} s"
        )
    first_s = record.ended_s if record.error else record.started_s + record.ttft_s
    return Bar(record.due_s, record.started_s, first_s, record.ended_s, bool(record.error), told)


def _settings(report: ServingReport) -> list[tuple[str, str]]:
    shown = []
    for name, value in report.settings.items():
        if isinstance(value, dict):
            value = " ".join(f"{key}:{goal:g}" for key, goal in value.items())
        if value not in (None, ""):
            shown.append((name.replace("_", " "), str(value)))
    return shown


def _moment(date: str) -> str:
    """YYYYMMDD-HHMMSS for people."""
    day, _, clock = date.partition("-")
    return f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}"


def _figure(caption: str, drawn: str) -> str:
    return f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    lines = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(c)}</td>' for c in row[1:])}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{first}</tr></thead><tbody>{lines}</tbody></table>"
