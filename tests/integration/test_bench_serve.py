"""`bench serve` by gRPC, on services in this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from stack import VOCAB, running_stack, toy_text
from toy_engine import ToyEngine

from benchmarks.clients import GrpcClient
from benchmarks.report import Report, to_json
from benchmarks.serve import Load, ServeOptions, measure, report
from deploy.cli.main import main
from outrider.client import Client
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec


async def load(options: ServeOptions, client: Client) -> tuple[Load, Report]:
    found = await measure(options, GrpcClient(client, raw=True), lambda line: None)
    return found, report(options, options.settings("outrider-grpc", "here:1", "model"), found)


async def test_a_load_by_grpc_is_counted_as_the_coordinator_does(tmp_path: Path) -> None:
    """Tokens, rounds and accepted tokens of every request; chunks hold several tokens where drafts
    are accepted."""
    options = ServeOptions(
        num_prompts=12, max_concurrency=4, max_tokens=16, ignore_eos=True, num_draft_tokens=3,
        goodput=(("e2el", 60_000.0),),
    )  # fmt: skip
    target = ToyEngine(VOCAB, salt=1, max_model_len=4096)
    draft = ToyEngine(VOCAB, salt=1, max_model_len=4096)
    text = toy_text()
    async with running_stack(target, draft, tmp_path, text=text) as stack:
        done, told = await load(options, stack.client)
    found: dict[str, Any] = json.loads(to_json(told.values))
    assert (found["completed"], found["failed"], done.errors) == (12, 0, {})
    assert found["total_output_tokens"] == 12 * 16
    assert found["total_input_tokens"] > 0
    for _, one in done.completed:
        assert one.num_tokens == 16
        assert one.num_accepted_draft_tokens == 16 - one.num_rounds
    assert any(len(one.chunk_s) < 16 for _, one in done.completed)
    rounds = found["spec_decode_num_drafts"]
    assert found["spec_decode_acceptance_length"] == pytest.approx(12 * 16 / rounds, abs=1e-3)
    assert 0 < found["spec_decode_acceptance_rate"] <= 100
    assert found["request_goodput"] == found["request_throughput"]
    assert found["max_concurrent_requests"] <= 4


async def test_what_a_coordinator_refuses_has_failed(tmp_path: Path) -> None:
    """With its own words."""
    engine = ToyEngine(VOCAB, salt=1, max_model_len=64)
    text = toy_text()
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 500}\n', "utf-8")
    options = ServeOptions(prompts=file, max_tokens=16)
    async with running_stack(engine, None, tmp_path / "redis", text=text) as stack:
        done, told = await load(options, stack.client)
    assert len(done.completed) == 1
    assert told.warnings[0].startswith("warning: 1 of 2 requests failed: 1x max_tokens: ")


async def test_the_command_calls_the_server_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = EmulatedSpec(vocab_size=VOCAB, max_model_len=4096, verify_ms=1.0)
    text = toy_text()
    async with running_stack(EmulatedEngine(spec, "target"), None, tmp_path, text=text) as stack:
        words = [
            "bench", "serve", "--server", stack.server.address, "--json", "--num-prompts", "6",
            "--max-tokens", "8", "--ignore-eos", "--num-draft-tokens", "0",
        ]  # fmt: skip
        assert await asyncio.to_thread(main, words) == 0
    out, _ = capsys.readouterr()
    found = json.loads(out)
    assert (found["backend"], found["model_id"]) == ("outrider-grpc", "model")
    assert found["server"] == stack.server.address
    assert (found["completed"], found["total_output_tokens"]) == (6, 48)
    assert found["spec_decode_acceptance_length"] == 1.0
