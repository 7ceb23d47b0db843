"""A server with OpenAI's HTTP interface under the load of `bench serve`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx2

from outrider.errors import SettingError, Unavailable

from .prompts import BenchPrompt
from .serving import ServingOptions
from .serving_records import Answer, Heard, RequestFailed, Speculation
from .sse import DONE, EventReader

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
ENDPOINTS: Final = (CHAT, TEXT)
BACKENDS: Final = {CHAT: "openai-chat", TEXT: "openai"}
"""What vLLM calls them."""
CONNECT_S: Final = 60.0
SILENCE_S: Final = 600.0
"""How long a server may be silent before a request counts as failed."""
ERROR_BYTES_MAX: Final = 64 * 2**10
"""Of an error's body that are read."""
ERROR_CHARS_MAX: Final = 300
"""Of an error that are shown."""
_CONTENT: Final = ("content", "reasoning_content", "reasoning", "tool_calls")
"""What holds tokens in the delta of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """Where to call."""

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
        if self.endpoint not in ENDPOINTS:
            raise SettingError(
                "endpoint", f"{self.endpoint!r} is wrong; it must be one of {', '.join(ENDPOINTS)}"
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
    """Implements `ServingClient`; an async context manager. Any number of connections, which are
    used again."""

    def __init__(self, server: HttpServer, options: ServingOptions) -> None:
        self._server = server
        self._options = options
        self._model = server.model
        self._url = httpx2.URL(server.root + server.endpoint)  # Parsed once.
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self._client = httpx2.AsyncClient(
            headers=headers,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    @property
    def model(self) -> str:
        """What requests call the model."""
        return self._model

    async def find_model(self) -> None:
        """Takes the first model that the server lists, where none is named. Raises
        `Unavailable`."""
        if self._model:
            return
        url = f"{self._server.root}/v1/models"
        try:
            response = await self._client.get(url)
            if response.status_code != httpx2.codes.OK:
                raise Unavailable(f"{url}: {_refusal(response.status_code, response.content)}")
            self._model = str(response.json()["data"][0]["id"])
        except httpx2.HTTPError as error:
            raise Unavailable(f"{url}: {_reason(error)}") from error
        except (ValueError, LookupError, TypeError):
            raise Unavailable(f"{url} lists no models; name one (--model)") from None

    async def answer(self, prompt: BenchPrompt, max_tokens: int, heard: Heard) -> Answer:
        """See `ServingClient.answer`."""
        reading = _Reading(heard)
        try:
            async with self._client.stream(
                "POST", self._url, json=self._body(prompt, max_tokens)
            ) as response:
                if response.status_code != httpx2.codes.OK:
                    raise RequestFailed(_refusal(response.status_code, await _beginning(response)))
                async for data in response.aiter_bytes():
                    reading.feed(data)
        except httpx2.HTTPError as error:
            raise RequestFailed(_reason(error)) from error
        return reading.answer()

    def _body(self, prompt: BenchPrompt, max_tokens: int) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._server.extra_body,
        }
        if self._server.endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": prompt.text}]
            body["max_completion_tokens"] = max_tokens
        else:
            body |= {"prompt": prompt.text, "max_tokens": max_tokens}
        if options.ignore_eos:
            body["ignore_eos"] = True  # Not OpenAI's, which refuses what it does not know.
        return body


class _Reading:
    """The stream of one answer as it comes."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._events = EventReader()
        self._is_whole = False
        self._usage: dict[str, int] = {}
        self._speculation: Speculation | None = None

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. Raises `RequestFailed`."""
        self._take_all(lambda: self._events.feed(data))

    def _take_all(self, events: Callable[[], list[str]]) -> None:
        try:
            for event in events():
                if event == DONE:
                    self._is_whole = True
                else:
                    self._take(json.loads(event))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise RequestFailed(f"the stream is not as OpenAI's: {error}") from error

    def _take(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise RequestFailed(f"the stream ended with an error: {_one_line(str(message))}")
        for choice in chunk.get("choices") or ():
            if _has_tokens(choice):
                self._heard.chunk(None)
            if choice.get("finish_reason") is not None:
                self._heard.end()
        if usage := chunk.get("usage"):
            self._usage = {
                name: int(usage[name])
                for name in ("prompt_tokens", "completion_tokens")
                if usage.get(name) is not None
            }
        told = (chunk.get("metrics") or {}).get("speculative_decoding")
        if told:
            self._speculation = Speculation(
                int(told["num_spec_steps"]),
                int(told["num_draft_tokens"]),
                int(told["num_accepted_draft_tokens"]),
            )

    def answer(self) -> Answer:
        """Once the stream has ended. Raises `RequestFailed` where it broke."""
        self._take_all(self._events.finish)
        if not self._is_whole:
            raise RequestFailed("the stream ended before [DONE]")
        return Answer(
            self._usage.get("prompt_tokens"),
            self._usage.get("completion_tokens"),
            self._speculation,
        )


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
    """What somebody else's server says, as it may go to a terminal."""
    line = " ".join(text.split())[:ERROR_CHARS_MAX]
    return "".join(character if character.isprintable() else "?" for character in line)


def _reason(error: httpx2.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
