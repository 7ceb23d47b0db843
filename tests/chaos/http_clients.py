"""Requests as OpenAI's own client makes them, by HTTP: it knows one coordinator, and resumes
nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import httpx
import openai

RETRIES: Final = 20
"""Of a request that is refused for now, after as long as the refusal says."""
TIMEOUT_S: Final = 120.0
BROKEN: Final = (openai.APIConnectionError, httpx.TransportError)
"""What the death of a coordinator looks like."""


async def streamed(
    address: str, prompt: tuple[int, ...], num_tokens: int, seed: int
) -> AsyncIterator[list[int]]:
    """The tokens of a completion as they come. Raises what the client does, and
    `APIConnectionError` for a stream that ends before its time."""
    client = openai.AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="none", max_retries=RETRIES, timeout=TIMEOUT_S
    )
    async with client:
        stream = await client.completions.create(
            model="", prompt=list(prompt), max_tokens=num_tokens, seed=seed, stream=True,
            extra_body={
                "ignore_eos": True, "return_token_ids": True, "speculation": {"rule": "coupled"}
            },
        )  # fmt: skip
        finished = False
        async for chunk in stream:
            for choice in chunk.choices:
                finished = finished or choice.finish_reason is not None
                if found := (choice.model_extra or {}).get("token_ids"):
                    yield found
        if not finished:
            raise openai.APIConnectionError(
                message="the stream ended before its time", request=httpx.Request("POST", address)
            )
