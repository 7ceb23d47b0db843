"""HTTP streams that are resumed, and repeated requests, at several coordinators."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from coordinator.auth.access_control import AccessControl, watch_keys
from coordinator.decoding.sessions import RequestKey
from coordinator.http_api.app import build_app
from coordinator.http_api.progress import Progress, RepeatedRequests
from coordinator.http_api.server import HttpOptions
from coordinator.http_api.tools import ChatFormats
from outrider.errors import Overloaded, StoreUnavailable, Unavailable
from outrider.foundation.api_keys import Caller, given_keys, key_hash
from outrider.limits import IDEMPOTENCY_KEY_CHARS_MAX
from tests.support.coordinator_bench import Bench, Letters
from tests.support.script_store import ScriptStore
from tests.support.told_coordinator import MemorySlots

pytestmark = pytest.mark.virtual

GRACE_S = 5.0
API_KEYS = ["a" * 32, "b" * 32]
"""Each key has its own tenant."""
OTHER = {"authorization": f"Bearer {API_KEYS[1]}"}
KEY = {"Idempotency-Key": "k"}
SEEDED = {"seed": 7, "max_tokens": 12, "stream": True, "speculation": {"rule": "coupled"}}
CHAT = {
    **SEEDED,
    "messages": [{"role": "user", "content": "hi"}],
    "logprobs": True,
    "top_logprobs": 1,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}
TEXT = {**SEEDED, "prompt": [1, 2], "logprobs": 1, "return_token_ids": True}
RESPONSE = {
    "input": "hi",
    "max_output_tokens": 12,
    "include": ["message.output_text.logprobs"],
    "seed": 7,
    "speculation": {"rule": "coupled"},
    "stream": True,
}
FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 3}),
    "prompts": ("/v1/completions", {**TEXT, "prompt": [[1, 2], [3]], "stop": ["cd"]}),
    "echo": ("/v1/completions", {**TEXT, "prompt": [3] * 40, "echo": True}),
    "response": ("/v1/responses", RESPONSE),
    "events": ("/api/generate", TEXT),
}
Told = tuple[str, Any]
"""The id of an event, and its data."""


class Text:
    """A tokenizer with a letter for each token, which is certain only with the next token."""

    token_bytes_max = 4
    chat_template = ""

    def encode_chat(self, *_: Any) -> list[int]:
        return [1, 2, 3]

    def decode(self, token_ids: Sequence[int], *_: Any) -> str:
        return "".join(self.spell(one).decode() for one in token_ids)

    def is_special(self, token_id: int) -> bool:
        return False

    def spell(self, token_id: int) -> bytes:
        return chr(97 + token_id).encode()

    def stream(self, *_: Any) -> Letters:
        return Letters(lag=1)


class Mortal:
    """A coordinator's connection to the store. It fails once the coordinator has died."""

    def __init__(self, store: ScriptStore) -> None:
        self._store = store
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            if self.dead and name != "close":
                raise StoreUnavailable("the coordinator is dead")
            return await getattr(self._store, name)(*arguments)

        return call


class Coordinator(Bench):
    """A coordinator with an HTTP application."""

    def __init__(self, store: ScriptStore, first: "Coordinator | None" = None) -> None:
        self.mortal = Mortal(store)
        super().__init__(
            text=Text(),
            store=self.mortal,  # type: ignore[arg-type]
            name="c" if first is None else "d",
            target=None if first is None else first.target,
            resume_grace_ms=int(GRACE_S * 1e3),
            length_control=False,
        )
        access = AccessControl(watch_keys(None, given_keys(",".join(API_KEYS))))
        self.app = build_app(self.service, HttpOptions(access=access))
        self.shared = store

    async def call(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] = {},
        leaves_after: int = 10_000,
        dies: bool = False,
        stays: bool = False,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of a call. After some number of parts the client disconnects,
        or only stops reading if it `stays`. The coordinator may die then."""
        parts = list[bytes]()
        head: dict[str, Any] = {}
        gone = asyncio.Event()
        sent = [{"type": "http.request", "body": json.dumps(body).encode() if body else b""}]

        async def receive() -> Any:
            if sent:
                return sent.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if gone.is_set():
                return
            head.update(message)
            parts.append(message.get("body", b""))
            if sum(map(bool, parts)) >= leaves_after:
                self.mortal.dead = dies
                if not stays:
                    gone.set()
                [*_, (self.last_id, _)] = events_of(b"".join(parts))
                await asyncio.Event().wait()

        given = {
            "content-type": "application/json",
            "authorization": f"Bearer {API_KEYS[0]}",
            **headers,
        }
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.lower().encode(), one.encode()) for name, one in given.items()],
        }
        await self.app(scope, receive, send)
        names = {name.decode(): value.decode() for name, value in head["headers"]}
        return head["status"], names, b"".join(parts)

    async def whole(self, *arguments: Any) -> bytes:
        """The whole answer. Retries as OpenAI's client does."""
        while True:
            status, headers, content = await self.call(*arguments)
            if status == 200:
                return content
            assert status in (409, 503), content
            await asyncio.sleep(int(headers.get("retry-after", "1")))

    async def stream(self, *arguments: Any) -> list[Told]:
        """The events of the answer."""
        return events_of(await self.whole(*arguments))

    async def refusal(self, *arguments: Any) -> tuple[int, str | None, str]:
        """Status, field and code of an error."""
        status, _, content = await self.call(*arguments)
        error = json.loads(content)["error"]
        return status, error["param"], error["code"]

    async def lengths(self) -> list[int]:
        """Lengths of the answers of all stored sessions that are not empty."""
        records = await self.shared.records()
        assert None not in [one.finish_reason for one in records]
        lengths = [len(one.token_ids) - one.prompt_length for one in records]
        return [length for length in lengths if length]


def events_of(content: bytes) -> list[Told]:
    found = list[Told]()
    for block in content.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("id", ""), data if data == "[DONE]" else json.loads(data)))
    return found


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two coordinators with one store and one target."""
    store = ScriptStore(lambda: asyncio.get_running_loop().time() * 1e3)
    first = Coordinator(store)
    second = Coordinator(store, first)
    await first.service.start()
    await second.service.start()
    yield first, second
    await first.service.close()
    await second.service.close()
    for one in (first, second):
        one.service.check_integrity()


def summary(told: list[Told]) -> dict[str, Any]:
    """What does not depend on times, and on how tokens are divided into events."""
    found: dict[str, Any] = {"DONE": 0, "parts": [], "usage": [], "numbers": []}
    for event_id, event in told:
        assert bool(event_id) == (event != "[DONE]")
        if event == "[DONE]":
            found["DONE"] += 1
        elif event.get("type", "").startswith("response."):
            found["numbers"].append(event["sequence_number"])
            for key, value in event.items():
                if key in ("delta", "text"):
                    found[key] = found.get(key, "") + value
            response = event.get("response", {})
            found["parts"] += [one["content"] for one in response.get("output", ())]
            found["usage"] += [response["usage"]] if response.get("usage") else []
        elif event.get("type") in ("started", "tokens", "finished"):
            found["parts"] += [event["type"]] * (event["type"] != "tokens")
            texts = event.get("texts", ())
            found["parts"] += zip(event.get("token_ids", ()), texts, strict=True)
            found["text"] = found.get("text", "") + event.get("text_delta", "")
        else:
            found["usage"] += [event["usage"]] if event.get("usage") else []
            for choice in event.get("choices", ()):
                add_choice(found.setdefault(str(choice["index"]), {}), choice)
    found["numbers"] = found["numbers"] == [*range(len(found["numbers"]))]
    return found


def add_choice(found: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {"content": choice.get("text", "")})
    found["roles"] = found.get("roles", 0) + ("role" in delta)
    found["text"] = found.get("text", "") + delta.get("content", "")
    found["token_ids"] = found.get("token_ids", []) + choice.get("token_ids", [])
    ended = choice["finish_reason"]
    found["ends"] = found.get("ends", []) + [ended] * bool(ended)
    for key, value in (choice["logprobs"] or {}).items():
        if isinstance(value, list):
            found[key] = found.get(key, []) + value


def one_token_more(event_id: str) -> str:
    """An event id that does not fit the stored tokens."""
    number, num_tokens, rest = re.split("[:-]", event_id, maxsplit=2)
    return f"{number}:{int(num_tokens) + 1}-{rest}"


@pytest.mark.parametrize("form", FORMS)
async def test_a_stream_goes_on_after_any_of_its_events(form: str) -> None:
    """At another coordinator, whether the first one lives or has died. Both parts together equal an
    unbroken stream, and no token is decoded twice."""
    path, body = FORMS[form]
    async with two() as (first, _):
        whole = await first.stream(path, body)
        num_choices = len(await first.lengths())
    for num_events in range(1, len(whole)):
        async with two() as (first, second):
            status, _, content = await first.call(path, body, KEY, num_events, bool(num_events % 2))
            assert status == 200
            told = events_of(content)
            assert len(told) == num_events
            rest = await second.stream(path, body, {**KEY, "Last-Event-ID": told[-1][0]})
            assert summary(told + rest) == summary(whole), num_events
            assert len(await second.lengths()) == num_choices
            assert summary(await second.stream(path, body, KEY)) == summary(whole)


@pytest.mark.parametrize("form", ["chat", "choices", "prompts"])
async def test_requests_at_the_same_moment_are_one(form: str) -> None:
    path, body = FORMS[form]
    whole_body = {**body, "stream": False}
    whole_body.pop("stream_options", None)
    async with two() as (first, second):
        asking = [one.whole(path, whole_body, KEY) for one in (first, first, second, second)]
        answers = [json.loads(one) for one in await asyncio.gather(*asking)]
        num_choices = len(answers[0]["choices"])
        assert len(await first.lengths()) == num_choices
        for answer in answers:
            assert answer["choices"] == answers[0]["choices"]
            assert answer["usage"]["completion_tokens"] == sum(await first.lengths())
        streamed = await asyncio.gather(
            *(one.stream(path, body, {"Idempotency-Key": "other"}) for one in (first, second))
        )
        assert summary(streamed[0]) == summary(streamed[1])
        assert len(await first.lengths()) == 2 * num_choices


async def test_a_request_that_runs_is_waited_for_by_the_same_one() -> None:
    """Each gets the whole answer. A request with an event id of the first one takes over at once. A
    different request with the key, and a wrong event id, are refused at once."""
    path, body = FORMS["choices"]
    async with two() as (first, _):
        key = {"Idempotency-Key": "other"}
        stuck = asyncio.create_task(first.call(path, body, key, leaves_after=4, stays=True))
        await asyncio.sleep(1.0)
        waiting = [asyncio.create_task(first.call(path, body, key)) for _ in range(9)]
        await asyncio.sleep(1.0)
        [refused] = [task.result() for task in waiting if task.done()]
        assert refused[0] == 503
        assert (await first.refusal(path, {**body, "seed": 8}, key))[0] == 400
        last = {**key, "Last-Event-ID": first.last_id}
        for wrong in ("7", one_token_more(first.last_id)):
            assert (await first.refusal(path, body, {**last, "Last-Event-ID": wrong}))[0] == 400
        await asyncio.sleep(1.0)
        assert sum(task.done() for task in waiting) == 1
        assert (await first.call(path, body, last))[0] == 200
        assert sorted([(await task)[0] for task in waiting]) == [200] * 8 + [503]
        assert not stuck.done()
        stuck.cancel()


async def test_a_request_that_waits_takes_no_slot_of_its_key() -> None:
    path, body = FORMS["chat"]
    limited = {key_hash(API_KEYS[0]): Caller("a", "a", concurrency=1)}
    async with two() as (first, _):
        access = AccessControl(watch_keys(None, limited), MemorySlots())
        first.app = build_app(first.service, HttpOptions(access=access))
        tries = [asyncio.create_task(first.call(path, body, KEY)) for _ in range(3)]
        await asyncio.sleep(0.01)
        other = {"Idempotency-Key": "other"}
        assert await first.refusal(path, body, other) == (429, None, "rate_limit_exceeded")
        assert [status for status, *_ in await asyncio.gather(*tries)] == [200] * 3
        assert (await first.call(path, body, other))[0] == 200
        await access.close()


@pytest.mark.parametrize("form", ["chat", "choices"])
async def test_what_is_told_of_an_answer_by_its_id(form: str) -> None:
    """Without a key, the first choice can be resumed if its coordinator has died. Otherwise it has
    ended when its client left."""
    path, body = FORMS[form]
    async with two() as (first, second):
        whole = summary(await first.stream(path, body))
        _, _, content = await first.call(path, body, leaves_after=3, dies=True)
        told = events_of(content)
        resume = f"/v1/sessions/{told[0][1]['id']}/resume"
        more = {name: body[name] for name in ("stream_options", "return_token_ids")}
        if form == "chat":
            last = {"Last-Event-ID": told[-1][0]}
            assert summary(told + await second.stream(resume, more, last)) == whole
        else:
            assert summary(await second.stream(resume, more))["0"] == whole["0"]
        answer = json.loads(await second.whole(resume, {"stream": False}))
        assert answer["choices"][0]["message"]["content"] == whole["0"]["text"]
        assert answer["choices"][0]["logprobs"]["content"] == whole["0"]["content"]
        for headers in (OTHER, {}):
            wanted = resume if headers else "/v1/sessions/chatcmpl-" + "f" * 32 + "/resume"
            assert await second.refusal(wanted, None, headers) == (404, None, "not_found")
        assert (await second.refusal("/v1/sessions/7/resume"))[0] == 404
        _, _, content = await second.call(path, body, leaves_after=3)
        resume = f"/v1/sessions/{events_of(content)[0][1]['id']}/resume"
        await asyncio.sleep(0.5)
        *_, end, usage, _ = await second.stream(resume, {"stream_options": {"include_usage": True}})
        [choice] = end[1]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "cancelled")
        assert usage[1]["usage"]["completion_tokens"] < 12


async def test_an_answer_by_its_id_is_read_as_it_was() -> None:
    async with two() as (first, second):
        formats = ChatFormats(cast(Any, Text()), reasoning_parser="deepseek_r1")
        for one in (first, second):
            one.app = build_app(
                one.service, HttpOptions(access=one.app.state.admission.access), formats
            )
        _, _, content = await first.call(*FORMS["chat"], leaves_after=3, dies=True)
        resume = f"/v1/sessions/{events_of(content)[0][1]['id']}/resume"
        message = json.loads(await second.whole(resume, {"stream": False}))["choices"][0]["message"]
        assert (message["content"], len(message["reasoning_content"])) == ("", 12)


async def test_a_key_is_its_tenants_and_of_one_request() -> None:
    path, body = FORMS["chat"]
    async with two() as (first, second):
        told = await first.stream(path, body, KEY)
        refused = (400, "Idempotency-Key", "invalid_value")
        for other in ({**body, "seed": 8}, {**body, "n": 2}):
            assert await second.refusal(path, other, KEY) == refused
        for key in ("", "x" * (IDEMPOTENCY_KEY_CHARS_MAX + 1), "\u00e9", "a\tb"):
            assert await second.refusal(path, body, {"Idempotency-Key": key}) == refused
        assert len(await first.lengths()) == 1
        refused = (400, "Last-Event-ID", "invalid_value")
        last = told[-2][0]
        others = [one_token_more(last), f"{last.partition(':')[0]}:3-1-1"]
        others += ["7", "", last + ".0-0-0", last + "+", "\u0663" + last]
        for event_id in others:
            headers = {**KEY, "Last-Event-ID": event_id}
            assert await second.refusal(path, body, headers) == refused, event_id
        assert await second.refusal(path, body, {"Last-Event-ID": last}) == refused
        await second.stream(
            path, {**body, "seed": 8}, {**KEY, **OTHER}
        )  # Another tenant may use the same key.
        assert summary(await second.stream(path, body, KEY)) == summary(told)
        assert len(await first.lengths()) == 2
        headers = {**KEY, **OTHER, "Idempotency-Key": "theirs", "Last-Event-ID": last}
        assert await second.refusal(path, body, headers) == (404, None, "not_found")


async def test_what_a_key_keeps_expires() -> None:
    """Until then a repeated request continues the answer. Afterwards it begins a new one, unless
    the client has tokens of the old one."""
    path, body = FORMS["chat"]
    async with two() as (first, second):
        _, _, content = await first.call(path, body, KEY, leaves_after=4)
        last = {**KEY, "Last-Event-ID": events_of(content)[-1][0]}
        await asyncio.sleep(GRACE_S + 1)
        *_, end, _, _ = await second.stream(path, body, last)
        assert end[1]["choices"][0]["stop_reason"] == "cancelled"
        await asyncio.sleep(second.shared.finished_ttl_ms / 1e3)
        assert await second.refusal(path, body, last) == (404, None, "not_found")
        whole = await second.stream(path, body, KEY)
        assert await second.lengths() == [12]
        assert summary(await first.stream(path, body, KEY)) == summary(whole)
        await asyncio.sleep(second.shared.key_ttl_ms / 1e3)
        assert not any(key.startswith(b"key:") for key in second.shared.data.sorted_keys())


async def test_a_request_with_a_key_outlasts_errors() -> None:
    path, body = FORMS["chat"]
    async with two() as (first, second):
        whole = summary(await first.stream(path, body))
        send = first.target_link.send
        for num_rounds in (0, 2):

            def failing(item: Any, num_rounds: int = num_rounds) -> Any:
                if item.head.round >= num_rounds:
                    raise Unavailable("gone")
                return send(item)

            key = {"Idempotency-Key": f"{num_rounds}"}
            first.target_link.send = failing  # type: ignore[method-assign]
            status, _, content = await first.call(path, body, key)
            assert (status, b'"gone"' in content) == (200 if num_rounds else 503, True)
            first.target_link.send = send  # type: ignore[method-assign]
            assert summary(await second.stream(path, body, key)) == whole
            assert {*await second.lengths()} == {12}


async def test_requests_that_wait_for_the_same_request_are_limited_for_each_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.http_api.progress.REPEATED_REQUESTS_MAX", 2)
    repeated, keys = RepeatedRequests(), [RequestKey(str(number), "") for number in range(3)]

    async def request(number: int, tenant: str = "a") -> None:
        async with repeated.turn(keys[number], Progress(1), tenant):
            await asyncio.sleep(1)

    running = [asyncio.create_task(request(number)) for number in range(3)]
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(request(number)) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await request(2)
    assert refused.value.limit == "repeated_requests"
    await request(2, "b")
    await asyncio.gather(*running, *waiting)
    running = [asyncio.create_task(request(2)) for _ in range(3)]
    await asyncio.gather(*running)
