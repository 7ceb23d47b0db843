"""A coordinator is called by HTTP, with OpenAI's own clients and as the window calls it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from coordinator.requests.chat_template import read_chat_template
from outrider.config.deployment import HERMES
from outrider.interfaces.request import ChatMessage, GenerateRequest
from outrider.models.tokenizer import TokenizerText
from outrider.sessions.store import FinishReason
from outrider.speculation.random_streams import choice_seed
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.constrained import EndingEngine, grammars
from tests.support.models import byte_level_tokenizer
from tests.support.stack import (
    Stack,
    emulated_stack,
    http_front,
    running_stack,
    slow_stack,
    toy_text,
    until,
)

MESSAGES: Any = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(temperature=0.0)


@contextlib.asynccontextmanager
async def calling(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with (
        http_front(stack) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with calling(stack) as made:
        yield made


async def test_chat_is_what_grpc_says(stack: Stack, client: AsyncOpenAI) -> None:
    request = GenerateRequest((ChatMessage("user", "hello"),), sampling=GREEDY, max_tokens=12)
    expected = await stack.client.complete(request)
    fields: Any = {"model": "model", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    answer = await client.chat.completions.create(**fields)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert (answer.object, choice.finish_reason) == ("chat.completion", "length")
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 12
    stream = await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage) == ([], answer.usage)


async def test_a_response_is_what_chat_says(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=12, temperature=0
    )
    fields: Any = {"model": "model", "max_output_tokens": 12, "temperature": 0}
    async with client.responses.stream(**fields, input="hello") as stream:
        events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == response.output_text == chat.choices[0].message.content
    assert response.usage.total_tokens == chat.usage.total_tokens
    conversation: Any = [*MESSAGES, *response.output, {"role": "user", "content": "and then?"}]
    again = await client.responses.create(**fields, input=conversation)
    assert (again.status, again.model, again.error) == ("incomplete", "model", None)


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_a_seed_gives_the_same_tokens_everywhere(
    stack: Stack, client: AsyncOpenAI, num_draft_tokens: int
) -> None:
    seeds = [choice_seed(5, choice) for choice in range(3)]
    expected = [
        await stack.client.complete(GenerateRequest("the cat", seed=seed, max_tokens=10))
        for seed in seeds
    ]
    extra = {"return_token_ids": True, "speculation": {"num_draft_tokens": num_draft_tokens}}
    fields: Any = {"model": "model", "prompt": "the cat", "max_tokens": 10, "n": 3, "seed": 5}
    fields["extra_body"] = extra
    answer = await client.completions.create(**fields)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    ids = [tuple(choice.token_ids) for choice in answer.choices]
    assert ids == [one.token_ids for one in expected]
    assert len({one.token_ids for one in expected}) == 3
    texts = {0: "", 1: "", 2: ""}
    async for chunk in await client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [one.text for one in expected]


async def test_echo_scores_prompts_as_it_scores_answers(client: AsyncOpenAI) -> None:
    fields: Any = {"model": "model", "temperature": 0, "logprobs": 2}
    answer = await client.completions.create(
        **fields, prompt="the cat", max_tokens=30, extra_body={"return_token_ids": True}
    )
    told: Any = answer.choices[0]
    echoed = await client.completions.create(
        **fields, prompt="the cat", max_tokens=30, echo=True, seed=1
    )
    assert echoed.choices[0].text == "the cat" + told.text
    both: Any = echoed.choices[0].logprobs
    num_prompt = len(both.tokens) - len(told.token_ids)
    assert both.token_logprobs[num_prompt:] == pytest.approx(told.logprobs.token_logprobs)
    assert both.text_offset[num_prompt] == len("the cat")
    ids = toy_text().encode("the cat")
    assert len(ids) == num_prompt
    prompts: Any = [[*ids, *told.token_ids], ids]
    for stream in (False, True):
        found = await client.completions.create(
            **fields, prompt=prompts, max_tokens=0, echo=True, stream=stream
        )
        chunks: Any = [chunk async for chunk in found] if stream else [found]
        entries: dict[int, list[Any]] = {0: [], 1: []}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            if choice.logprobs is not None:
                entries[choice.index] += choice.logprobs.token_logprobs
        assert entries[0][0] is entries[1][0] is None
        assert entries[0][1:] == pytest.approx(both.token_logprobs[1:])
        assert entries[1][1:] == pytest.approx(both.token_logprobs[1:num_prompt])


class Shape(BaseModel):
    kind: Literal["round", "square"]
    sides: Literal[0, 4]


@pytest.fixture
async def constraining(tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    """Calls a server with the chat template for tools that comes with the package."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = read_chat_template(HERMES)
    engines, text = (EndingEngine(1, 4096), EndingEngine(2, 4096)), TokenizerText(tokenizer, "toy")
    async with (
        running_stack(*engines, tmp_path, text=text, grammars=grammars) as stack,
        calling(stack) as made,
    ):
        yield made


async def test_a_class_of_pydantic(constraining: AsyncOpenAI) -> None:
    answer = await constraining.chat.completions.parse(
        model="model", messages=MESSAGES, response_format=Shape, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Shape)
    response = await constraining.responses.parse(
        model="model", input="hello", text_format=Shape, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Shape)


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "now", "parameters": CITY}}
    for name in ("weather", "news")
]
WRITTEN = r'Well\.<tool_call>\n\{"name": "news", "arguments": \{"city": "Rome"\}\}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "extra", "content", "reason"),
    [
        ("required", {}, None, "tool_calls"),
        ({"type": "function", "function": {"name": "news"}}, {}, None, "stop"),
        ("auto", {"structured_outputs": {"regex": WRITTEN}}, "Well.", "tool_calls"),
        ("none", {"structured_outputs": {"regex": "No"}}, "No", "stop"),
    ],
)
async def test_tools_in_every_mode(
    constraining: AsyncOpenAI, choice: Any, extra: Any, content: str | None, reason: str
) -> None:
    """The stream has the same calls as the whole answer, and the conversation goes on with the
    calls' results. With `auto`, the grammar makes the random model call."""
    fields: Any = {
        "model": "model",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "seed": 3,
        "max_tokens": 400,
        "parallel_tool_calls": choice == "auto",
        "extra_body": extra,
    }
    whole = (await constraining.chat.completions.create(**fields)).choices[0]
    assert (whole.message.content, whole.finish_reason) == (content, reason)
    calls: Any = whole.message.tool_calls or []
    assert len(calls) == (choice != "none")
    for call in calls:
        assert call.function.name in ("weather", "news")[choice not in ("required",) :]
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    async with constraining.chat.completions.stream(**fields) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert (streamed.message.content or None, streamed.finish_reason) == (content, reason)
    again: Any = streamed.message.tool_calls or []
    told = [(call.function.name, call.function.arguments) for call in calls]
    assert [(call.function.name, call.function.arguments) for call in again] == told
    results = [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in calls]
    messages = [*MESSAGES, whole.message, *results]
    answer = await constraining.chat.completions.create(
        model="model", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5
    )
    assert answer.usage.completion_tokens > 0


LONG: Any = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 4000, "seed": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_takes_its_sessions_with_it(tmp_path: Path, stream: bool) -> None:
    """Though a client may resume its sessions by gRPC, for longer than a test lasts."""
    async with (
        slow_stack(tmp_path, max_sessions=3, resume_grace_ms=60_000) as slow,
        http_front(slow) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        body = {**LONG, "n": 2, "stream": stream}
        request = http.build_request("POST", "/v1/completions", json=body)
        calling = asyncio.create_task(http.send(request, stream=True))
        await until(lambda: slow.coordinator.num_running == 2)
        if stream:
            response = await calling
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
        ids = set(slow.coordinator._sessions.running)
        if stream:
            await response.aclose()
        else:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        await until(lambda: slow.coordinator.num_running == 0)
        async with asyncio.timeout(20):
            for session_id in ids:
                while (
                    session := await slow.coordinator.streams.session(session_id)
                ).finish_reason is None:
                    await asyncio.sleep(0.01)
                assert session.finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("prompt", ["the sky", [1, 2, 3], None])
async def test_events_are_those_of_grpc(tmp_path: Path, prompt: str | list[int] | None) -> None:
    """With a seed the rule is coupled, so both answers have the same tokens. Rounds depend on how
    fast a draft was, so they are only compared with their own tokens."""
    body: dict[str, Any] = {
        "temperature": 0.8,
        "seed": 5,
        "max_tokens": 40,
        "speculation": {"num_draft_tokens": 3},
    }
    asked: Any = tuple(prompt) if isinstance(prompt, list) else prompt
    if prompt is None:
        asked = (ChatMessage("user", "hello"),)
    body |= {"messages": MESSAGES} if prompt is None else {"prompt": prompt}
    request = GenerateRequest(
        asked, sampling=SamplingParams(temperature=0.8), seed=5, max_tokens=40, num_draft_tokens=3
    )
    async with (
        emulated_stack(tmp_path, text=toy_text()) as stack,
        http_front(stack) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        response = await http.post("/api/generate", json=body)
        answer = await stack.client.complete(request)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    found = [json.loads(part.removeprefix("data: ").partition("\nid: ")[0]) for part in parts]
    [started], rounds, tokens, [finished] = (
        [event for event in found if event["type"] == kind]
        for kind in ("started", "round", "tokens", "finished")
    )
    assert (started["rule"], started["seed"], started["model"]) == (Rule.COUPLED, 5, "model")
    assert finished["finish_reason"] == answer.finish_reason
    assert finished["usage"]["completion_tokens"] == answer.usage.completion_tokens
    ids = [one for event in tokens for one in event["token_ids"]]
    assert ids == list(answer.token_ids)
    assert "".join(event["text_delta"] for event in tokens) == answer.text
    assert [event["type"] for event in found[1:-1]] == ["round", "tokens"] * len(rounds)
    position = 0
    for event, told in zip(rounds, tokens, strict=True):
        assert event["first_index"] == told["first_index"] == position
        position += len(told["token_ids"])
        proposed, accepted = event["proposed_token_ids"], told["origins"].count("accepted")
        assert event["num_accepted"] == accepted
        assert told["token_ids"][:accepted] == proposed[:accepted]
        assert told["origins"][accepted:] in (
            [],
            ["bonus" if accepted == len(proposed) else "correction"],
        )
    metrics = finished["metrics"]
    assert [one["index"] for one in rounds] == list(range(metrics["num_rounds"]))
    assert sum(len(one["proposed_token_ids"]) for one in rounds) == metrics["num_draft_tokens"]
    drafts = sum(bool(one["proposed_token_ids"]) for one in rounds)
    assert drafts == metrics["num_drafts"] < metrics["num_rounds"]
    accepted = sum(one["num_accepted"] for one in rounds)
    assert 0 < accepted == metrics["num_accepted_draft_tokens"] < metrics["num_draft_tokens"]
