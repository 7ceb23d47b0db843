"""Prompts of benchmarks, from a file or built in. Each of 6 categories has 8 built-in prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from outrider.errors import SettingError

if TYPE_CHECKING:
    from outrider.models.tokenizer import TokenizerText

CATEGORIES = ("chat", "code", "math", "rewrite", "summary", "extract")
"""Categories of the built-in prompts. Prompts of the last three contain a text to work on."""
UNCATEGORISED = "other"
PROMPTS_MAX = 100_000
MAX_TOKENS_MAX = 16_384  # of a prompt's completion
_ALLOWED = (
    'each line must be a JSON object with "prompt", a text that is not empty, and optionally '
    f'"category" and "max_tokens" (1 to {MAX_TOKENS_MAX})'
)


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True))
class BenchPrompt:
    """One prompt, without the chat template."""

    text: Annotated[str, Field(alias="prompt", pattern=r"\S")]
    category: Annotated[str, Field(pattern=r"\S")] = UNCATEGORISED
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_TOKENS_MAX)] = None
    """Maximum number of tokens of the answer in `bench serve`; None = `--max-tokens`."""


_LINE = TypeAdapter(BenchPrompt)
WARM_UP_PROMPTS = (
    BenchPrompt("Name three things that one can see from a window in a large city.", "warm-up"),
    BenchPrompt("Write one sentence about a river, and then write it once more.", "warm-up"),
)
"""Every side of a comparison decodes these prompts before its times are measured."""


def read_prompts(path: Path | None = None) -> tuple[BenchPrompt, ...]:
    """The prompts of a JSONL file; None = the built-in prompts. Ignores empty lines and unknown
    keys. Raises `SettingError`."""
    if path is None:
        own = (Path(__file__).with_name(f"{name}.jsonl") for name in CATEGORIES)
        return tuple(prompt for file in own for prompt in read_prompts(file))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("prompts", f"cannot read {path}: {error}") from error
    prompts: list[BenchPrompt] = []
    # `splitlines` would also split at other line separators, which a JSON string may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                prompts.append(_LINE.validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            what = "".join(f'"{name}": ' for name in first["loc"]) + first["msg"]
            raise SettingError("prompts", f"{path}:{number}: {what}; {_ALLOWED}") from None
    if not prompts:
        raise SettingError("prompts", f"{path} has no prompts; {_ALLOWED}")
    return tuple(prompts)


def select_prompts(prompts: Sequence[BenchPrompt], num_prompts: int) -> tuple[BenchPrompt, ...]:
    """Selects the first prompts of each category, equally many if possible. Keeps their order."""
    seen, ranks = Counter[str](), list[int]()
    for prompt in prompts:
        seen[prompt.category] += 1
        ranks.append(seen[prompt.category])
    chosen = sorted(range(len(prompts)), key=ranks.__getitem__)[:num_prompts]
    return tuple(prompts[index] for index in sorted(chosen))


def encoder(text: TokenizerText, raw: bool) -> Callable[[str], list[int]]:
    """A function that tokenizes a prompt. If `raw`, it does not use the chat template."""
    if raw:
        return text.encode
    return lambda prompt: text.encode_chat([{"role": "user", "content": prompt}])
