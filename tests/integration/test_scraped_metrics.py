"""The metrics of a running deployment change as expected."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import BadRequest
from outrider.interfaces.request import Finished, GenerateRequest, RoundReport
from outrider.registry.registry import ReplicaRecord
from outrider.speculation.sampling_params import SamplingParams
from tests.support.scraping import VOCAB, watched_stack
from tests.support.toy_engine import ToyEngine

REQUEST = GenerateRequest(
    (3, 4, 5), sampling=SamplingParams(temperature=1.0), seed=7, max_tokens=60, num_draft_tokens=3
)
HISTOGRAMS = (
    "time_to_first_token",
    "inter_token_latency",
    "e2e_request_latency",
    "request_queue_time",
    "round_draft",
    "round_wire",
    "round_queue",
    "round_verify",
    "round_commit",
)


async def test_numbers_move_with_what_happens(tmp_path: Path) -> None:
    same = ToyEngine(VOCAB, salt=1, max_model_len=256)
    async with watched_stack(tmp_path, target_s=0.03, draft_engine=same) as watched:
        await watched.registry.want({"target": 3, "draft": 1, "coordinator": 1})
        trial = ReplicaRecord("draft", "e", "h:1", "h", 1, trial_share=0.5)
        await watched.registry.announce(trial)
        for name, role in {"a": "target", "b": "target", "c": "draft", "d": "target"}.items():
            found = ReplicaRecord(role, name, "h:1", "h", 1, leaving=name == "d")
            await watched.registry.announce(found)
        await watched.stack.client.complete(REQUEST)
        before = await watched.until("outrider_replicas_present", 2, role="target")
        answers, reports = [], []
        for _ in range(2):
            request = replace(REQUEST, include_rounds=True)
            events = [event async for event in watched.stack.client.generate(request)]
            reports += [event for event in events if isinstance(event, RoundReport)]
            answers += [event for event in events if isinstance(event, Finished)]
        with pytest.raises(BadRequest):
            await watched.stack.client.complete(GenerateRequest((VOCAB,), max_tokens=1))
        after = await watched.page("coordinator")

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("outrider_generation_tokens_total") == 120
    assert grown("outrider_request_success_total", finished_reason="length") == 2
    assert grown("outrider_request_success_total", finished_reason="deadline") == 0
    assert after.value("outrider_request_failure_total", error_type="BadRequest") == 1
    # Failed requests would make latencies look shorter than they are.
    assert grown("outrider_e2e_request_latency_seconds_count") == 2
    num_rounds = sum(answer.metrics.num_rounds for answer in answers)
    drafted = sum(answer.metrics.num_draft_tokens for answer in answers)
    accepted = sum(answer.metrics.num_accepted_draft_tokens for answer in answers)
    for name, count in {
        "prompt_tokens": 2 * len(REQUEST.prompt),
        "num_rounds": num_rounds,
        "spec_decode_num_draft_tokens": drafted,
        "spec_decode_num_draft_tokens_per_pos": drafted,
        "spec_decode_num_accepted_tokens": accepted,
        "spec_decode_num_accepted_tokens_per_pos": accepted,
    }.items():
        assert grown(f"outrider_{name}_total") == count, name
    # The draft looks ahead in every round with a proposal. Some proposals are ready in time.
    hits, misses = (grown(f"outrider_look_ahead_{name}_total") for name in ("hits", "misses"))
    assert hits == sum(report.look_ahead_hit for report in reports) > 0
    assert hits + misses == grown("outrider_spec_decode_num_drafts_total") > 0
    for side in ("target", "draft"):
        # Each round has a message in each direction, with more than the session's id.
        assert grown("outrider_wire_bytes_sent_total", side=side) > 32 * num_rounds
        assert grown("outrider_wire_bytes_received_total", side=side) > 32 * num_rounds
        assert after.value("outrider_stale_answers_total", side=side) == 0
        assert after.value("outrider_resyncs_total", side=side) == 0
    assert after.value("outrider_fallback_rounds_total") == 0
    for name in HISTOGRAMS:
        assert grown(f"outrider_{name}_seconds_count") >= 2, name
    assert after.value("outrider_replicas_wanted", role="target") == 3
    for role, num in {"target": 2, "draft": 1, "coordinator": 0}.items():
        assert before.value("outrider_replicas_present", role=role) == num
    for name in ("target", "store"):
        assert after.value(f"outrider_{name}_available") == 1


async def test_an_audit_is_counted(tmp_path: Path) -> None:
    async with watched_stack(tmp_path, audit_share=1.0) as watched:
        for num in (1, 2):
            await watched.stack.client.complete(REQUEST)
            page = await watched.until("outrider_audits_total", num)
    for outcome, num in (("audited", 1), ("repeated", 1), ("failed", 0), ("busy", 0)):
        assert page.value("outrider_audits_total", outcome=outcome) == num
    assert page.value("outrider_audit_tokens_total", rule="coupled") == REQUEST.max_tokens
    assert page.value("outrider_audit_tokens_total", rule="greedy") == 0
    for name in ("surprise_nats", "entropy_nats", "variance_nats2"):
        assert page.value(f"outrider_audit_{name}_total", rule="coupled") > 10
    assert page.value("outrider_audit_impossible_tokens_total") == 0


async def test_without_a_target_and_without_a_store_the_gauges_say_so(tmp_path: Path) -> None:
    async with watched_stack(tmp_path) as watched:
        await watched.stack.client.complete(REQUEST)
        await watched.stack.target_server.stop(0)
        page = await watched.until("outrider_target_available", 0)
        assert page.value("outrider_store_available") == 1
        watched.stack.redis.stop()
        await watched.until("outrider_store_available", 0)


async def test_rounds_without_their_draft_are_counted(tmp_path: Path) -> None:
    async with watched_stack(tmp_path, look_ahead=0) as watched:
        await watched.stack.draft_server.stop(0)
        answer = await watched.stack.client.complete(REQUEST)
        page = await watched.page("coordinator")
    # The first round and the round for the last token have no proposal.
    assert page.value("outrider_fallback_rounds_total") == answer.metrics.num_rounds - 2
    assert page.value("outrider_look_ahead_misses_total") == 0
