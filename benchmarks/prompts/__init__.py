"""Prompts of benchmarks, from a file or built in. Each of 6 categories has 8 built-in prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import SettingError
from outrider.limits import MAX_TOKENS_DEFAULT

if TYPE_CHECKING:
    from outrider.tokenizer import TokenizerText

CATEGORIES = ("chat", "code", "math", "rewrite", "summary", "extract")
"""Categories of the built-in prompts. Prompts of the last three contain a text to work on."""
UNCATEGORISED = "other"
PROMPTS_MAX = 100_000
"""Maximum number of prompts of a benchmark."""
_ALLOWED = (
    'each line must be a JSON object with "prompt", a text that is not empty, and optionally '
    f'"category" and "max_tokens" (1 to {MAX_TOKENS_DEFAULT})'
)


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt, without the chat template."""

    text: str
    category: str
    max_tokens: int | None = None
    """Maximum number of tokens of the answer in `bench serve`; None = `--max-tokens`."""


WARM_UP_PROMPTS = (
    BenchPrompt("Name three things that one can see from a window in a large city.", "warm-up"),
    BenchPrompt("Write one sentence about a river, and then write it once more.", "warm-up"),
)
"""Decoded on every side before the measurement."""


def built_in_prompts() -> tuple[BenchPrompt, ...]:
    """All built-in prompts."""
    directory = Path(__file__).parent
    return tuple(
        prompt for name in CATEGORIES for prompt in read_prompts(directory / f"{name}.jsonl")
    )


def read_prompts(path: Path | None) -> tuple[BenchPrompt, ...]:
    """The prompts of a JSONL file, or the built-in prompts if `path` is None. Raises
    `SettingError`."""
    if path is None:
        return built_in_prompts()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("prompts", f"cannot read {path}: {error}") from error
    return parse_prompts(text, str(path))


def parse_prompts(text: str, source: str) -> tuple[BenchPrompt, ...]:
    """The prompts of a JSONL text. Ignores empty lines and unknown keys. Raises `SettingError`,
    whose message calls the text `source`."""
    prompts: list[BenchPrompt] = []
    # Not `splitlines`, because a JSON string may contain other line separators than the line feed.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompts.append(_parse_line(line, f"{source}:{number}"))
    if not prompts:
        raise SettingError("prompts", f"{source} has no prompts; {_ALLOWED}")
    return tuple(prompts)


def select_prompts(prompts: Sequence[BenchPrompt], num_prompts: int) -> tuple[BenchPrompt, ...]:
    """Selects the first prompts of each category, as evenly as possible, in the given order."""
    seen: Counter[str] = Counter()
    ranks: list[int] = []
    for prompt in prompts:
        seen[prompt.category] += 1
        ranks.append(seen[prompt.category])
    chosen = sorted(range(len(prompts)), key=ranks.__getitem__)[:num_prompts]
    return tuple(prompts[index] for index in sorted(chosen))


def encoder(text: TokenizerText, raw: bool) -> Callable[[str], list[int]]:
    """A function that tokenizes prompts, with the chat template unless `raw`."""
    if raw:
        return text.encode
    return lambda prompt: text.encode_chat([{"role": "user", "content": prompt}])


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)

    prompt: str = Field(pattern=r"\S")
    category: str = Field(UNCATEGORISED, pattern=r"\S")
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS_DEFAULT)


def _parse_line(line: str, where: str) -> BenchPrompt:
    try:
        found = _Line.model_validate_json(line)
        return BenchPrompt(found.prompt, found.category, found.max_tokens)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = "".join(f'"{name}": ' for name in first["loc"]) + first["msg"]
    raise SettingError("prompts", f"{where}: {what}; {_ALLOWED}")
