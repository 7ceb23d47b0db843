"""Sends requests to every HTTP route. They are generated from the server's OpenAPI document, and
the answers are checked against the document."""

import itertools
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx
import jsonschema
from hypothesis import strategies as st

from tests.fuzz.hostile import FLOATS, INTS, LENGTHS, TEXTS, broken
from tests.fuzz.ledger import REDIS_LATE, REDIS_REST_S, Ledger
from tests.fuzz.started import Started
from tests.fuzz.valid import TOKENS

WAIT_S: Final = 60.0
Json = dict[str, Any]
ANSWER_ID: Final = "{answer_id}"
_DEPTH_MAX: Final = 4
_METHODS: Final = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "QUERY")
_ANYTHING: Final = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def _numbered(number: int, value: Any) -> Json:
    """Many entries, but not more than fit into a body."""
    number = min(number, 2**20 // (10 + len(json.dumps(value))))
    return dict.fromkeys(map(str, range(number)), value)


_KINDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "string": TEXTS,
    "integer": INTS,
    "number": FLOATS | INTS,
    "boolean": st.booleans(),
    "null": st.none(),
    "object": st.dictionaries(TEXTS, _ANYTHING, max_size=4)
    | st.builds(_numbered, st.sampled_from((*LENGTHS, 100_000)), _ANYTHING),
}
_BASES: Final = {
    "ChatBody": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "CompletionBody": {"prompt": [1, 2, 3], "max_tokens": 4},
    "ResumeBody": {},
    "ResponsesBody": {"input": "hi", "max_output_tokens": 4},
    "TokenizeBody": {"prompt": "hi"},
    "DetokenizeBody": {"tokens": [1, 2, 3]},
}
"""Valid bodies, by the name of their schema."""
_TOOL: Final = {"type": "function", "function": {"name": "f"}}
_TOOLS: Final = [{"tools": [_TOOL], "tool_choice": one} for one in ("auto", "required", _TOOL)]
_TEXT_BODIES: Final = (
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"prompt": "\\ud800"}',
    b"\xff\xfe{}",
    b"\xef\xbb\xbf{}",
    b'{"prompt":"a","prompt":"b","max_tokens":2}',
    b'{"prompt":' + b"[" * 100_000,
    b'{"prompt":[1],"seed":' + b"9" * 5000 + b"}",
    b'{"prompt":[1],"temperature":1e999}',
    b'{"prompt":[NaN,Infinity]}',
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b"\0" * 100,
    b'{"prompt":[1],"max_tokens":4,"' + b"k" * 70_000 + b'":1}',
    b"prompt=a&max_tokens=4",
)
_HEADERS: Final[tuple[tuple[str, str], ...]] = (
    ("content-type", "text/plain"),
    ("content-type", "application/json; charset=utf-16"),
    ("content-type", "multipart/form-data"),
    ("content-type", "application/x-www-form-urlencoded"),
    ("content-encoding", "gzip"),
    ("accept", "text/event-stream"),
    ("accept", "x" * 1000),
    ("accept-encoding", "*;q=x"),
    ("traceparent", "00-" + "z" * 52),
    ("traceparent", "x" * 300),
    ("x-huge", "x" * 30_000),
    ("range", "bytes=0-0,1-2"),
    ("if-none-match", "*"),
    ("x-forwarded-for", "1.2.3.4, ::1"),
    ("x-http-method-override", "DELETE"),
    ("host", "elsewhere"),
    ("last-event-id", "1"),
    ("last-event-id", "3:2-1f-1+0-1-1"),
    ("last-event-id", "1:0-0-1"),
    ("idempotency-key", "k"),
    ("idempotency-key", "l"),
    ("idempotency-key", "x" * 129),
    ("idempotency-key", "\x7f"),
)


_NEW_ID: Final = re.compile(r'"id":"((?:chat)?cmpl-[0-9a-f]{32})"')


@dataclass(frozen=True)
class HttpCall:
    method: str
    path: str
    route: str = ""
    """The name of the path in the document; empty if it has none."""
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    place: str = "locked_http"
    key: str = "fuzzer"
    num_lines: int = 10_000
    """Lines of the answer that the caller reads before it disconnects."""


@dataclass(frozen=True)
class Document:
    """A server's OpenAPI document."""

    whole: Json

    def operations(self) -> list[tuple[str, str, Json]]:
        return [
            (method.upper(), path, operation)
            for path, methods in self.whole["paths"].items()
            for method, operation in methods.items()
        ]

    def resolved(self, schema: Json) -> Json:
        while "$ref" in schema:
            found: Any = self.whole
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema

    def values(self, schema: Json, depth: int = 0) -> st.SearchStrategy[Any]:
        """Values that match the schema, and other values of the same type."""
        schema = self.resolved(schema)
        if depth > _DEPTH_MAX:
            return _ANYTHING
        if several := schema.get("anyOf", schema.get("oneOf")):
            return st.one_of(*(self.values(one, depth + 1) for one in several))
        if "const" in schema or "enum" in schema:
            return st.sampled_from(schema.get("enum", [schema.get("const")]))
        if schema.get("type") == "array":
            inner = self.values(schema.get("items", {}), depth + 1)
            many = st.tuples(inner, st.sampled_from(LENGTHS)).map(_repeated)
            return st.lists(inner, max_size=4) | st.lists(inner, max_size=4) | many
        if "properties" in schema:
            properties = schema["properties"].items()
            parts = {name: self.values(one, depth + 1) for name, one in properties}
            return st.fixed_dictionaries({}, optional=parts)
        return _KINDS.get(schema.get("type", ""), _ANYTHING)

    def bodies(self, operation: Json) -> st.SearchStrategy[bytes | None]:
        """Bodies for an operation, mostly valid except for a few fields."""
        if "requestBody" not in operation:
            return st.none() | st.sampled_from(_TEXT_BODIES)
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        kinds = {
            one["$ref"].rpartition("/")[2]: {
                key: self.values(value) | _ANYTHING
                for key, value in self.resolved(one)["properties"].items()
            }
            for one in schema.get("oneOf", [schema])
        }

        @st.composite
        def nearly(draw: st.DrawFn) -> bytes:
            name, fields = draw(st.sampled_from(sorted(kinds.items(), key=lambda one: one[0])))
            body = dict(_BASES[name])
            if name == "CompletionBody":
                body["prompt"] = draw(TOKENS)
            if "seed" in fields:
                body |= draw(st.sampled_from(({}, {"stream": True}, {"n": 2}, {"seed": 1})))
            if "messages" in body:
                body |= draw(st.sampled_from(({}, *_TOOLS)))
            for key in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
                body[key] = draw(fields[key])
            return _encoded(body)

        whole = self.values(schema).map(_encoded)
        return nearly() | nearly() | whole | broken(nearly()) | st.sampled_from(_TEXT_BODIES)

    def complaint(self, call: HttpCall, response: httpx.Response) -> str:
        """How an answer deviates from the document; empty if it does not."""
        kind = response.headers.get("content-type", "").partition(";")[0]
        status = response.status_code
        if status >= 400 and call.method != "HEAD":
            schema = {
                "$ref": "#/components/schemas/ErrorBody",
                "components": self.whole["components"],
            }
            if kind != "application/json":
                return f"an error of type {kind!r}"
            errors = jsonschema.Draft202012Validator(schema).iter_errors(response.json())
            if found := [error.message for error in errors]:
                return f"an error of another shape: {found}"
        operation = self.whole["paths"].get(call.route, {}).get(call.method.lower())
        if operation is None:
            return ""
        declared = operation["responses"]
        found = declared.get(str(status)) or declared.get(f"{status // 100}XX")
        if found is None:
            return f"the status {status} is not declared"
        if status != 204 and kind not in found.get("content", {kind: None}):
            return f"the type {kind!r} is not declared for {status}"
        return ""


def _repeated(pair: tuple[Any, int]) -> list[Any]:
    value, number = pair
    return [value] * min(number, 2**20 // max(1, len(str(value))))


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def requests(document: Document) -> st.SearchStrategy[HttpCall]:
    """Requests to the document's paths, and to similar paths."""
    operations = document.operations()

    @st.composite
    def request(draw: st.DrawFn) -> HttpCall:
        method, route, operation = draw(st.sampled_from(operations))
        text = quote(draw(TEXTS).encode("utf-8", "replace")[:2000])
        path = route.replace("{name}", text)
        if draw(st.booleans()):  # Otherwise it has the newest answer's id.
            path = path.replace(ANSWER_ID, text)
        other = draw(st.sampled_from(("", "", "", "", "", "?a=b&a=c", "/", "//", "/../health")))
        body = draw(document.bodies(operation))
        headers: tuple[tuple[str, str], ...] = ()
        if body is not None:
            headers = (("content-type", "application/json"),)
        more = draw(st.lists(st.sampled_from(_HEADERS), max_size=2))
        return HttpCall(
            method=draw(st.sampled_from((method,) * 9 + _METHODS)),
            path=path + other,
            route=route if not other else "",
            body=body,
            headers=headers + tuple(more),
            place=draw(st.sampled_from(("locked_http", "open_http", "gateway_http"))),
            key=draw(st.sampled_from(("fuzzer",) * 9 + ("", "wrong"))),
            num_lines=draw(st.sampled_from((10_000, 10_000, 0, 1, 3))),
        )

    return request()


class HttpFeed:
    """Makes requests and checks the answers."""

    def __init__(self, started: Started, ledger: Ledger) -> None:
        self._keys = started.keys
        self._ledger = ledger
        self._clients = {
            place: httpx.Client(base_url=f"http://{started.addresses[place]}", timeout=WAIT_S)
            for place in ("open_http", "locked_http", "gateway_http")
        }
        self._answer_id = "none"
        answer = self._clients["open_http"].get("/openapi.json")
        self.document = Document(answer.raise_for_status().json())

    def feed(self, again: str, call: HttpCall, *, is_repeated: bool = False) -> None:
        client = self._clients[call.place]
        key = self._keys.get(call.key, call.key)
        headers = [*call.headers, *((("authorization", f"Bearer {key}"),) if key else ())]
        path = call.path.replace(ANSWER_ID, self._answer_id)
        try:
            with client.stream(call.method, path, content=call.body, headers=headers) as response:
                text = _read(call, response)
        except httpx.RemoteProtocolError as error:
            self._ledger.fail(again, f"the connection broke: {error!r}", call)
            return
        except (
            httpx.InvalidURL,
            httpx.LocalProtocolError,
            httpx.ReadError,
            httpx.WriteError,
        ) as error:
            # The request was never sent, or was refused before its body was read.
            self._ledger.count("http", type(error).__name__)
            return
        if REDIS_LATE in text and not is_repeated:
            time.sleep(REDIS_REST_S)
            self.feed(again, call, is_repeated=True)
            return
        self._ledger.count("http", response.status_code)
        if found := _NEW_ID.search(text):
            self._answer_id = found[1]
        if '"code":"internal_error"' in text:
            self._ledger.fail(again, f"{response.status_code} {text[-500:]}", call)
        elif response.status_code >= 500 and not (_is_late(response) or _may_wait(call, response)):
            self._ledger.fail(again, f"{response.status_code} {text[:500]}", call)
        elif complaint := self.document.complaint(call, response):
            self._ledger.fail(again, complaint, call)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _read(call: HttpCall, response: httpx.Response) -> str:
    if "event-stream" not in response.headers.get("content-type", ""):
        return response.read().decode("utf-8", "replace")
    return "\n".join(itertools.islice(response.iter_lines(), call.num_lines))


def _may_wait(call: HttpCall, response: httpx.Response) -> bool:
    """Whether another stream may own the session of a repeated request."""
    repeats = call.path.endswith("/resume") or "idempotency-key" in dict(call.headers)
    return repeats and response.status_code == 503 and "retry-after" in response.headers


def _is_late(response: httpx.Response) -> bool:
    """Whether the answer says that the request's own deadline has passed."""
    return response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
