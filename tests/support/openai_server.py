"""A server with OpenAI's API, on its own thread, that streams scripted answers."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn


@dataclass(frozen=True)
class Reply:
    num_tokens: int = 6
    """Tokens that its usage reports; 0 = no usage."""
    status: int = 200
    error: str = ""
    """Error text. If the status is not 200, the answer has it; otherwise the stream has it after
    the three chunks."""
    breaks: bool = False
    """Whether the server closes the connection after the chunks."""
    gap_s: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


Script = Callable[[dict[str, Any]], Reply]
"""Returns the reply to a request's body."""


class OpenAiServer:
    """An ASGI application. Tests use `base_url`, and the requests that the server has received."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.base_url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        self.headers.append({name.decode(): text.decode() for name, text in scope["headers"]})
        if scope["method"] == "GET":
            await _whole(send, 200, {"object": "list", "data": [{"id": "served"}]})
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message["body"], message["more_body"]
        body = json.loads(raw)
        self.bodies.append(body)
        reply = self._script(body)
        if reply.status != 200:
            await _whole(send, reply.status, {"error": {"message": reply.error, "type": "x"}})
            return
        kind = (b"content-type", b"text/event-stream")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        async for event in _events(reply, body, scope["path"].endswith("/chat/completions")):
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
            message = {"type": "http.response.body", "body": data.encode(), "more_body": True}
            await send(message)
        if reply.breaks:
            raise ConnectionError("as the test says")
        await send({"type": "http.response.body", "body": b""})


async def _whole(send: Any, status: int, value: object) -> None:
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind]})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


async def _events(reply: Reply, body: dict[str, Any], is_chat: bool) -> Any:
    def choice(finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
        found = {"delta": delta} if is_chat else {"text": delta.get("content", "")}
        return {"choices": [{"index": 0, "finish_reason": finish_reason} | found]}

    if is_chat:
        yield choice(role="assistant", content="")
    for text in (" one", " two", " three"):
        await asyncio.sleep(reply.gap_s)
        yield choice(content=text)
    if reply.breaks:
        return
    if reply.error:
        yield {"error": {"message": reply.error, "type": "x"}}
    else:
        yield choice(finish_reason="length")
        if reply.num_tokens and body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": 5, "completion_tokens": reply.num_tokens}
            yield {"choices": [], "usage": usage, "metrics": dict(reply.metrics)}
        yield "[DONE]"


@contextmanager
def serving(script: Script) -> Iterator[OpenAiServer]:
    """Runs a server on its own thread, as commands have an event loop of their own."""
    app = OpenAiServer(script)
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", backlog=1_000)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()
    app.base_url = f"http://{host}:{port}"
    try:
        yield app
    finally:
        server.should_exit = True
        thread.join(10)
