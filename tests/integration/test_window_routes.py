"""What the window asks the coordinator for by HTTP, and its files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_front import http_front
from models import byte_level_tokenizer
from stack import Stack, running_stack

from outrider.client import Completion
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.request import ChatMessage, GenerateRequest
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokenizer import TokenizerText

VOCAB = 320
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 40}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A draft that is often wrong, and a tokenizer whose tokens split characters."""
    spec = EmulatedSpec(vocab_size=VOCAB, support=32, verify_ms=2.0, draft_ms=0.2)
    target, draft = EmulatedEngine(spec, "target"), EmulatedEngine(spec, "draft")
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    async with running_stack(target, draft, tmp_path, text=text) as running:
        yield running


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with http_front(stack) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def events(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events but the closing mark, which must be there."""
    response = await http.post("/api/generate", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in found if event["type"] == kind]


def check_equal(found: list[dict[str, Any]], answer: Completion) -> None:
    """The events tell what the gRPC answer does. (Where its rounds end depends on how quick a draft
    was, so they are held against the tokens that they brought.)"""
    tokens, rounds = of(found, "tokens"), of(found, "round")
    assert [one for event in tokens for one in event["token_ids"]] == list(answer.token_ids)
    assert "".join(event["text_delta"] for event in tokens) == answer.text
    [finished] = of(found, "finished")
    assert finished["finish_reason"] == answer.finish_reason
    assert finished["usage"] == {
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": answer.usage.completion_tokens,
    }
    metrics = finished["metrics"]
    assert [one["index"] for one in rounds] == list(range(metrics["num_rounds"]))
    drafted = [one["proposed_token_ids"] for one in rounds]
    assert sum(map(len, drafted)) == metrics["num_draft_tokens"]
    for event, told in zip(rounds, tokens, strict=True):
        accepted = told["origins"].count("accepted")
        assert event["num_accepted"] == accepted
        assert told["token_ids"][:accepted] == event["proposed_token_ids"][:accepted]
        whole = accepted == len(event["proposed_token_ids"])
        assert told["origins"][accepted:] in ([], ["bonus" if whole else "correction"])
    accepted = sum(one["num_accepted"] for one in rounds)
    assert 0 < accepted == metrics["num_accepted_draft_tokens"] < metrics["num_draft_tokens"]


@pytest.mark.parametrize("prompt", ["the sky", [1, 2, 3], None])
async def test_events_are_those_of_grpc(
    stack: Stack, http: httpx.AsyncClient, prompt: str | list[int] | None
) -> None:
    """Raw text, token ids and a conversation; with a seed the rule is coupled, so that both
    answers have the same tokens."""
    asked: Any = tuple(prompt) if isinstance(prompt, list) else prompt
    body: dict[str, Any] = {"prompt": prompt}
    if prompt is None:
        asked, body = (
            (ChatMessage("user", "hi"),),
            {"messages": [{"role": "user", "content": "hi"}]},
        )
    found = await events(http, {**body, **SAMPLED, "speculation": {"num_draft_tokens": 3}})
    answer = await stack.client.complete(
        GenerateRequest(
            asked, sampling=SamplingParams(temperature=0.8), seed=5, max_tokens=40,
            num_draft_tokens=3, include_rounds=True,
        )
    )  # fmt: skip
    [started] = of(found, "started")
    assert (started["rule"], started["seed"], started["model"]) == (Rule.COUPLED, 5, "model")
    check_equal(found, answer)


async def test_rounds_and_texts_line_up(stack: Stack, http: httpx.AsyncClient) -> None:
    """A round comes before its tokens and says where they begin; each token has the characters
    that became whole with it, and together they are the text."""
    found = await events(http, {"prompt": [1, 2, 3], **SAMPLED, "temperature": 1.0})
    position = 0
    text = TokenizerText(byte_level_tokenizer(VOCAB), "toy")
    texts: list[str] = []
    pairs = [event for event in found if event["type"] in ("round", "tokens")]
    for event, tokens in zip(pairs[::2], pairs[1::2], strict=True):
        assert (event["type"], tokens["type"]) == ("round", "tokens")
        assert event["first_index"] == tokens["first_index"] == position
        position += len(tokens["token_ids"])
        assert len(tokens["texts"]) == len(tokens["token_ids"])
        texts += tokens["texts"]
        assert len(event["proposed_texts"]) == len(event["proposed_token_ids"])
        assert min(event[f"{part}_ms"] for part in ("draft", "wire", "queue", "verify")) >= 0
    ids = [one for event in of(found, "tokens") for one in event["token_ids"]]
    stream = text.stream()
    assert texts == [stream.push(one) for one in ids]
    told = "".join(event["text_delta"] for event in of(found, "tokens"))
    assert told == "".join(texts) + stream.finish()
    assert "" in texts, "no token splits a character: the seed shows nothing"


async def test_who_goes_ends_the_session(stack: Stack, http: httpx.AsyncClient) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "deadline_ms": 60_000}
    async with http.stream("POST", "/api/generate", json=body) as response:
        lines = response.aiter_lines()
        started = json.loads((await anext(lines)).removeprefix("data: "))
        assert started["type"] == "started"
    async with asyncio.timeout(20):
        while stack.coordinator.num_running:
            await asyncio.sleep(0.01)
        while True:
            record = await stack.coordinator.session(started["session_id"])
            if record.finish_reason is not None:
                break
            await asyncio.sleep(0.01)
    assert record.finish_reason == "cancelled"


async def test_the_fleet(stack: Stack, http: httpx.AsyncClient) -> None:
    """Without a registry: this coordinator and its replicas, and how many sessions each has."""
    told = (await http.get("/api/fleet")).json()
    assert told["heard_ms_ago"] is None
    seen = [(one["role"], one["name"], one["state"], one["load"]) for one in told["replicas"]]
    assert seen == [
        ("coordinator", "coordinator-under-test", "serving", 0),
        ("target", "t", "serving", 0),
        ("draft", "d", "serving", 0),
    ]
    assert [one["here"] for one in told["replicas"]] == [True, False, False]
    assert told["replicas"][1]["model"] == "emulated"
    stack.coordinator.drafts.retire("d")
    told = (await http.get("/api/fleet")).json()
    assert told["replicas"][2]["state"] == "leaving"


async def test_what_is_documented(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert "started" in paths["/api/generate"]["post"]["responses"]["200"]["description"]
    schema = paths["/api/fleet"]["get"]["responses"]["200"]["content"]["application/json"]
    assert schema["schema"]["$ref"].endswith("/Fleet")
    assert not any(path == "/" or path.startswith("/page") for path in paths)
