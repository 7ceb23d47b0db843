"""What a load generator's own report says, and whether a right server can have brought it about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

RETOKENIZED_SHARE: Final = 0.5
"""Of what was asked for: so many tokens a tool must find at least in the text that it got, on
average. A text is split anew as its tokens were not, and special tokens are not in it."""


@dataclass(frozen=True)
class Asked:
    """Of one run."""

    endpoint: str
    """`chat` or `completions`."""
    requests: int
    input_tokens: int
    """Of the made-up prompt, without what a chat template adds."""
    output_tokens: int
    """Of each answer, exactly: every run says `ignore_eos`."""


@dataclass(frozen=True)
class Outcome:
    """As the tool's report has it."""

    completed: int
    failed: int
    """Refused, broken off, or never ended."""
    input_tokens: Sequence[float]
    """Of each completed request, as the server counts."""
    output_tokens: Sequence[float]
    chunks: Sequence[float]
    """With tokens, of each."""
    ttft_ms: Sequence[float]
    text_tokens: Sequence[float] = ()
    """Of each answer's text by the tool's own tokenizer, where it counts them."""
    accepted: float | None = None
    """Tokens a round, where the tool reads what a server says of its speculation."""


def faults(asked: Asked, found: Outcome) -> list[str]:
    """What is wrong, a line each; empty if nothing is."""
    wrong = []
    if found.failed:
        wrong.append(f"{found.failed} requests failed")
    if found.completed != asked.requests:
        wrong.append(f"{found.completed} of {asked.requests} requests completed")
    for name in ("input_tokens", "output_tokens", "chunks", "ttft_ms"):
        if (told := len(getattr(found, name))) != found.completed:
            wrong += [f"{name}: {told} of {found.completed} are told"]
    if set(found.output_tokens) - {asked.output_tokens}:
        wrong.append(f"output_tokens: {list(found.output_tokens)}, not {asked.output_tokens}")
    if any(number < asked.input_tokens / 2 for number in found.input_tokens):
        wrong.append(f"input_tokens: {list(found.input_tokens)} of some {asked.input_tokens}")
    if any(not 1 <= number <= asked.output_tokens for number in found.chunks):
        wrong.append(f"chunks: {list(found.chunks)} for {asked.output_tokens} tokens")
    if any(value <= 0 for value in found.ttft_ms):
        wrong.append(f"ttft_ms: {list(found.ttft_ms)}")
    if found.text_tokens:
        mean = sum(found.text_tokens) / len(found.text_tokens)
        if not RETOKENIZED_SHARE * asked.output_tokens <= mean <= 2 * asked.output_tokens:
            wrong.append(f"text_tokens: {list(found.text_tokens)} for {asked.output_tokens}")
    if found.accepted is not None and found.accepted < 1:
        wrong.append(f"{found.accepted} tokens a round; each brings one")
    return wrong


def from_guidellm(report: dict[str, Any]) -> Outcome:
    """From the JSON that `guidellm run --output kind=json` writes. Raises `LookupError` or
    `TypeError` where it is none."""
    (benchmark,) = report["benchmarks"]
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


def from_aiperf(report: dict[str, Any], records: Sequence[dict[str, Any]]) -> Outcome:
    """From aiperf's `profile_export_aiperf.json`, and the lines of its `profile_export.jsonl`.
    Raises as `from_guidellm`."""
    good = [record["metrics"] for record in records if not record.get("error")]
    failed = (report.get("error_request_count") or {"avg": 0})["avg"]

    def each(name: str) -> list[float]:
        return [metrics[name]["value"] for metrics in good if name in metrics]

    return Outcome(
        completed=int(report["request_count"]["avg"]),
        failed=int(failed) + len(report["error_summary"]) + bool(report["was_cancelled"]),
        input_tokens=each("usage_prompt_tokens"),
        output_tokens=each("usage_completion_tokens"),
        # The first chunk, and one gap for each that follows.
        chunks=[1 + len(m["inter_chunk_latency"]["value"]) for m in good],
        ttft_ms=each("time_to_first_token"),
        text_tokens=each("output_sequence_length"),
    )
