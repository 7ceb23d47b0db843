"""`bench serve` by gRPC and `bench front-door`, on services in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from models import byte_level_tokenizer
from stack import running_stack
from toy_engine import ToyEngine

from benchmarks.front_door import FrontDoorOptions
from benchmarks.front_door_stack import StampedCoordinator
from benchmarks.front_door_turns import run as take_turns
from benchmarks.serving import ServingOptions, shown_settings
from benchmarks.serving_grpc import BACKEND, GrpcServingClient
from benchmarks.serving_load import ServingRun
from benchmarks.serving_report import ServingReport, failures, render, warnings
from deploy.cli.main import main
from outrider.client import Client, GenerateRequest, InProcessTransport, Tokens
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.errors import Unavailable
from outrider.limits import ANSWERS_HELD_MS
from outrider.tokenizer import TokenizerText

VOCAB = 320


def report_of(run: ServingRun, options: ServingOptions) -> ServingReport:
    return ServingReport(
        date="20261122-101112",
        settings=shown_settings(options, BACKEND, "here:1", "model"),
        options=options,
        duration_s=run.duration_s,
        records=tuple(run.records),
        is_over=True,
        lags_s=run.lags_s,
    )


async def test_a_load_by_grpc_is_counted_as_the_coordinator_does(tmp_path: Path) -> None:
    """Tokens, rounds, accepted tokens and look-ahead of every request; chunks hold several tokens
    where drafts are accepted."""
    options = ServingOptions(
        num_prompts=12, max_concurrency=4, max_tokens=16, ignore_eos=True, rounds=True,
        num_draft_tokens=3, raw=True, goodput=(("e2el", 60_000.0),),
    )  # fmt: skip
    target = ToyEngine(VOCAB, salt=1, max_model_len=4096)
    draft = ToyEngine(VOCAB, salt=1, max_model_len=4096)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    async with running_stack(target, draft, tmp_path, text=text) as stack:
        run = ServingRun(options, GrpcServingClient(stack.client, options))
        await run.measure()
    report = report_of(run, options)
    found: dict[str, Any] = json.loads(report.to_json())
    assert (found["completed"], found["failed"], failures(report)) == (12, 0, [])
    assert found["total_output_tokens"] == 12 * 16
    assert (
        found["total_input_tokens"] == sum(record.input_tokens or 0 for record in run.records) > 0
    )
    for record in run.records:
        assert record.chunk_tokens is not None
        assert sum(record.chunk_tokens) == record.output_tokens == 16
        assert record.rounds is not None
        assert record.speculation is not None
        assert record.rounds.num_rounds == record.speculation.num_rounds
        assert record.speculation.num_accepted == 16 - record.speculation.num_rounds
    assert any(len(record.chunk_s) < 16 for record in run.records)
    rounds = found["spec_decode_num_drafts"]
    assert found["spec_decode_acceptance_length"] == pytest.approx(12 * 16 / rounds, abs=1e-3)
    assert 0 < found["spec_decode_acceptance_rate"] <= 100
    assert 0 <= found["look_ahead_hit_rate"] <= 1
    assert found["mean_round_verify_ms"] > 0
    assert found["request_goodput"] == found["request_throughput"]
    assert found["max_concurrent_requests"] <= 4
    assert len(render(report)) == 2
    assert not [line for line in warnings(report) if "usage" in line]


async def test_what_a_coordinator_refuses_has_failed(tmp_path: Path) -> None:
    """With its own words; no report of rounds where none was asked for."""
    options = ServingOptions(num_prompts=3, max_tokens=16, raw=True)
    engine = ToyEngine(VOCAB, salt=1, max_model_len=64)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 500}\n', "utf-8")
    options = ServingOptions(prompts=file, max_tokens=16, raw=True)
    async with running_stack(engine, None, tmp_path / "redis", text=text) as stack:
        run = ServingRun(options, GrpcServingClient(stack.client, options))
        await run.measure()
    errors = {record.index: record.error for record in run.records}
    assert errors[0] == ""
    assert errors[1].startswith("BadRequest: max_tokens: ")
    assert all(record.rounds is None for record in run.records)
    assert failures(report_of(run, options))[0] == "1 of 2 requests failed"


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


class Relay:
    """HTTP before a coordinator, as small as can be, that keeps each answer's first chunk."""

    def __init__(self, coordinator: StampedCoordinator) -> None:
        self._client = Client(InProcessTransport(coordinator))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await self._answer(json.loads(await reader.readexactly(length)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        request = GenerateRequest(
            body["prompt"], max_tokens=body["max_tokens"], ignore_eos=body["ignore_eos"]
        )
        index = 0
        async for event in self._client.generate(request):
            if isinstance(event, Tokens) and event.text_delta:
                index += 1
                if index > 1:
                    self._write(writer, {"choices": [{"text": event.text_delta}]})
        self._write(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def _write(self, writer: asyncio.StreamWriter, chunk: object) -> None:
        data = f"data: {json.dumps(chunk)}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@asynccontextmanager
async def relayed(coordinator: StampedCoordinator) -> AsyncIterator[str]:
    server = await asyncio.start_server(Relay(coordinator).serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()


async def test_the_front_door_measures_all_three() -> None:
    """Every chunk is met through every door. A chunk is there in this process almost as soon as
    the coordinator has it; a socket takes longer, and no time is below it."""
    options = FrontDoorOptions(turns=3, max_tokens=8, step_ms=4.0)
    found = await take_turns(options, lambda line: None)
    assert 0 < found.in_process_chunk_ms < 4
    assert found.in_process_ttft_ms_p50 > 4
    assert 0 < found.grpc_chunk_added_ms < 500
    assert 0 < found.http_chunk_added_ms < 500
    assert found.grpc_chunk_added_ms_p99 >= found.grpc_chunk_added_ms
    assert found.http_chunk_added_ms_p99 >= found.http_chunk_added_ms


async def test_a_door_that_loses_chunks_is_no_measurement() -> None:
    """At a step so long that each token is a chunk of its own."""
    options = FrontDoorOptions(turns=1, max_tokens=4, step_ms=2.0 * ANSWERS_HELD_MS)
    with pytest.raises(Unavailable, match="through the door http came 3 chunks where the coord"):
        await take_turns(options, lambda line: None, relayed)
