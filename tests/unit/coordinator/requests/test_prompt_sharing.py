"""Prompts that several generations have in common."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from coordinator.requests.validation import TOKENIZER_THREADS, PromptEncoder
from outrider.request import ChatMessage


class Slow:
    """As much of a tokenizer as prompts need; it waits to be let on."""

    token_bytes_max = 8

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.goes_on = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.seen.append(text)
        self.goes_on.wait(10)
        if text == "bad":
            raise ValueError(text)
        return [len(text)]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(messages[0]["content"])


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.mark.parametrize("chat", [False, True])
async def test_generations_of_one_prompt_tokenize_it_once(slow: Slow, chat: bool) -> None:
    """All get its tokens. An equal one of another request is another, and so is one that comes
    later."""
    prompts = PromptEncoder(slow)  # type: ignore[arg-type]
    made: list[Any] = [" ".join(["some", "words"]) for _ in range(2)]
    if chat:
        made = [(ChatMessage("user", text),) for text in made]
    first, second = made
    assert first == second
    waiting = [prompts.encode(prompt, 100) for prompt in [first] * 16 + [second]]
    running = asyncio.gather(*waiting)
    await asyncio.sleep(0.05)
    slow.goes_on.set()
    assert await running == [("chat" if chat else "text", (10,))] * 17
    assert len(slow.seen) == 2
    await prompts.encode(first, 100)
    assert len(slow.seen) == 3
    await prompts.close()


async def test_one_that_goes_leaves_the_others_waiting(slow: Slow) -> None:
    """An error is everybody's; what nobody waits for any more never begins."""
    prompts = PromptEncoder(slow)  # type: ignore[arg-type]
    busy = [asyncio.create_task(prompts.encode(f"busy {n}", 100)) for n in range(TOKENIZER_THREADS)]
    text, bad, left = "".join(["a", "b"]), "".join(["b", "ad"]), "".join(["c", "d"])
    waiting = {
        one: [asyncio.create_task(prompts.encode(one, 100)) for _ in range(2)]
        for one in (text, bad, left)
    }
    await asyncio.sleep(0.05)
    waiting[text][0].cancel()
    for task in waiting[left]:
        task.cancel()
    await asyncio.sleep(0.05)
    slow.goes_on.set()
    await asyncio.gather(*busy)
    assert await waiting[text][1] == ("text", (2,))
    for task in waiting[bad]:
        with pytest.raises(ValueError, match="bad"):
            await task
    assert "cd" not in slow.seen
    assert await prompts.encode(left, 100) == ("text", (2,))
    await prompts.close()
