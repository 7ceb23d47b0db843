"""The load generators: their commands, their reports, and whether a correct server could have led
to these reports."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

RETOKENIZED_SHARE: Final = 0.5
"""A tool must find, on average, at least this share of the requested tokens in the text. It
tokenizes the text itself, and special tokens are not in the text."""
STREAMS: Final = 2
PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})
"""Names of variables, in lower case, that keep the tools offline."""
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class Asked:
    endpoint: str
    requests: int
    input_tokens: int = 48
    """Tokens of the generated prompt, without the chat template."""
    output_tokens: int = 16
    """Exact number of tokens of each answer, as every run sets `ignore_eos`."""


@dataclass(frozen=True)
class Outcome:
    """Figures of a tool's report. Each sequence has a value for each completed request."""

    completed: int
    failed: int
    input_tokens: Sequence[float]
    output_tokens: Sequence[float]
    chunks: Sequence[float]
    ttft_ms: Sequence[float]
    text_tokens: Sequence[float] = ()
    """Tokens of each answer's text by the tool's own tokenizer, if it counts them."""
    accepted: float | None = None
    """Tokens a round, if the tool reads the server's figures of speculative decoding."""


def faults(asked: Asked, found: Outcome) -> list[str]:
    """The faults, one a line; empty = none."""
    num, most = asked.requests, asked.output_tokens
    mean = sum(found.text_tokens) / len(found.text_tokens) if found.text_tokens else most
    checks = {
        "requests": (found.completed, found.failed) == (num, 0),
        "input_tokens": all(n >= asked.input_tokens / 2 for n in found.input_tokens),
        "output_tokens": set(found.output_tokens) == {most},
        "chunks": all(1 <= n <= most for n in found.chunks),
        "ttft_ms": all(ms > 0 for ms in found.ttft_ms),
        "text_tokens": RETOKENIZED_SHARE * most <= mean <= 2 * most,
        "accepted": found.accepted is None or found.accepted >= 1,
    }
    for name in ("input_tokens", "output_tokens", "chunks", "ttft_ms"):
        checks[name] &= len(getattr(found, name)) == num
    return [f"{name} are wrong: {asked}, {found}" for name, is_ok in checks.items() if not is_ok]


def command_of(tool: str, asked: Asked, record: Mapping[str, Any], out: Path) -> list[str]:
    """The tool's arguments, for a report in `out`, against the recorded demo."""
    url, model = f"http://{record['http_address']}", record["served_model_name"]
    tokenizer = record["tokenizer_directory"]
    if tool == "guidellm":
        route = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[asked.endpoint]
        data = f"prompt_tokens={asked.input_tokens},output_tokens={asked.output_tokens}"
        return [
            "run",
            "--backend",
            f"kind=openai_http,target={url},model={model},request_format={route}",
            "--profile",
            f"kind=concurrent,streams={STREAMS}",
            "--constraint",
            f"kind=max_requests,count={asked.requests}",
            "--tokenizer",
            f"kind=huggingface_auto,model={tokenizer}",
            "--data",
            f"kind=synthetic_text,{data}",
            "--output",
            f"kind=json,path={out / 'report.json'}",
            "--disable-console",
        ]
    return [
        "profile",
        "--model",
        model,
        "--url",
        url,
        "--endpoint-type",
        asked.endpoint,
        "--streaming",
        "--extra-inputs",
        "ignore_eos:true",
        "--tokenizer",
        tokenizer,
        "--concurrency",
        str(STREAMS),
        "--request-count",
        str(asked.requests),
        "--prompt-input-tokens-mean",
        str(asked.input_tokens),
        "--prompt-output-tokens-mean",
        str(asked.output_tokens),
        "--random-seed",
        "1",
        "--ui-type",
        "none",
        "--no-gpu-telemetry",
        "--output-artifact-dir",
        str(out),
    ]


def environment_of(tool: str, home: Path) -> dict[str, str]:
    """The tool's environment variables: no account or cache of a model hub except in `home`. In
    offline mode aiperf would take a tokenizer only from its cache, not from a directory."""
    left_out = PROXIES | {name.lower() for name in OFFLINE}
    kept = {name: value for name, value in os.environ.items() if name.lower() not in left_out}
    return kept | {"HF_HOME": str(home)} | ({} if tool == "aiperf" else OFFLINE)


def from_guidellm(out: Path) -> Outcome:
    """Reads the tool's report. Raises `LookupError` or `TypeError` if it is invalid."""
    (benchmark,) = json.loads((out / "report.json").read_text("utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    requests = benchmark["requests"]["successful"]
    spoken = [request["response_metrics"]["speculative_decoding"] for request in requests]
    steps = sum(told["num_spec_steps"] for told in spoken)
    accepted = sum(told["num_accepted_draft_tokens"] for told in spoken)
    return Outcome(
        completed=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        input_tokens=[request["input_metrics"]["text_tokens"] for request in requests],
        output_tokens=[request["output_metrics"]["text_tokens"] for request in requests],
        chunks=[request["info"]["timings"]["token_iterations"] for request in requests],
        ttft_ms=[request["time_to_first_token_ms"] for request in requests],
        accepted=1 + accepted / steps if steps else None,
    )


def from_aiperf(out: Path) -> Outcome:
    report = json.loads((out / "profile_export_aiperf.json").read_text("utf-8"))
    lines = (out / "profile_export.jsonl").read_text("utf-8").splitlines()
    good = [one["metrics"] for one in map(json.loads, lines) if not one.get("error")]
    failed = (report.get("error_request_count") or {"avg": 0})["avg"]

    def each(name: str) -> list[float]:
        return [metrics[name]["value"] for metrics in good if name in metrics]

    return Outcome(
        completed=int(report["request_count"]["avg"]),
        failed=int(failed) + len(report["error_summary"]) + bool(report["was_cancelled"]),
        input_tokens=each("usage_prompt_tokens"),
        output_tokens=each("usage_completion_tokens"),
        # The first chunk, and one gap for each later chunk.
        chunks=[1 + len(m["inter_chunk_latency"]["value"]) for m in good],
        ttft_ms=each("time_to_first_token"),
        text_tokens=each("output_sequence_length"),
    )


READERS: Final[dict[str, Callable[[Path], Outcome]]] = {
    "guidellm": from_guidellm,
    "aiperf": from_aiperf,
}
