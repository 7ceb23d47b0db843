"""From prompts to token ids, on threads of their own, for a long text takes seconds; and checks of
constraints."""

from __future__ import annotations

from typing import Final, Protocol

from coordinator.decoding.detokenizer import TextStream
from outrider.errors import NO_TOKENIZER, BadRequest
from outrider.grammar.constraint import Constraint
from outrider.request import ChatMessage, Prompt
from outrider.shared_calls import SharedCalls

from .grammar_check import ConstraintChecks

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

    def spell(self, token_id: int) -> bytes:
        """What a token is written as inside a text; a special one by its name."""
        ...

    def stream(self) -> TextStream:
        """A fresh incremental detokenizer."""
        ...

    def backend_json(self) -> str:
        """The same tokenizer as the JSON of Hugging Face's tokenizers. Raises `ConfigError` where
        it is none of them."""
        ...


class PromptEncoder:
    """Tokenizes the prompts of one coordinator, and checks constraints with the tokenizer."""

    def __init__(self, text: Text | None) -> None:
        """`text` is None for a model without a tokenizer: it takes token ids alone."""
        self._text = text
        self._calls: SharedCalls[int, tuple[int, ...]] = SharedCalls(TOKENIZER_THREADS, "tokenizer")
        """By the prompt's identity, which the generations of one request have in common; as long as
        one of them waits, nothing else has it."""
        self._checks: ConstraintChecks | None = None

    async def encode(self, prompt: Prompt, tokens_max: int) -> tuple[str, tuple[int, ...]]:
        """The name of the field that the prompt came in, and its token ids. The same object is
        tokenized once for all who wait for it. Raises `BadRequest`
        for a text that cannot be tokenized, or that `tokens_max` tokens can never hold: that one
        is not even looked at."""
        if isinstance(prompt, str):
            ids = await self._run("text", prompt, prompt, _size(prompt), tokens_max)
            return "text", ids
        if not (prompt and isinstance(prompt[0], ChatMessage)):  # There may be a million.
            return "token_ids", prompt  # type: ignore[return-value]
        turns = [turn for turn in prompt if isinstance(turn, ChatMessage)]
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        size = sum(_size(turn.content) for turn in turns)
        return "chat", await self._run("chat", prompt, messages, size, tokens_max)

    async def check_constraint(
        self, constraint: Constraint, eos_token_ids: tuple[int, ...], tenant: str
    ) -> None:
        """Raises `BadRequest`, with the kind as its field, for a tenant's constraint that cannot be
        compiled with the model's tokenizer, whose texts these tokens end; `Overloaded`."""
        text = self._text
        if text is None:
            raise BadRequest(
                constraint.kind, "the model has no tokenizer, so no completion can be held to it"
            )
        if self._checks is None:
            self._checks = ConstraintChecks(lambda: (text.backend_json(), eos_token_ids))
        await self._checks.check(constraint, tenant)

    async def close(self) -> None:
        """Takes no more prompts; one that is being tokenized is not waited for."""
        self._calls.close()
        if self._checks is not None:
            await self._checks.close()

    async def _run(
        self,
        field: str,
        source: Prompt,
        prompt: str | list[dict[str, str]],
        size: int,
        tokens_max: int,
    ) -> tuple[int, ...]:
        text = self._text
        if text is None:
            raise BadRequest(field, NO_TOKENIZER)
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

        return await self._calls.result(id(source), tokenize)


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))
