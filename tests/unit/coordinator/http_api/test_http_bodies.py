"""Bodies of HTTP requests: how they are parsed and translated."""

import asyncio
import contextlib
import gc
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coordinator.http_api.bodies import ChatBody, CompletionBody, TranslatedBody
from coordinator.http_api.reading import SHOWN_CHARS_MAX, read_body
from outrider import limits
from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint
from outrider.interfaces.request import ChatMessage, GenerateRequest
from outrider.speculation.random_streams import choice_seed
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.request_codec import request_from_proto, request_to_proto
from tests.support.http_bodies import USER, chat, refused, refused_by_coordinator
from tests.support.http_front import Front
from tests.support.told_coordinator import ToldCoordinator

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
GAP_S = 0.05
"""Most processor time between two turns of the event loop, on a machine that parses `NUMBERS` in
`NUMBERS_S`. A slower machine may take longer in proportion."""
NUMBERS, NUMBERS_S = json.dumps([1_234_567] * 100_000), 0.01
CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/api/generate"


def completion(**fields: Any) -> TranslatedBody:
    return CompletionBody.model_validate({"prompt": "x"} | fields).translate()


def only(asked: TranslatedBody) -> GenerateRequest:
    (request,) = asked.requests
    return request


def test_silence_is_the_coordinators_default() -> None:
    request = only(chat())
    assert request == GenerateRequest((ChatMessage("user", "hi"),))
    assert request == request_from_proto(request_to_proto(request))
    assert only(completion()) == GenerateRequest("x", default_max_tokens=16)
    assert only(chat(seed=3)).rule is None
    assert only(chat(**dict.fromkeys(ChatBody.model_fields.keys() - {"messages"}))) == request


def test_every_field_arrives() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
    }
    speculation = {
        "enabled": True,
        "rule": "block",
        "num_draft_tokens": 3,
        "draft_deadline_ms": 20,
        "histograms": True,
    }
    asked = chat(
        **sampling,
        logit_bias={"5": 1, "3": -2.5},
        stop_token_ids=[7, 6],
        model="m",
        max_completion_tokens=9,
        seed=8,
        stop=["a", "b"],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=2,
        speculation=speculation,
        deadline_ms=100,
        user="me",
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert only(asked) == GenerateRequest(
        prompt=(ChatMessage("user", "hi"),),
        model="m",
        sampling=SamplingParams(
            **sampling,
            logit_bias=((3, -2.5), (5, 1.0)),
            stop_token_ids=(7, 6),  # type: ignore[arg-type]
        ),
        max_tokens=9,
        stop=("a", "b"),
        ignore_eos=True,
        seed=8,
        rule=Rule.BLOCK,
        num_draft_tokens=3,
        deadline_ms=100,
        logprobs=2,
        include_rounds=True,
        draft_deadline_ms=20,
    )
    assert asked.has_logprobs
    assert only(chat(speculation={"enabled": False})).num_draft_tokens == 0


@given(seed=st.integers(0, limits.SEED_MAX), n=st.integers(1, 16), num_prompts=st.integers(1, 4))
def test_choices_have_seeds_of_their_own(seed: int, n: int, num_prompts: int) -> None:
    asked = completion(prompt=[[i + 1] for i in range(num_prompts)], n=n, seed=seed)
    for index, request in enumerate(asked.requests):
        assert request.prompt == (index // n + 1,)
        assert request.seed == choice_seed(seed, index % n)
    assert len(asked.requests) == n * num_prompts


def test_seeds_of_64_bits() -> None:
    """A negative seed stands for the unsigned one with the same bits."""
    for seed, same in ((-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (0, 0)):
        assert only(chat(seed=seed)).seed == same
    assert {refused(chat, {"seed": seed}).field for seed in (-(2**63) - 1, 2**64)} == {"seed"}
    drawn = [(one.prompt, one.seed) for one in completion(prompt=["a", "b"], n=2).requests]
    assert drawn == [("a", None), ("a", None), ("b", None), ("b", None)]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1, 2], [3]], [(1, 2), (3,)])],
)
def test_prompts_of_every_kind(prompt: Any, prompts: list[Any]) -> None:
    assert [request.prompt for request in completion(prompt=prompt).requests] == prompts


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [[]] * (limits.PROMPTS_MAX + 1), [1, "a"], [True], [1.0], ["a", [1]]]
)
def test_what_is_no_prompt_is_refused_by_name(prompt: Any) -> None:
    assert refused(completion, {"prompt": prompt}).field == "prompt"


def test_text_parts_are_lines_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    silent = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    asked = chat(messages=[{"role": "developer", "content": parts}, silent])
    assert only(asked).prompt == (ChatMessage("system", "a\nb"), ChatMessage("assistant", ""))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 3.0}, "min_tokens"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1] * (limits.STOP_TOKEN_IDS_MAX + 1)}, "stop_token_ids"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"messages": [USER, {"role": "function", "content": "x"}]}, "messages[1].role"),
        ({"store": 0}, "store"),
        ({"best_of": True}, "best_of"),
        ({"echo": True}, "echo"),
        ({"surprise": None}, "surprise"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {"3": 100.5}}, "logit_bias[3]"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"speculation": {"num_draft_tokens": 17}}, "speculation.num_draft_tokens"),
        ({"speculation": {"draft_deadline_ms": 0}}, "speculation.draft_deadline_ms"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "x" * 257]}, "stop[1]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"messages": [USER, {"role": "a b", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER, {**USER, "tool_calls": [{}]}]}, "messages[1].tool_calls[0].id"),
        ({"messages": [{**USER, "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant"}, {"role": "user"}]}, "messages[1].content"),
        ({"guided_json": {}}, "guided_json"),
        (
            {"speculation": {"enabled": False, "num_draft_tokens": 4}},
            "speculation.num_draft_tokens",
        ),
    ],
)
def test_what_is_refused_names_the_field(fields: dict[str, Any], field: str) -> None:
    found = refused(chat, fields)
    assert found.field == field
    assert found.message.startswith(f"{field}: ")


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_an_older_field_of_vllm_names_the_field_to_use(kind: str) -> None:
    found = refused(chat, {f"guided_{kind}": "a"})
    assert found.field == f"guided_{kind}"
    named = {f"structured_outputs.{one}" for one in ("json", "regex", "choice")}
    said = {one for one in named if one in found.message}
    assert "give `structured_outputs" in found.message
    assert said == {f"structured_outputs.{kind}"} & named


def test_what_asks_for_nothing_is_accepted() -> None:
    idle = {
        "tools": [],
        "tool_choice": "auto",
        "store": False,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "best_of": 1,
        "user": "me",
        "audio": None,
        "logprobs": False,
        "top_logprobs": 0,
        "messages": [{**USER, "name": "bob"}],
        "structured_outputs": {},
        "guided_json": None,
    }
    assert only(chat(**idle)) == only(chat())
    assert only(completion(echo=False, suffix="")) == only(completion())


def test_echo_asks_for_the_prompts_log_probabilities_where_any_are_asked_for() -> None:
    for logprobs in (None, 0, 3):
        assert only(completion(echo=True, logprobs=logprobs)).prompt_logprobs == logprobs
        assert only(completion(logprobs=logprobs)).prompt_logprobs is None
    with pytest.raises(BadRequest, match=r"^prompt_logprobs: is available only by HTTP"):
        request_to_proto(only(completion(echo=True, logprobs=1)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_k": 101}, "top_k"),
        ({"stop_token_ids": [5, 100]}, "stop_token_ids"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"min_tokens": 9, "structured_outputs": {"regex": "a"}}, "min_tokens"),
        ({"max_tokens": 63}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"speculation": {"rule": "greedy"}}, "speculation.rule"),
        ({"prompt": "a"}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt[0]"),
        ({"prompt": [1, 2, 100]}, "prompt[2]"),
        ({"prompt": [[1] * 64]}, "prompt"),
        ({"prompt": [[100], [1]]}, "prompt[0][0]"),
    ],
)
async def test_the_coordinators_errors_name_the_bodys_fields(
    fields: dict[str, Any], field: str
) -> None:
    request = completion(**{"prompt": [1, 2]} | fields).requests[0]
    error = await refused_by_coordinator(request)
    assert (error.field, error.message.startswith(f"{field}: ")) == (field, True)


async def test_the_coordinators_errors_name_the_fields_of_a_conversation() -> None:
    for fields, field in (
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_completion_tokens": 65}, "max_completion_tokens"),
        ({}, "messages"),
    ):
        assert (await refused_by_coordinator(only(chat(**fields)))).field == field


async def test_errors_say_which_of_several_prompts_is_wrong() -> None:
    """Here each prompt has two choices."""
    asked = completion(prompt=[[1], [2], [3, 100]], n=2)
    names = [request.names.prompt for request in asked.requests]
    assert names == [f"prompt[{index // 2}]" for index in range(6)]
    assert (await refused_by_coordinator(asked.requests[5])).field == "prompt[2][1]"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    name=st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools"})),
    value=JSON,
)
def test_no_value_of_any_field_is_a_bug(name: str, value: Any) -> None:
    for translate in (chat, completion):
        with contextlib.suppress(BadRequest, ValidationError):
            translate(**{name: json.loads(json.dumps(value))})


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"enum": [1, "é"]}}}
DESCRIBED = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
ANY, OF_SCHEMA = Constraint.any_object(), Constraint.of_schema(SCHEMA)
REGEX, CHOICES = Constraint.of_regex("a"), Constraint.of_choices(["a", "b"])


@pytest.mark.parametrize(
    ("fields", "constraint", "field"),
    [
        ({"response_format": {"type": "json_object"}}, ANY, "response_format"),
        ({"response_format": DESCRIBED}, OF_SCHEMA, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
            OF_SCHEMA,
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"json_object": True}}, ANY, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"regex": "a", "grammar": None}},
            REGEX,
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICES, "structured_outputs.choice"),
    ],
)
def test_ways_to_ask_for_a_form(fields: dict[str, Any], constraint: Constraint, field: str) -> None:
    found = only(completion(**fields)).constraint
    assert found is not None
    assert (found, found.field) == (constraint, field)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type: got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, ".json_schema.schema: is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            ".json_schema.schema: is missing",
        ),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json: "),
        ({"structured_outputs": {"grammar": "x"}}, "'regex' or 'choice'; got 'grammar'"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice: must be a list"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object: got 1"),
        ({"structured_outputs": {"json_object": 0}}, "structured_outputs.json_object: got 0"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex: cannot be combined with response_format",
        ),
    ],
)
def test_forms_that_are_none(fields: dict[str, Any], said: str) -> None:
    assert said in refused(completion, fields).message


def filled(before: str, item: str, after: str) -> bytes:
    """A body with as many items as the limit on its size allows."""
    room = limits.HTTP_BODY_BYTES_MAX - len(before) - len(after)
    return (before + ",".join([item] * (room // (len(item) + 1))) + after).encode()


def with_entries(field: str, num: int, value: str) -> bytes:
    """A body whose field has so many entries."""
    entries = ",".join(f'"{number}":{value}' for number in range(num))
    return f'{CONVERSATION}"{field}":{{{entries}}}}}'.encode()


def long_chat(**fields: Any) -> bytes:
    """As many messages with these fields as are allowed."""
    message = {"role": "assistant", "content": "x" * 400, **fields}
    return json.dumps({"messages": [message] * limits.CHAT_MESSAGES_MAX}).encode()


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CONVERSATION = '{"messages":[{"role":"user","content":"a"}],'
BODIES: dict[str, tuple[str, Callable[[], bytes], str | None]] = {
    "messages": (NATIVE, lambda: filled('{"messages":[', '{"role":"a"}', "]}"), None),
    "items": (
        "/v1/responses",
        lambda: json.dumps({"input": [USER] * (limits.HTTP_CONTAINERS_MAX - 2)}).encode(),
        "input",
    ),
    "a schema": (
        CHAT,
        lambda: filled(
            CONVERSATION + '"structured_outputs":{"json":{"enum":[', '["' + "x" * 260 + '"]', "]}}}"
        ),
        "structured_outputs.json",
    ),
    "half characters": (
        COMPLETIONS,
        lambda: filled('{"prompt":["', "\\u00e9" * 50, '\\ud800"]}'),
        None,
    ),
    "a name": (
        COMPLETIONS,
        lambda: json.dumps({"prompt": "x", "max_token" * 400_000: 1}).encode(),
        ("max_token" * 400_000)[:SHOWN_CHARS_MAX] + "...",
    ),
    "a key": (
        CHAT,
        lambda: (CONVERSATION + f'"chat_template_kwargs":{{"{"k" * 4_000_000}":[]}}}}').encode(),
        f"chat_template_kwargs.{'k' * SHOWN_CHARS_MAX}...",
    ),
    "too many biases": (CHAT, lambda: with_entries("logit_bias", 140_000, "1"), None),
    "wrong biases": (CHAT, lambda: with_entries("logit_bias", 65_000, "[]"), None),
    "biases of texts": (CHAT, lambda: with_entries("logit_bias", 32_000, '"a"'), "logit_bias"),
    "constraints": (
        CHAT,
        lambda: with_entries("structured_outputs", 65_000, "1"),
        "structured_outputs",
    ),
    "template variables": (
        CHAT,
        lambda: with_entries("chat_template_kwargs", 65_000, "1"),
        "chat_template_kwargs",
    ),
    "long conversation": (CHAT, long_chat, "model"),
    "calls": (
        CHAT,
        lambda: json.dumps(
            {
                "messages": [{"role": "assistant", "tool_calls": [CALL]}]
                * (limits.HTTP_CONTAINERS_MAX // 4 - 1)
            }
        ).encode(),
        "model",
    ),
    "parts": (
        CHAT,
        lambda: json.dumps(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}] * limits.CONTENT_PARTS_MAX,
                    }
                ]
            }
        ).encode(),
        "model",
    ),
    "arguments": (
        CHAT,
        lambda: filled(
            '{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f",'
            '"arguments":"{\\"a\\":[',
            "1",
            ']}"}}]}]}',
        ),
        "messages",
    ),
    "tokens": (COMPLETIONS, lambda: filled('{"prompt":[', "1234567", "]}"), "model"),
    "text with marks": (COMPLETIONS, lambda: filled('{"prompt":"', '[{\\"a\\":1}]', '"}'), "model"),
}


async def called(path: str, body: bytes) -> tuple[int, dict[str, Any], float]:
    """Status and error of a call, and the most processor time between two turns of the loop."""
    service: Any = ToldCoordinator(BadRequest("model", "is none"))
    front = Front(service)
    gaps: list[float] = []

    async def tick() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            gaps.append(now - last)
            last = now

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            await asyncio.sleep(0)
            yield body[start : start + 65_536]

    gc.collect()
    gc.freeze()  # Keeps the collector from objects of other tests, which would take time.
    try:
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        headers = {"content-type": "application/json"}
        found = await front.send("POST", path, headers, content=parts())
        await asyncio.sleep(0)
        ticking.cancel()
    finally:
        gc.unfreeze()
    return found.status_code, found.json()["error"], max(gaps)


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_up_the_loop(name: str) -> None:
    """The best of five tries counts: other work on the machine only makes a try slower."""
    path, make, param = BODIES[name]
    allowed_s = GAP_S * max(1.0, parse_s() / NUMBERS_S)
    body, gaps = make(), []
    while len(gaps) < 5 and min(gaps, default=math.inf) >= allowed_s:
        status, error, gap_s = await called(path, body)
        assert (status, error["param"]) == (400, param)
        gaps.append(gap_s)
    assert min(gaps) < allowed_s


def parse_s() -> float:
    """Processor time in which this machine parses `NUMBERS`, the best of five tries."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        json.loads(NUMBERS)
        times.append(time.thread_time() - began)
    return min(times)


BIASES = {str(n): 1 for n in range(limits.LOGIT_BIAS_ENTRIES_MAX + 1)}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({f"f{n}": 1 for n in range(limits.HTTP_FIELDS_MAX)}, None, "the body has 129 fields"),
        ({"messages": [USER] * (limits.CHAT_MESSAGES_MAX + 1)}, "messages", "at most 4096 items"),
        ({"logit_bias": BIASES}, "logit_bias", "should have at most 1024 items"),
        ({"stop": ["a"] * 17}, "stop", "list should have at most 16 items"),
        ({"stop": 5}, "stop", "must be a string or a list of at most 16 strings; got 5"),
        ({"n": 17}, "n", "should be less than or equal to 16; got 17"),
        ({"functions": [{}]}, "functions", "is not supported; leave it out, or give []"),
        ({"prompt": "a"}, "prompt", "is not supported; leave it out"),
        ({"n": 2}, "n", "asks for 2 answers; allowed: 1"),
        ({"stream": False}, "stream", "must be true or left out"),
        ({"speculation": {"rule": "odd"}}, "speculation.rule", "coupled"),
        ({"wild-1": 1}, "wild-1", "wild-1: there is no such field"),
        ({"max_token": 1}, "max_token", "there is no such field; did you mean max_tokens?"),
        ({"speculation": {"rul": 1}}, "speculation.rul", "no such field; did you mean rule?"),
        (b"{", None, "the body is not JSON: EOF while parsing an object at line 1 column 1"),
        (b'"\xff"', None, "unicode"),
        (b"[" * 16_000, None, "recursion limit"),
        (b'{"seed": ' + b"1" * 5000 + b"}", None, "number out of range"),
        (b"", None, "the body must be a JSON object, with Content-Type: application/json"),
        (b"[1]", None, "the body must be a JSON object, with Content-Type: application/json"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_is_allowed_is_told(fields: Any, param: str | None, words: str) -> None:
    body = fields
    if isinstance(fields, dict):
        body = json.dumps({"messages": [USER], **fields}).encode()
    status, error, _ = await called(NATIVE, body)
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    "text",
    ["[" * 600_000, '","' * 200_000, "\\" * 300_000 + ",:[{" * 150_000],
    ids=["brackets", "quotes", "backslashes"],
)
def test_marks_inside_of_texts_are_no_values(text: str) -> None:
    body = {"prompt": text, "stop": ['\\"', '"', "\\"]}
    assert read_body(b"\xef\xbb\xbf" + json.dumps(body).encode()) == body
    for value, words in (
        ([1] * (limits.HTTP_VALUES_MAX + 1), "values"),
        ([[]] * (limits.HTTP_CONTAINERS_MAX + 1), "lists"),
    ):
        with pytest.raises(BadRequest, match=f"more than .* {words}"):
            read_body(json.dumps({"prompt": text, "x": value}).encode())
