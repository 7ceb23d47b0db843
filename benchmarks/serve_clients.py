"""Servers under the load of `bench serve`: by our gRPC, or by OpenAI's HTTP interface."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, Self
from urllib.parse import urlsplit

import httpx2

from outrider.client import (
    ChatMessage,
    Client,
    Finished,
    GenerateRequest,
    RoundReport,
    SamplingParams,
    Tokens,
)
from outrider.errors import OutriderError, SettingError, Unavailable

from .prompts import BenchPrompt

if TYPE_CHECKING:
    from .serve import ServeOptions

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
BACKENDS: Final = {CHAT: "openai-chat", TEXT: "openai"}
"""What vLLM calls them."""
GRPC_BACKEND: Final = "outrider-grpc"
CONNECT_S: Final = 60.0
SILENCE_S: Final = 600.0
"""How long a server may be silent before a request counts as failed."""
ERROR_BYTES_MAX: Final = 64 * 2**10
"""Of an error's body that are read."""
ERROR_CHARS_MAX: Final = 300
"""Of an error that are shown."""
_CONTENT: Final = ("content", "reasoning_content", "reasoning", "tool_calls")
"""What holds tokens in the delta of a chat."""


class RequestFailed(Exception):
    """A request was refused, or its stream broke. One line, that says why."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a server says that speculative decoding did for a request."""

    num_rounds: int
    """Steps of the target."""
    num_draft_tokens: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says at the end of a stream; None = it does not."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    speculation: Speculation | None = None
    rounds: tuple[RoundReport, ...] | None = None


class StreamTimes:
    """When the chunks of one stream came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.chunk_s = array("d")
        self.chunk_tokens: array[int] | None = array("l")
        self.ended_s: float | None = None

    def chunk(self, num_tokens: int | None) -> None:
        """Notes a chunk with tokens; None = their number is not known."""
        self.ended_s = self._clock()
        self.chunk_s.append(self.ended_s)
        if num_tokens is None:
            self.chunk_tokens = None
        elif self.chunk_tokens is not None:
            self.chunk_tokens.append(num_tokens)

    def end(self) -> None:
        """Notes that the server says that the answer is whole."""
        self.ended_s = self._clock()


class ServingClient(Protocol):
    """A server under load. One for all requests, on one event loop."""

    async def answer(self, prompt: BenchPrompt, max_tokens: int, times: StreamTimes) -> Answer:
        """One request, streamed into `times`. Raises `RequestFailed`."""
        ...


class GrpcServingClient:
    """A `ServingClient` over a client, which stays its owner's."""

    def __init__(self, client: Client, options: ServeOptions) -> None:
        self._client = client
        self._options = options

    async def answer(self, prompt: BenchPrompt, max_tokens: int, times: StreamTimes) -> Answer:
        """See `ServingClient.answer`."""
        options = self._options
        request = GenerateRequest(
            prompt=prompt.text if options.raw else (ChatMessage("user", prompt.text),),
            sampling=SamplingParams(temperature=options.temperature),
            max_tokens=max_tokens,
            ignore_eos=options.ignore_eos,
            num_draft_tokens=options.num_draft_tokens,
            include_rounds=options.rounds,
        )
        rounds: list[RoundReport] = []
        finished: Finished | None = None
        try:
            async with aclosing(self._client.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        times.chunk(len(event.token_ids))
                    elif isinstance(event, RoundReport):
                        rounds.append(event)
                    elif isinstance(event, Finished):
                        times.end()
                        finished = event
        except OutriderError as error:
            raise RequestFailed(f"{type(error).__name__}: {error.message}") from error
        if finished is None:
            raise RequestFailed("the stream ended before its last event")
        metrics = finished.metrics
        return Answer(
            finished.usage.prompt_tokens,
            finished.usage.completion_tokens,
            Speculation(
                metrics.num_rounds, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
            ),
            tuple(rounds) if options.rounds else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """Where to call by HTTP."""

    base_url: str
    """Without the endpoint; a `/v1` at its end is not said twice."""
    endpoint: str = CHAT
    model: str = ""
    """What requests call it; empty = the first that the server lists."""
    api_key: str = field(default="", repr=False)
    """Sent as a bearer token; empty = none."""
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Added to the body of every request."""

    def __post_init__(self) -> None:
        if not _is_base_url(self.base_url):
            raise SettingError(
                "base_url", f"{self.base_url!r} is wrong; it must be http://HOST:PORT or https://.."
            )
        if self.endpoint not in BACKENDS:
            raise SettingError(
                "endpoint", f"{self.endpoint!r} is wrong; it must be one of {', '.join(BACKENDS)}"
            )
        if any(not 32 < ord(character) < 127 for character in self.api_key):
            raise SettingError("api_key", "must be of printable ASCII without blanks")

    @property
    def root(self) -> str:
        """What paths such as `/v1/models` follow."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def address(self) -> str:
        """HOST:PORT, without what else a URL may hold."""
        return urlsplit(self.base_url).netloc.rpartition("@")[2]


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        httpx2.URL(text)
    except (ValueError, httpx2.InvalidURL):
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc) and not parts.query


class HttpServingClient:
    """A `ServingClient`, and an async context manager. Any number of connections, which are used
    again."""

    def __init__(self, server: HttpServer, options: ServeOptions) -> None:
        self.server = server
        self._options = options
        self.model = server.model
        """What requests call it."""
        self._url = httpx2.URL(server.root + server.endpoint)  # Parsed once.
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self._client = httpx2.AsyncClient(
            headers=headers,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def find_model(self) -> None:
        """Takes the first model that the server lists, where none is named. Raises
        `Unavailable`."""
        if self.model:
            return
        url = f"{self.server.root}/v1/models"
        try:
            response = await self._client.get(url)
            if response.status_code != httpx2.codes.OK:
                raise Unavailable(f"{url}: {_refusal(response.status_code, response.content)}")
            self.model = str(response.json()["data"][0]["id"])
        except httpx2.HTTPError as error:
            raise Unavailable(f"{url}: {_reason(error)}") from error
        except (ValueError, LookupError, TypeError):
            raise Unavailable(f"{url} lists no models; name one (--model)") from None

    async def answer(
        self,
        prompt: BenchPrompt,
        max_tokens: int,
        times: StreamTimes,
        temperature: float | None = None,
    ) -> Answer:
        """See `ServingClient.answer`; at the temperature of the options, unless one is given."""
        stream = _OpenAiStream(times)
        body = self._body(prompt, max_tokens)
        if temperature is not None:
            body["temperature"] = temperature
        try:
            async with self._client.sse(self._url, method="POST", json=body) as events:
                if events.response.status_code != httpx2.codes.OK:
                    beginning = await _beginning(events.response)
                    raise RequestFailed(_refusal(events.response.status_code, beginning))
                async for event in events:
                    stream.take(event.data)
        except httpx2.HTTPError as error:
            raise RequestFailed(_reason(error)) from error
        return stream.answer()

    def _body(self, prompt: BenchPrompt, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.server.extra_body,
        }
        if self.server.endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": prompt.text}]
            body["max_completion_tokens"] = max_tokens
        else:
            body |= {"prompt": prompt.text, "max_tokens": max_tokens}
        if self._options.ignore_eos:
            body["ignore_eos"] = True  # Not OpenAI's, which refuses what it does not know.
        return body


class _OpenAiStream:
    """The events of one answer as they come."""

    def __init__(self, times: StreamTimes) -> None:
        self._times = times
        self._is_whole = False
        self._usage: dict[str, int] = {}
        self._speculation: Speculation | None = None

    def take(self, data: str) -> None:
        """Takes an event's data. Raises `RequestFailed`."""
        if data == "[DONE]":
            self._is_whole = True
            return
        try:
            self._take_chunk(json.loads(data))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise RequestFailed(f"the stream is not as OpenAI's: {error}") from error

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise RequestFailed(f"the stream ended with an error: {_one_line(str(message))}")
        for choice in chunk.get("choices") or ():
            if _has_tokens(choice):
                self._times.chunk(None)
            if choice.get("finish_reason") is not None:
                self._times.end()
        if usage := chunk.get("usage"):
            self._usage = {
                name: int(usage[name])
                for name in ("prompt_tokens", "completion_tokens")
                if usage.get(name) is not None
            }
        if told := (chunk.get("metrics") or {}).get("speculative_decoding"):
            self._speculation = Speculation(
                int(told["num_spec_steps"]),
                int(told["num_draft_tokens"]),
                int(told["num_accepted_draft_tokens"]),
            )

    def answer(self) -> Answer:
        """Once the stream has ended. Raises `RequestFailed` where it broke."""
        if not self._is_whole:
            raise RequestFailed("the stream ended before [DONE]")
        usage = self._usage
        return Answer(usage.get("prompt_tokens"), usage.get("completion_tokens"), self._speculation)


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether a chunk holds some of the answer: the one that only names the role does not, nor one
    that only says why the answer ended."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in _CONTENT)


async def _beginning(response: httpx2.Response) -> bytes:
    body = b""
    with suppress(httpx2.HTTPError):  # What has come says enough.
        async for data in response.aiter_bytes():
            body += data
            if len(body) > ERROR_BYTES_MAX:
                break
    return body[:ERROR_BYTES_MAX]


def _refusal(status: int, body: bytes) -> str:
    """An error answer in one line."""
    text = body.decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    hint = " (--api-key, or OPENAI_API_KEY)" if status == httpx2.codes.UNAUTHORIZED else ""
    return f"HTTP {status}: {_one_line(text)}".rstrip(": ") + hint


def _one_line(text: str) -> str:
    """What another server says, as it may go to a terminal."""
    line = " ".join(text.split())[:ERROR_CHARS_MAX]
    return "".join(character if character.isprintable() else "?" for character in line)


def _reason(error: httpx2.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
