"""The streaming clients of benchmarks, for gRPC and for OpenAI's HTTP API."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, Self

import httpx2

from outrider.client import ChatMessage, Client, Finished, GenerateRequest, Tokens
from outrider.config.deployment import PORT_MAX
from outrider.errors import SettingError, Unavailable
from outrider.interfaces.request import RoundReport
from outrider.sessions.store import FinishReason

from .measurement import BenchClient, Completion, Round

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CONNECT_S = 60.0
SILENCE_S = 600.0
"""A request fails if the server sends nothing for this time."""
ERROR_CHARS_MAX = 300
_CONTENT = ("text", "content", "reasoning_content", "reasoning", "tool_calls")
"""Fields with new text in the choice of a text completion or the delta of a chat."""


class GrpcClient(BenchClient):
    """Calls a coordinator by gRPC. If `raw`, prompts are sent without the chat template."""

    def __init__(self, client: Client, *, raw: bool) -> None:
        self._client, self._raw = client, raw

    async def generate(self, request: GenerateRequest) -> Completion:
        if not self._raw:
            request = replace(request, prompt=(ChatMessage("user", str(request.prompt)),))
        return await complete(self._client, request)


async def complete(client: Client, request: GenerateRequest) -> Completion:
    """Runs a request. Raises the coordinator's errors, and `Unavailable` if the answer was cut
    short, because the time of a partial answer means nothing."""
    clock = asyncio.get_running_loop().time
    rounds: list[Round] = []
    report: Any = None
    finished: Finished | None = None
    started_s = last_s = clock()
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, RoundReport):
                report = event
            elif isinstance(event, Tokens) and event.token_ids:
                now_s = clock()
                rounds.append(Round(report, event, now_s - last_s))
                last_s = now_s
            elif isinstance(event, Finished):
                finished = event
    seconds = clock() - started_s
    reason = finished and finished.finish_reason
    if finished is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise Unavailable(f"a measured request ended early: {reason}")
    metrics = finished.metrics
    return Completion(
        tuple(token_id for timed in rounds for token_id in timed.tokens.token_ids),
        started_s,
        seconds,
        metrics.num_rounds,
        metrics.num_draft_tokens,
        metrics.num_accepted_draft_tokens,
        metrics.num_drafts,
        [*accumulate(timed.seconds for timed in rounds)],
        finished.usage.prompt_tokens,
        rounds=rounds,
    )


class HttpClient(BenchClient):
    """Calls a server with OpenAI's HTTP API. Use it as an async context manager."""

    def __init__(self, base_url: str, *, raw: bool, model: str = "", api_key: str = "") -> None:
        """`base_url` may end with `/v1`. If `raw`, calls text completions instead of chats. If
        `model` is empty, uses the first model in the server's list."""
        self._root = base_url.rstrip("/").removesuffix("/v1")
        try:
            self._client = httpx2.AsyncClient(
                base_url=self._root,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
                timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
            )
        except httpx2.InvalidURL as error:
            raise SettingError("base_url", f"{base_url!r} is wrong: {error}") from error
        if (self._client.base_url.port or 0) > PORT_MAX:
            raise SettingError("base_url", f"{base_url!r} is wrong: the largest port is {PORT_MAX}")
        if self._client.base_url.scheme not in ("http", "https"):
            reason = "must begin with http:// or https://"
            raise SettingError("base_url", f"{base_url!r} is wrong; it {reason}")
        self.model = model
        self.address = self._client.base_url.netloc.decode()
        self._raw = raw

    async def __aenter__(self) -> Self:
        if not self.model:
            with self._failures(f"{self._root}/v1/models"):
                response = await self._client.get("/v1/models")
                await _check(response)
                self.model = str(response.json()["data"][0]["id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def generate(self, request: GenerateRequest) -> Completion:
        clock = asyncio.get_running_loop().time
        chunk_s: list[float] = []
        usage, metrics = dict[str, Any](), dict[str, Any]()
        seconds = 0.0
        url, body = self._question(request)
        started_s = clock()
        with self._failures("the stream"):
            async with self._client.sse(url, method="POST", json=body) as events:
                await _check(events.response)
                async for event in events:
                    if event.data == "[DONE]":
                        break
                    chunk = json.loads(event.data)
                    if error := chunk.get("error"):
                        raise Unavailable(f"the stream ended with an error: {_one_line(error)}")
                    for choice in chunk.get("choices") or ():
                        seconds = clock() - started_s
                        # Chunks without new text have only a role or a finish reason.
                        new = choice.get("delta", choice)
                        if any(new.get(name) for name in _CONTENT):
                            chunk_s.append(seconds)
                    usage = chunk.get("usage") or usage
                    metrics = (chunk.get("metrics") or {}).get("speculative_decoding") or metrics
            if not usage.get("completion_tokens") or not seconds:
                raise Unavailable("the stream ended without tokens or without `usage`")
            return Completion(
                (),
                started_s,
                seconds,
                0,
                int(metrics.get("num_draft_tokens", 0)),
                int(metrics.get("num_accepted_draft_tokens", 0)),
                int(metrics.get("num_spec_steps", 0)),
                chunk_s,
                int(usage.get("prompt_tokens") or 0),
                int(usage["completion_tokens"]),
            )

    def _question(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": request.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:  # OpenAI's own servers refuse this field.
            body["ignore_eos"] = True
        if self._raw:
            return TEXT, body | {"prompt": request.prompt, "max_tokens": request.max_tokens}
        body["max_completion_tokens"] = request.max_tokens
        return CHAT, body | {"messages": [{"role": "user", "content": request.prompt}]}

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Raises `Unavailable` for HTTP errors, and for answers that are not in OpenAI's format."""
        try:
            yield
        except httpx2.HTTPError as error:
            reason = _one_line(str(error) or type(error).__name__)
            message = f"{what}: {reason}"
            if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                message = (
                    f"nothing answers at {self._root} ({reason}); start a server there, or give "
                    "another address with --base-url"
                )
            raise Unavailable(message) from error
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise Unavailable(f"{what} is not in OpenAI's format: {error}") from error


async def _check(response: httpx2.Response) -> None:
    if response.status_code != httpx2.codes.OK:
        text = _one_line((await response.aread()).decode(errors="replace"))
        raise Unavailable(f"HTTP {response.status_code}: {text}")


def _one_line(text: object) -> str:
    """A server's text, shortened and safe for a terminal."""
    line = " ".join(str(text).split())[:ERROR_CHARS_MAX]
    return "".join(character if character.isprintable() else "?" for character in line)
