"""`bench serve` by gRPC, on services in this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from models import byte_level_tokenizer
from stack import running_stack
from toy_engine import ToyEngine

from benchmarks.report import to_json
from benchmarks.serve import Load, ServeOptions
from benchmarks.serve_clients import GRPC_BACKEND, GrpcServingClient
from benchmarks.serve_report import ServeReport
from deploy.cli.main import main
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.tokenizer import TokenizerText

VOCAB = 320


async def test_a_load_by_grpc_is_counted_as_the_coordinator_does(tmp_path: Path) -> None:
    """Tokens, rounds, accepted tokens and look-ahead of every request; chunks hold several tokens
    where drafts are accepted."""
    options = ServeOptions(
        num_prompts=12, max_concurrency=4, max_tokens=16, ignore_eos=True, rounds=True,
        num_draft_tokens=3, raw=True, goodput=(("e2el", 60_000.0),),
    )  # fmt: skip
    target = ToyEngine(VOCAB, salt=1, max_model_len=4096)
    draft = ToyEngine(VOCAB, salt=1, max_model_len=4096)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    async with running_stack(target, draft, tmp_path, text=text) as stack:
        run = Load(
            options,
            GrpcServingClient(stack.client, options),
            options.shown(GRPC_BACKEND, "here:1", "model"),
        )
        await run.measure()
    report = ServeReport(run)
    found: dict[str, Any] = json.loads(to_json(report.values))
    assert (found["completed"], found["failed"], report.failures()) == (12, 0, [])
    assert found["total_output_tokens"] == 12 * 16
    assert (
        found["total_input_tokens"]
        == sum(record.answer.input_tokens or 0 for record in run.records)
        > 0
    )
    for record in run.records:
        told = record.answer
        assert record.times.chunk_tokens is not None
        assert sum(record.times.chunk_tokens) == told.output_tokens == 16
        assert told.rounds is not None
        assert told.speculation is not None
        assert len(told.rounds) == told.speculation.num_rounds
        assert told.speculation.num_accepted == 16 - told.speculation.num_rounds
    assert any(len(record.times.chunk_s) < 16 for record in run.records)
    rounds = found["spec_decode_num_drafts"]
    assert found["spec_decode_acceptance_length"] == pytest.approx(12 * 16 / rounds, abs=1e-3)
    assert 0 < found["spec_decode_acceptance_rate"] <= 100
    assert 0 <= found["look_ahead_hit_rate"] <= 1
    assert found["mean_round_verify_ms"] > 0
    assert found["request_goodput"] == found["request_throughput"]
    assert found["max_concurrent_requests"] <= 4
    assert len(report.report().shown) == 2
    assert not [line for line in report.warnings() if "usage" in line]


async def test_what_a_coordinator_refuses_has_failed(tmp_path: Path) -> None:
    """With its own words; no report of rounds where none was asked for."""
    options = ServeOptions(num_prompts=3, max_tokens=16, raw=True)
    engine = ToyEngine(VOCAB, salt=1, max_model_len=64)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 500}\n', "utf-8")
    options = ServeOptions(prompts=file, max_tokens=16, raw=True)
    async with running_stack(engine, None, tmp_path / "redis", text=text) as stack:
        run = Load(
            options,
            GrpcServingClient(stack.client, options),
            options.shown(GRPC_BACKEND, "here:1", "model"),
        )
        await run.measure()
    errors = {record.index: record.error for record in run.records}
    assert errors[0] == ""
    assert errors[1].startswith("BadRequest: max_tokens: ")
    assert all(record.answer.rounds is None for record in run.records)
    assert ServeReport(run).failures()[0] == "1 of 2 requests failed"


async def test_the_command_calls_the_server_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = EmulatedSpec(vocab_size=VOCAB, max_model_len=4096, verify_ms=1.0)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    async with running_stack(EmulatedEngine(spec, "target"), None, tmp_path, text=text) as stack:
        words = [
            "bench", "serve", "--server", stack.server.address, "--json", "--num-prompts", "6",
            "--max-tokens", "8", "--ignore-eos", "--num-warmups", "1", "--num-draft-tokens", "0",
        ]  # fmt: skip
        assert await asyncio.to_thread(main, words) == 0
    out, _ = capsys.readouterr()
    found = json.loads(out)
    assert (found["backend"], found["model_id"]) == ("outrider-grpc", "model")
    assert found["server"] == stack.server.address
    assert (found["completed"], found["total_output_tokens"]) == (6, 48)
    assert found["spec_decode_acceptance_length"] == 1.0
    assert found["look_ahead_hit_rate"] is None
