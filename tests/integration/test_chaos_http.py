"""The clients by HTTP of `tests.chaos`: they hear the tokens that gRPC clients hear, ask again when
they are refused for now, and tell a coordinator that has died."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from http_front import http_front
from stack import running_stack
from toy_engine import ToyEngine

from outrider.request import GenerateRequest
from outrider.speculation.sampling_params import Rule
from tests.chaos import http_clients
from tests.chaos.http_clients import BROKEN, streamed

PROMPT, NUM_TOKENS, SEED = (1, 2, 3), 40, 7


async def test_tokens_by_http_are_those_of_grpc(tmp_path: Path) -> None:
    engines = [ToyEngine(50, salt=1, max_model_len=256) for _ in range(2)]
    async with running_stack(engines[0], engines[1], tmp_path) as stack, http_front(stack) as url:
        request = GenerateRequest(
            PROMPT, max_tokens=NUM_TOKENS, seed=SEED, rule=Rule.COUPLED, ignore_eos=True
        )
        expected = list((await stack.client.complete(request)).token_ids)
        address = url.removeprefix("http://")
        parts = [part async for part in streamed(address, PROMPT, NUM_TOKENS, SEED)]
        assert [token for part in parts for token in part] == expected
        assert len(parts) > 1


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_server_that_is_gone_breaks_the_stream(when: str) -> None:
    """Before the answer, and in its middle."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if when == "during":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        with pytest.raises(BROKEN):
            async for _ in streamed(f"{host}:{port}", PROMPT, NUM_TOKENS, SEED):
                pass


async def test_a_deployment_that_refuses_for_long_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After 15 s, of which this test waits for none."""
    waited: list[float] = []
    sleep = asyncio.sleep

    async def note(delay_s: float) -> None:
        waited.append(delay_s)
        await sleep(0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n")
        writer.write(b"connection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    monkeypatch.setattr(http_clients.asyncio, "sleep", note)
    async with server:
        with pytest.raises(openai.InternalServerError):
            async for _ in streamed(f"{host}:{port}", PROMPT, NUM_TOKENS, SEED):
                pass
    assert 10 <= sum(waited) <= 15


async def test_what_is_refused_for_now_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is refused for good is not."""
    statuses = ["503 Service Unavailable", "429 Too Many Requests", "500 Internal Server Error"]
    num_asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        await reader.readuntil(b"\r\n\r\n")
        status = statuses[num_asked]
        num_asked += 1
        head = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        writer.close()

    monkeypatch.setattr(http_clients, "RETRY_S", 0.0)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        with pytest.raises(openai.InternalServerError):
            async for _ in streamed(f"{host}:{port}", PROMPT, NUM_TOKENS, SEED):
                pass
    assert num_asked == len(statuses)
