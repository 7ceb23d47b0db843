"""A coordinator called by OpenAI's own clients, by HTTP, with targets and drafts behind gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_front import http_front
from models import byte_level_tokenizer
from openai import AsyncOpenAI, OpenAI
from stack import Stack, running_stack
from toy_engine import ToyEngine

from outrider.request import ChatMessage, GenerateRequest
from outrider.speculation.random_streams import choice_seed
from outrider.speculation.sampling_params import SamplingParams
from outrider.tokenizer import TokenizerText

VOCAB = 320
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    target = ToyEngine(VOCAB, salt=1, max_model_len=256)
    draft = ToyEngine(VOCAB, salt=1, max_model_len=256)
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    async with running_stack(target, draft, tmp_path, text=text) as running:
        yield running


@pytest.fixture
async def url(stack: Stack) -> AsyncIterator[str]:
    async with http_front(stack) as found:
        yield found


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_the_blocking_client_and_the_models(url: str) -> None:
    def call() -> tuple[list[str], str, str | None]:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            names = [model.id for model in client.models.list()]
            model = client.models.retrieve(names[0]).id
            answer = client.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=5, temperature=0
            )
            streamed = client.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=5, temperature=0, stream=True
            )
            text = "".join(part.choices[0].delta.content or "" for part in streamed)
            return names, text, answer.choices[0].message.content

    names, streamed, whole = await asyncio.to_thread(call)
    assert names == ["model"]
    assert streamed == whole != ""


async def test_chat_is_what_grpc_says(stack: Stack, client: AsyncOpenAI) -> None:
    """The same text, whole and as a stream, and the usage; the role comes first and once."""
    request = GenerateRequest((ChatMessage("user", "hello"),), sampling=GREEDY, max_tokens=12)
    expected = await stack.client.complete(request)
    fields: Any = {"model": "model", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    answer = await client.chat.completions.create(**fields)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert (answer.object, choice.finish_reason) == ("chat.completion", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 12
    stream = await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    roles = [chunk.choices[0].delta.role for chunk in chunks[:-1]]
    assert roles == ["assistant"] + [None] * (len(chunks) - 2)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == expected.text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_a_seed_gives_the_same_tokens_everywhere(
    stack: Stack, client: AsyncOpenAI, num_draft_tokens: int
) -> None:
    """Whole, streamed and by gRPC, with drafts and without; each choice has its own seed."""
    seeds = [choice_seed(5, choice) for choice in range(3)]
    expected = [
        await stack.client.complete(GenerateRequest("the cat", seed=seed, max_tokens=10))
        for seed in seeds
    ]
    extra = {"return_token_ids": True, "speculation": {"num_draft_tokens": num_draft_tokens}}
    fields: Any = {
        "model": "model", "prompt": "the cat", "max_tokens": 10, "n": 3, "seed": 5,
        "extra_body": extra,
    }  # fmt: skip
    answer = await client.completions.create(**fields)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    ids: Any = [choice.token_ids for choice in answer.choices]  # type: ignore[attr-defined]
    assert [tuple(each) for each in ids] == [one.token_ids for one in expected]
    assert len({one.token_ids for one in expected}) == 3
    texts = {0: "", 1: "", 2: ""}
    async for chunk in await client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [one.text for one in expected]


async def test_choices_of_a_stream_interleave(client: AsyncOpenAI) -> None:
    """They run at the same time, and no one waits for another to end."""
    stream = await client.chat.completions.create(
        model="model", messages=MESSAGES, n=2, max_tokens=30, stream=True
    )
    indices = [chunk.choices[0].index async for chunk in stream]
    first = [indices.index(choice) for choice in (0, 1)]
    last = [len(indices) - 1 - indices[::-1].index(choice) for choice in (0, 1)]
    assert max(first) < min(last)


async def test_logprobs_of_chat_and_of_completions(stack: Stack, client: AsyncOpenAI) -> None:
    """The numbers that gRPC gives, beside the tokens' text, whole and in chunks."""
    request = GenerateRequest("the cat", sampling=GREEDY, max_tokens=8, logprobs=2)
    expected = await stack.client.complete(request)
    fields: Any = {"model": "model", "prompt": "the cat", "max_tokens": 8, "temperature": 0}
    (choice,) = (await client.completions.create(**fields, logprobs=2)).choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [one.logprob for one in expected.logprobs]
    assert choice.logprobs.top_logprobs is not None
    assert [max(one.values()) for one in choice.logprobs.top_logprobs] == [
        one.top[0][1] for one in expected.logprobs
    ]  # fmt: skip
    fields = {"model": "model", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    (chat,) = (
        await client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    ).choices
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    spelled = b"".join(bytes(one.bytes or ()) for one in chat.logprobs.content)
    assert spelled.decode("utf-8", "replace") == chat.message.content
    assert all(len(one.top_logprobs) == 2 for one in chat.logprobs.content)
    stream = await client.chat.completions.create(
        **fields, logprobs=True, top_logprobs=2, stream=True
    )
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    told = [one for part in parts if part is not None for one in part.content or ()]
    assert [one.logprob for one in told] == [one.logprob for one in chat.logprobs.content]


async def test_what_speculation_did_is_told(client: AsyncOpenAI) -> None:
    """The draft is the target's equal: all is accepted. Without drafts nothing is proposed."""
    fields: Any = {"model": "model", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}

    async def told(**speculation: Any) -> dict[str, Any]:
        answer: Any = await client.chat.completions.create(
            **fields, extra_body={"speculation": speculation}
        )
        found: dict[str, Any] = answer.metrics["speculative_decoding"]
        return found

    found = await told(num_draft_tokens=3, histograms=True, draft_deadline_ms=5000)
    steps, accepted = found["num_spec_steps"], found["num_accepted_draft_tokens"]
    assert (found["draft_acceptance_rate"], found["num_spec_tokens"]) == (1.0, 3)
    assert accepted == found["num_draft_tokens"] > 10
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    histogram = found["acceptance_histogram"]
    assert (len(histogram), sum(histogram)) == (4, steps)
    assert sum(count * length for length, count in enumerate(histogram)) == accepted
    by_length = found["acceptance_histogram_by_draft_length"]
    assert sum(map(sum, by_length.values())) == steps
    found = await told(enabled=False)
    assert (found["num_draft_tokens"], found["num_spec_tokens"]) == (0, 0)
    assert "acceptance_histogram" not in found


async def test_error_classes(client: AsyncOpenAI) -> None:
    create: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="another", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another/one")
    for fields, param in (
        ({"temperature": 3}, "temperature"),
        ({"max_completion_tokens": 100_000}, "max_completion_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"stop": ["x" * 300]}, "stop[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"extra_body": {"speculation": {"num_draft_tokens": 17}}}, "speculation.num_draft_tokens"),
        (
            {"extra_body": {"speculation": {"draft_deadline_ms": 0}}},
            "speculation.draft_deadline_ms",
        ),
        ({"extra_body": {"top_k": VOCAB + 1}}, "top_k"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as bad:
                await create(model="model", messages=MESSAGES, stream=stream, **fields)
            assert bad.value.param == param


async def test_routes_and_what_they_describe(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert "version" in (await http.get("/version")).json()
        for path, method, status in (("/nothing", "GET", 404), ("/v1/completions", "GET", 405)):
            found = await http.request(method, path)
            assert found.status_code == status
            assert found.json()["error"].keys() == {"message", "type", "param", "code"}
        off = await http.get("/metrics")
        assert off.status_code == 404
        assert "keeps no metrics" in off.json()["error"]["message"]
        described = (await http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= described[
        "paths"
    ].keys()  # fmt: skip
    responses = described["paths"]["/v1/completions"]["post"]["responses"]
    assert "422" not in responses
