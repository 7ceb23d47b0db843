"""Completions: raw texts or tokens in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from outrider.errors import BadRequest
from outrider.limits import PROMPTS_MAX
from outrider.request import Prompt

from .bodies import CompletionBody
from .logprobs import ScoredToken, finite
from .translation import PROMPT, Asked, Wishes, translate

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""


def translate_completion(body: CompletionBody, draw_seed: Callable[[], int]) -> Asked:
    """See `translate`. Every prompt has choices of its own."""
    wishes = Wishes(
        prompts=_prompts(body.prompt),
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        names={"text": PROMPT, "token_ids": PROMPT},
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )
    return translate(body, wishes, draw_seed)


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):  # And so are the others.
        return [tuple(given)]
    if not 1 <= len(given) <= PROMPTS_MAX:
        raise BadRequest("prompt", f"got {len(given)} prompts; allowed: 1..{PROMPTS_MAX}")
    return [part if isinstance(part, str) else tuple(part) for part in given]  # type: ignore[arg-type]


class CompletionShape:
    """What the choices of a completion look like. Implements `Shape`."""

    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def opening(self) -> dict[str, Any] | None:
        """See `Shape.opening`."""
        return None

    def delta(self, text: str) -> dict[str, Any]:
        """See `Shape.delta`."""
        return {"text": text}

    def closing(self) -> dict[str, Any]:
        """See `Shape.closing`."""
        return {"text": ""}

    def message(self, text: str) -> dict[str, Any]:
        """See `Shape.message`."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """See `Shape.logprobs`. The token that came is among the likeliest ones, too."""
        return {
            "tokens": [token.spelled.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {
                    spelled.text: finite(logprob)
                    for spelled, logprob in (*token.top, (token.spelled, token.logprob))
                }
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }
