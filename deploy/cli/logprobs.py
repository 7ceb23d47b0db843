"""Log-probabilities of a completion, for people to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.client import Completion

HEADINGS = ("token", "logprob", "likeliest at its place")


def logprob_table(completion: Completion, spell: Callable[[int], str]) -> str:
    """A line per token of the completion: what it is, its log-probability, and the likeliest
    tokens at its place with theirs. `spell` gives a token's name."""
    rows = [
        (
            spell(token_id),
            f"{found.logprob:.4f}",
            ", ".join(f"{spell(other)} {logprob:.4f}" for other, logprob in found.top),
        )
        for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    names, numbers = (max(len(row[at]) for row in (HEADINGS, *rows)) for at in (0, 1))
    lines = (f"{a:<{names}}  {b:>{numbers}}  {c}".rstrip() for a, b, c in (HEADINGS, *rows))
    return "\n".join(lines)


def token_names(directory: str) -> Callable[[int], str]:
    """What gives a token's id and, where a tokenizer lies in the directory, its text in quotes."""
    path = Path(directory) / "tokenizer.json"
    if not directory or not path.is_file():
        return str
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def name(token_id: int) -> str:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return f"{token_id} {json.dumps(text, ensure_ascii=False)}"

    return name
