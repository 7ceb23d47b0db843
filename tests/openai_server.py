"""A server with OpenAI's streams over a plain socket, that answers as a test says: cut short, with
errors, several tokens a chunk, and so on. It runs on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What one request gets."""

    chunks: tuple[str, ...] = (" one", " two", " three")
    num_tokens: int = 6
    """That its usage tells; 0 = it tells none."""
    prompt_tokens: int = 5
    status: int = 200
    error: str = ""
    """Of an answer that is not 200, or in the stream behind the chunks."""
    breaks: bool = False
    """Whether the connection is closed behind the chunks."""
    stops: bool = False
    """Whether the stream ends properly behind the chunks, but without its last events."""
    gap_s: float = 0.0
    """Before each chunk."""
    waits_for: int = 0
    """How many requests must be there before any of them is answered."""
    metrics: Mapping[str, Any] = field(default_factory=dict)


Script = Callable[[dict[str, Any]], Reply]
"""The reply to a request's body."""


class OpenAiServer:
    """One listening socket; `base_url` and what was asked are for the test."""

    def __init__(self, script: Script, model: str = "served") -> None:
        self._script = script
        self._model = model
        self.base_url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.num_waiting = 0
        self._crowd: asyncio.Event | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._crowd = asyncio.Event()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1000)
        host, port = self._server.sockets[0].getsockname()
        self.base_url = f"http://{host}:{port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        self.paths.append(path)
        self.headers.append(headers)
        if method == "GET":
            models = {"object": "list", "data": [{"id": self._model, "object": "model"}]}
            await self._whole(writer, 200, models)
            return True
        body = json.loads(raw)
        self.bodies.append(body)
        return await self._stream(
            writer, body, self._script(body), path.endswith("/chat/completions")
        )

    async def _whole(self, writer: asyncio.StreamWriter, status: int, value: object) -> None:
        text = json.dumps(value).encode()
        writer.write(
            b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(text), text)
        )
        await writer.drain()

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], reply: Reply, is_chat: bool
    ) -> bool:
        """Whether the connection goes on."""
        if reply.waits_for:
            await self._wait_for(reply.waits_for)
        if reply.status != 200:
            error = {"message": reply.error, "type": "x", "param": None, "code": None}
            await self._whole(writer, reply.status, {"error": error})
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        if is_chat:
            self._event(writer, choices=[_choice(True, role="assistant", content="")])
        for text in reply.chunks:
            await asyncio.sleep(reply.gap_s)
            self._event(writer, choices=[_choice(is_chat, content=text)])
        await writer.drain()
        if reply.breaks:
            return False
        if reply.error:
            self._event(writer, error={"message": reply.error, "type": "x"})
        elif not reply.stops:
            self._event(writer, choices=[_choice(is_chat, finish_reason="length")])
            if reply.num_tokens and body["stream_options"]["include_usage"]:
                usage = {
                    "prompt_tokens": reply.prompt_tokens,
                    "completion_tokens": reply.num_tokens,
                }
                self._event(writer, choices=[], usage=usage, metrics=dict(reply.metrics))
            self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _wait_for(self, number: int) -> None:
        assert self._crowd is not None
        self.num_waiting += 1
        if self.num_waiting >= number:
            self._crowd.set()
        await self._crowd.wait()

    def _event(self, writer: asyncio.StreamWriter, **fields: Any) -> None:
        chunk = {"id": "x", "object": "chunk", "created": 1, "model": self._model, **fields}
        self._write(writer, b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _choice(is_chat: bool, finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
    found: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    return found | ({"delta": delta} if is_chat else {"text": delta.get("content", "")})


@contextmanager
def serving(script: Script) -> Iterator[OpenAiServer]:
    """A server on a thread of its own, for commands that have an event loop of their own."""
    server = OpenAiServer(script)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
