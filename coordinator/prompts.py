"""From prompts to token ids, on threads of their own: a long text takes seconds."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from outrider.errors import BadRequest
from outrider.generation import ChatMessage, Prompt

from .completion import TextStream

TOKENIZER_THREADS: Final = 2
"""Prompts that are tokenized at the same time; others wait their turn, up to their deadline."""


class Text(Protocol):
    """The target's tokenizer."""

    @property
    def token_bytes_max(self) -> int:
        """Bytes of text that one token stands for, at most."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text."""
        ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        ...

    def stream(self) -> TextStream:
        """A fresh incremental detokenizer."""
        ...


class PromptEncoder:
    """Tokenizes the prompts of one coordinator."""

    def __init__(self, text: Text | None) -> None:
        """`text` is None for a model without a tokenizer: it takes token ids alone."""
        self._text = text
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def encode(self, prompt: Prompt, tokens_max: int) -> tuple[str, tuple[int, ...]]:
        """The name of the field that the prompt came in, and its token ids. Raises `BadRequest`
        for a text that cannot be tokenized, or that `tokens_max` tokens can never hold: that one
        is not even looked at."""
        if isinstance(prompt, str):
            ids = await self._run("text", prompt, _size(prompt), tokens_max)
            return "text", ids
        turns = [turn for turn in prompt if isinstance(turn, ChatMessage)]
        if not turns:
            return "token_ids", tuple(token for token in prompt if isinstance(token, int))
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        size = sum(_size(turn.content) for turn in turns)
        return "chat", await self._run("chat", messages, size, tokens_max)

    def close(self) -> None:
        """Takes no more prompts; one that is being tokenized is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, field: str, prompt: str | list[dict[str, str]], size: int, tokens_max: int
    ) -> tuple[int, ...]:
        text = self._text
        if text is None:
            raise BadRequest(field, "the model has no tokenizer; give token_ids")
        bytes_max = tokens_max * text.token_bytes_max
        if size > bytes_max:
            raise BadRequest(
                field,
                f"has {size} bytes; {tokens_max} tokens, the model's length, hold at most "
                f"{bytes_max}",
            )

        def tokenize() -> tuple[int, ...]:
            return tuple(
                text.encode(prompt) if isinstance(prompt, str) else text.encode_chat(prompt)
            )

        return await asyncio.get_running_loop().run_in_executor(self._threads, tokenize)


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))
