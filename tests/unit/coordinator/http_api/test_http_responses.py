"""`POST /v1/responses`: its translation into a chat completion, and OpenAI's items and events."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from coordinator.http_api.bodies import ChatBody, TranslatedBody
from coordinator.http_api.responses import ResponseAnswer, ResponsesBody
from coordinator.http_api.tools import ChatFormats
from outrider.errors import Unavailable
from outrider.interfaces.messages import PositionLogprobs
from outrider.interfaces.request import Event, Finished, Tokens
from outrider.limits import CHAT_MESSAGES_MAX
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from tests.support.http_bodies import refused, refused_by_coordinator
from tests.support.http_front import Front
from tests.support.told_coordinator import FINISHED, STARTED, TOKENS, ToldCoordinator

ID = STARTED.session_id
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
LOGPROBS = "message.output_text.logprobs"
MORE = Tokens(1, (8, 9), "bc", (Origin.BONUS,) * 2, ())
NO_FORMATS, FORMATS = ChatFormats(None), ChatFormats(None, "hermes", "qwen3")


def asked(**fields: Any) -> TranslatedBody:
    return ResponsesBody.model_validate({"input": "hi"} | fields).translate(NO_FORMATS)


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


ANSWERED = message(
    "assistant",
    [{"type": "output_text", "text": "b", "annotations": [], "logprobs": None}],
    id="msg_1",
    status="completed",
    phase=None,
)
"""An item of an earlier answer."""


def call(arguments: str = "{}", **more: Any) -> dict[str, Any]:
    told = {"name": "weather", "arguments": arguments, "status": "completed"}
    return {"type": "function_call", "id": "fc_1", "call_id": "call_1", **told, **more}


WEATHER = {"name": "weather", "description": "now", "parameters": SCHEMA}
FLAT = {"type": "function", "strict": True, **WEATHER}
NESTED = {"type": "function", "function": WEATHER}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
THINKING: dict[str, Any] = {"role": "assistant", "reasoning_content": "hm"}
SAME = {
    "seed": 3,
    "top_k": 4,
    "stop": "x",
    "speculation": {"num_draft_tokens": 2},
    "chat_template_kwargs": {"a": 1},
}
"""Fields that both APIs have."""
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "warm"}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        (
            {"input": [message("user", "a"), THOUGHT, ANSWERED, call(), call(), RESULT, ANSWERED]},
            {
                "messages": [
                    ("user", "a"),
                    {**THINKING, "content": "b", "tool_calls": [CALLED, CALLED]},
                    {"role": "tool", "content": "warm", "tool_call_id": "call_1"},
                    ("assistant", "b"),
                ]
            },
        ),
        (
            {"input": [ANSWERED, ANSWERED, THOUGHT, call(), THOUGHT, THOUGHT]},
            {
                "messages": [
                    *[("assistant", "b")] * 2,
                    {**THINKING, "tool_calls": [CALLED]},
                    *[THINKING] * 2,
                ]
            },
        ),
        (
            {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [NESTED], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [FLAT], "tool_choice": {"type": "function", "name": "weather"}},
            {
                "tools": [NESTED],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            },
        ),
        (
            {"input": [{"role": "user", "content": "a"}], "instructions": "be brief"},
            {"messages": [("system", "be brief"), ("user", "a")]},
        ),
        (
            {
                "input": [
                    message("developer", [{"type": "input_text", "text": one} for one in "xy"]),
                    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
                    {**THOUGHT, "content": [{"type": "reasoning_text", "text": ""}]},
                    ANSWERED,
                    message("user", "c"),
                ]
            },
            {"messages": [("system", "x\ny"), ("assistant", "b"), ("user", "c")]},
        ),
        ({"max_output_tokens": 5, "top_p": 0.5}, {"max_completion_tokens": 5, "top_p": 0.5}),
        ({"text": {"format": {"type": "text"}}}, {}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": FORMAT, "verbosity": "medium"}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        ({"include": [LOGPROBS]}, {"logprobs": True}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        (SAME, SAME),
        (
            {
                "store": True,
                "background": False,
                "truncation": "disabled",
                "tools": [],
                "previous_response_id": None,
                "tool_choice": "auto",
                "include": [],
                "user": "me",
                "reasoning": {"effort": None},
                "stream_options": {"include_obfuscation": False},
                "metadata": {"a": "b"},
                "service_tier": "auto",
                "parallel_tool_calls": True,
            },
            {},
        ),
    ],
)
def test_it_stands_for_a_chat_completion(fields: Any, chat: Any) -> None:
    messages = [
        one if isinstance(one, dict) else {"role": one[0], "content": one[1]}
        for one in chat.get("messages", [("user", "hi")])
    ]
    body = ChatBody.model_validate({**chat, "messages": messages})
    assert asked(**fields).requests == body.translate(NO_FORMATS).requests


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": None}, "input: is missing"),
        ({"input": 5}, "input: input should be a valid list"),
        ({"input": []}, "input: list should have at least 1 item"),
        ({"input": [call()] * CHAT_MESSAGES_MAX}, "input: list should have at most 4095 items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: input should be 'mes"),
        ({"input": [5]}, "input[0]: input should be a valid dictionary"),
        ({"input": [message("user", "a"), message("tool", "b")]}, "input[1].role: "),
        ({"input": [{"role": "user"}]}, "input[0].content: is missing"),
        ({"input": [{**RESULT, "content": "a"}]}, "input[0].content: is not a field of a "),
        ({"input": [message("user", [{"type": "input_image"}])]}, "input[0].content[0].type: "),
        ({"input": [message("user", "a", tool_calls=[])]}, "input[0].tool_calls: there is no"),
        ({"input": [message("user", "a"), call(), call("[1]")]}, "input[2].arguments: "),
        ({"input": [{**RESULT, "call_id": None}]}, "input[0].call_id: is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: input should be 'function'; got"),
        ({"tools": [{**FLAT, "defer_loading": True}]}, "tools[0].defer_loading: is not supported"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice: must be none, auto, required"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: is not supported; leave"),
        ({"background": True}, "background: is not supported; leave it out, or give false"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]: input should be 'message.out"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort: is not supported; leave it out, or"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: got 'xml'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: is missing"),
        ({"text": {"format": {**FORMAT, "schema": 1}}}, "text.format.schema: "),
        ({"metadata": {"a": 1}}, "metadata.a: input should be a valid string"),
        ({"n": 2}, "n: there is no such field"),
    ],
)
def test_what_is_refused_names_the_field(fields: dict[str, Any], said: str) -> None:
    assert said in refused(asked, fields).message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "input"),
        ({"input": [{"type": "reasoning", "content": ""}]}, "input"),
        ({"max_output_tokens": 65}, "max_output_tokens"),
        ({"top_k": 101}, "top_k"),
        ({"speculation": {"rule": "greedy"}}, "speculation.rule"),
    ],
)
async def test_the_coordinators_errors_name_the_bodys_fields(
    fields: dict[str, Any], field: str
) -> None:
    [request] = asked(**fields).requests
    assert (await refused_by_coordinator(request)).field == field


def test_constraints_name_their_field() -> None:
    for form, field in ((FORMAT, "text.format.schema"), ({"type": "json_object"}, "text.format")):
        [request] = asked(text={"format": form}).requests
        assert request.constraint is not None
        assert request.constraint.field == field


async def answered(*events: Event | Exception, **fields: Any) -> Any:
    front = Front(ToldCoordinator(STARTED, *events), formats=FORMATS)
    return await front.send("POST", "/v1/responses", json={"input": "hi", **fields})


def part(text: str, logprobs: Any = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def item(text: str, status: str) -> dict[str, Any]:
    return dict(sorted(message("assistant", [part(text)], id=f"msg_{ID}_0", status=status).items()))


async def test_a_whole_response() -> None:
    found = (await answered(TOKENS, MORE, FINISHED, store=True, metadata={"a": "b"})).json()
    Response.model_validate(found)
    assert (found["id"], found["object"]) == (f"resp_{ID}", "response")
    assert found["status"] == "completed"
    assert [dict(sorted(one.items())) for one in found["output"]] == [item("abc", "completed")]
    assert found["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }
    assert (found["store"], found["metadata"], found["temperature"]) == (False, {"a": "b"}, 1.0)
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] == 1


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.DEADLINE])
async def test_a_response_that_was_cut_off_is_incomplete(reason: FinishReason) -> None:
    found = (await answered(TOKENS, Finished(reason, FINISHED.usage, FINISHED.metrics))).json()
    assert found["status"] == found["output"][0]["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["stop_reason"] == (None if reason is FinishReason.LENGTH else "deadline")


def told(stream: str) -> list[dict[str, Any]]:
    """The events of a stream. Checks their types and numbers."""
    *parts, end = stream.split("\n\n")
    assert end == ""
    found = []
    for number, each in enumerate(parts):
        name, data, *_ = each.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        TypeAdapter(ResponseStreamEvent).validate_python(event)
        found.append(event)
    return found


async def test_an_error_behind_the_first_token_is_a_failed_response() -> None:
    *events, last = told((await answered(TOKENS, Unavailable("gone"), stream=True)).text)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *STEPS[:4],
        "output_text.delta",
    ]
    response = last["response"]
    assert (last["type"], response["status"]) == ("response.failed", "failed")
    assert (response["error"]["code"], response["error"]["message"]) == ("server_error", "gone")
    assert response["output"] == [item("a", "incomplete")]
    assert (await answered(Unavailable("gone"), stream=True)).status_code == 503


def test_a_long_response_is_told_quickly() -> None:
    answer = ResponseAnswer(asked(), None, 4, 99)
    for event in (STARTED, *(replace(TOKENS, text_delta="abcd") for _ in range(50_000)), FINISHED):
        answer.take(0, event)
    began = time.thread_time()
    told = answer.whole()
    assert time.thread_time() - began < 0.1
    assert told["output"][0]["content"][0]["text"] == "abcd" * 50_000


async def test_log_probabilities_are_those_of_chat() -> None:
    event = Tokens(0, (7,), "a", (Origin.BONUS,), (PositionLogprobs(-0.5, ((7, -0.5), (8, -1.5))),))
    fields: Any = {"include": [LOGPROBS], "top_logprobs": 2}
    [message] = (await answered(event, FINISHED, **fields)).json()["output"]
    [logprob] = message["content"][0]["logprobs"]
    assert (logprob["token"], logprob["logprob"]) == ("token_id:7", -0.5)
    assert [top["logprob"] for top in logprob["top_logprobs"]] == [-0.5, -1.5]
    events = told((await answered(event, FINISHED, stream=True, **fields)).text)
    assert events[4]["logprobs"] == events[5]["logprobs"] == [logprob]
    assert events[3]["part"]["logprobs"] == []


TEXTS = (
    "<think>hm",
    "</think>I ",
    "look.<tool_call>",
    '{"name": "weather", "arg',
    'uments": {"a":',
    ' 1}}</tool_call><tool_call>{"name": "weather"}',
    "</tool_call>",
)
STEPS = [
    "created",
    "in_progress",
    "output_item.added",
    "content_part.added",
    "reasoning_text.delta",
    "reasoning_text.done",
    "content_part.done",
    "output_item.done",
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
    "completed",
]
NO_TIMES = {"created_at": 0, "completed_at": 0}


async def test_reasoning_and_calls_are_items_of_their_own() -> None:
    texts = [
        Tokens(n, (n,), text, (Origin.BONUS,), (PositionLogprobs(-0.5, ()),))
        for n, text in enumerate(TEXTS)
    ]
    fields: Any = {"tools": [FLAT], "include": [LOGPROBS]}
    whole = (await answered(*texts, FINISHED, **fields)).json()
    Response.model_validate(whole)
    thought, said, *calls = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    [text] = said["content"]
    assert [one["token"] for one in text["logprobs"]] == ["token_id:1", "token_id:2"]
    assert text == part("I look.", text["logprobs"])
    assert [(one["name"], one["arguments"]) for one in calls] == [
        ("weather", '{"a": 1}'),
        ("weather", "{}"),
    ]
    assert len({one["id"] for one in whole["output"]} | {one["call_id"] for one in calls}) == 6
    assert (whole["tools"], whole["tool_choice"]) == ([FLAT], "auto")
    events = told((await answered(*texts, FINISHED, stream=True, **fields)).text)
    assert [event["type"].removeprefix("response.") for event in events] == STEPS
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"] | NO_TIMES == whole | NO_TIMES
    assert [one["item"] for one in events if "item.done" in one["type"]] == whole["output"]
    grown = ["", "", "", ""]
    for event in events[2:-1]:
        place, part_of = event["output_index"], event.get("part", {})
        grown[place] += event.get("delta", "")
        item = whole["output"][place]
        assert event.get("item_id", item["id"]) == item["id"]
        assert event.get("text", part_of.get("text", grown[place])) == grown[place]
        if event["type"].endswith("item.added"):
            assert event["item"].get("content", event["item"].get("arguments")) in ([], "")
        if event["type"].endswith("part.done"):
            assert [part_of] == item["content"]
    assert grown == ["hm", "I look.", '{"a": 1}', "{}"]


async def test_a_call_that_must_come() -> None:
    fields: Any = {"tools": [FLAT], "tool_choice": {"type": "function", "name": "weather"}}
    event = Tokens(0, (7,), '{"a":', (Origin.BONUS,), ())
    ended = Finished(FinishReason.LENGTH, FINISHED.usage, FINISHED.metrics)
    [found] = (await answered(event, ended, **fields)).json()["output"]
    assert (found["type"], found["status"], found["arguments"]) == (
        "function_call",
        "incomplete",
        '{"a":',
    )
