"""Requests as OpenAI's own client makes them, by HTTP: it knows one coordinator, and resumes
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import openai

REFUSED_FOR_NOW: Final = (429, 503)
RETRY_S: Final = 1.0
"""Until a request is made again that was refused for now ..."""
RETRIES: Final = 15
"""... at most so often: a deployment that refuses everybody for longer has failed."""
TIMEOUT_S: Final = 120.0
BROKEN: Final = (openai.APIConnectionError, httpx.TransportError)
"""What the death of a coordinator looks like."""


async def streamed(
    address: str, prompt: tuple[int, ...], num_tokens: int, seed: int
) -> AsyncIterator[list[int]]:
    """The tokens of a completion as they come. Raises what the client does, and
    `APIConnectionError` for a stream that ends before its time."""
    base_url = f"http://{address}/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        finished = False
        async for chunk in await _begun(client, prompt, num_tokens, seed):
            for choice in chunk.choices:
                finished = finished or choice.finish_reason is not None
                if found := (choice.model_extra or {}).get("token_ids"):
                    yield found
        if not finished:
            raise openai.APIConnectionError(
                message="the stream ended before its time", request=httpx.Request("POST", base_url)
            )


async def _begun(
    client: openai.AsyncOpenAI, prompt: tuple[int, ...], num_tokens: int, seed: int
) -> Any:
    """A stream. What is refused for now is asked again; one that cannot be reached is not."""
    for left in reversed(range(RETRIES)):
        try:
            return await client.completions.create(
                model="", prompt=list(prompt), max_tokens=num_tokens, seed=seed, stream=True,
                extra_body={
                    "ignore_eos": True, "return_token_ids": True,
                    "speculation": {"rule": "coupled"},
                },
            )  # fmt: skip
        except openai.APIStatusError as error:
            if error.status_code not in REFUSED_FOR_NOW or not left:
                raise
            await asyncio.sleep(RETRY_S)
    return None
