"""What `make test-clients` reads from reports of load generators, and what it holds for wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.clients.outcome import Asked, Outcome, faults, from_aiperf, from_guidellm

ASKED = Asked("chat", requests=2, input_tokens=48, output_tokens=16)
RIGHT = Outcome(
    completed=2,
    failed=0,
    input_tokens=[78, 77],
    output_tokens=[16, 16],
    chunks=[12, 16],
    ttft_ms=[900.5, 1000.0],
)


def guidellm_request(steps: int, accepted: int) -> dict[str, Any]:
    told = {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted}
    return {
        "input_metrics": {"text_tokens": 78},
        "output_metrics": {"text_tokens": 16},
        "info": {"timings": {"token_iterations": steps, "request_iterations": steps + 3}},
        "time_to_first_token_ms": 1000.0,
        "response_metrics": {"speculative_decoding": told},
    }


def test_a_report_of_guidellm_is_read() -> None:
    totals = {"successful": 2, "errored": 1, "incomplete": 3, "total": 6}
    requests = [guidellm_request(12, 4), guidellm_request(16, 0)]
    report = {
        "benchmarks": [
            {
                "metrics": {"request_totals": totals},
                "requests": {"successful": requests, "errored": [{}], "incomplete": [{}] * 3},
            }
        ]
    }
    found = from_guidellm(report)
    assert (found.completed, found.failed) == (2, 4)
    assert (found.chunks, found.output_tokens) == ([12, 16], [16, 16])
    assert found.accepted == pytest.approx(1 + 4 / 28)
    assert faults(ASKED, dataclasses.replace(found, failed=0)) == []


def aiperf_record(tokens: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "usage_prompt_tokens": 78,
        "usage_completion_tokens": tokens,
        "output_sequence_length": tokens - 1,
        "time_to_first_token": 900.0,
        "inter_chunk_latency": [80.0] * 11,
    }
    metrics = {name: {"value": value, "unit": ""} for name, value in values.items()}
    return {"metadata": {}, "metrics": metrics}


def test_a_report_of_aiperf_is_read() -> None:
    """Its errors are counted, listed, and in records without the usual figures."""
    report: dict[str, Any] = {
        "request_count": {"unit": "requests", "avg": 2.0},
        "error_summary": [],
        "was_cancelled": False,
    }
    records = [aiperf_record(16), aiperf_record(16)]
    found = from_aiperf(report, records)
    assert (found.completed, found.failed) == (2, 0)
    assert found.chunks == [12, 12]
    assert found.text_tokens == [15, 15]
    assert faults(ASKED, found) == []
    for broken in ({"error_request_count": {"avg": 1.0}}, {"was_cancelled": True}):
        assert from_aiperf(report | broken, records).failed == 1
    one = [aiperf_record(16), {"metadata": {}, "metrics": {}, "error": {"code": 500}}]
    assert "ttft_ms: 1 of 2 are told" in faults(ASKED, from_aiperf(report, one))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"failed": 1}, "1 requests failed"),
        ({"completed": 1}, "1 of 2 requests completed"),
        ({"output_tokens": [16, 15]}, "output_tokens"),
        ({"output_tokens": []}, "output_tokens"),
        ({"input_tokens": [78, 3]}, "input_tokens"),
        ({"chunks": [17, 12]}, "chunks"),
        ({"chunks": [0, 12]}, "chunks"),
        ({"ttft_ms": [0.0, 900.0]}, "ttft_ms"),
        ({"text_tokens": [1, 2]}, "text_tokens"),
        ({"text_tokens": [40, 40]}, "text_tokens"),
        ({"accepted": 0.5}, "0.5 tokens a round"),
    ],
)
def test_each_wrong_figure_is_told(change: dict[str, Any], told: str) -> None:
    assert faults(ASKED, RIGHT) == []
    wrong = faults(ASKED, dataclasses.replace(RIGHT, **change))
    assert any(line.startswith(told) for line in wrong), wrong
