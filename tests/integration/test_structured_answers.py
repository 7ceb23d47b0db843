"""Answers of a form that OpenAI's own client asks for, by HTTP, from real services."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from constrained import CONSTRAINTS, EndingEngine, grammars, hf_tokenizer
from http_front import http_front
from openai import AsyncOpenAI
from pydantic import BaseModel
from stack import running_stack

from outrider.tokenizer import TokenizerText

MESSAGES: Any = [{"role": "user", "content": "hello"}]


class Shape(BaseModel):
    kind: Literal["round", "square"]
    sides: Literal[0, 4]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    text = TokenizerText(hf_tokenizer(), "toy")
    target, draft = EndingEngine(1), EndingEngine(2)
    async with (
        running_stack(target, draft, tmp_path, text=text, grammars=grammars) as stack,
        http_front(stack) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rule", ["token", "coupled"])
async def test_a_regular_expression(client: AsyncOpenAI, stream: bool, rule: str) -> None:
    """Whole and as a stream; all choices."""
    answer: Any = await client.chat.completions.create(
        model="model", messages=MESSAGES, temperature=1, seed=3, n=3, stream=stream, max_tokens=200,
        extra_body={
            "structured_outputs": {"regex": CONSTRAINTS["regex"].text},
            "speculation": {"rule": rule, "num_draft_tokens": 3},
        },
    )  # fmt: skip
    texts, ends = [""] * 3, [""] * 3
    parts = [part async for part in answer] if stream else [answer]
    for part in parts:
        for choice in part.choices:
            found = choice.delta if stream else choice.message
            texts[choice.index] += found.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert ends == ["stop"] * 3
    assert all(re.fullmatch(CONSTRAINTS["regex"].text, text) for text in texts), texts


async def test_a_class_of_pydantic(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model="model", messages=MESSAGES, response_format=Shape, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Shape)


async def test_what_cannot_be_compiled_is_named(client: AsyncOpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(
            model="model", messages=MESSAGES, response_format=schema
        )
    assert bad.value.param == "response_format.json_schema.schema"
