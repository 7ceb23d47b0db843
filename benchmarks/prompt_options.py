"""What every measurement of whole completions is asked for: which prompts, and how long."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.limits import MAX_TOKENS_DEFAULT, SEED_MAX
from outrider.settings import check_range

from .prompts import PROMPTS_MAX, BenchPrompt, built_in_prompts, read_prompts, select_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Prompts, and the lengths of their completions. Wrong values raise `SettingError`."""

    prompts: Path | None = None
    """JSONL file of `prompt` and, if wanted, `category`; None = the built-in prompts."""
    num_prompts: int | None = None
    """Of all categories together; None = all."""
    max_tokens: int = 256
    """Of a completion; an EOS ends it sooner."""
    seed: int = 0
    """Of the first prompt; each one after it has the next."""
    raw: bool = False
    """Whether prompts go in as they are, without the model's chat template."""

    def __post_init__(self) -> None:
        check_range("num_prompts", self.num_prompts, 1, PROMPTS_MAX)
        check_range("max_tokens", self.max_tokens, 1, MAX_TOKENS_DEFAULT)
        check_range("seed", self.seed, 0, SEED_MAX)

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to measure with. Raises `SettingError` for a file that is wrong."""
        prompts = built_in_prompts() if self.prompts is None else read_prompts(self.prompts)
        return prompts if self.num_prompts is None else select_prompts(prompts, self.num_prompts)


def prompt_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options, by name, that a parser with `add_prompt_arguments` returned."""
    names = ("prompts", "num_prompts", "max_tokens", "raw")
    return {name: getattr(arguments, name) for name in names}


def add_prompt_arguments(
    parser: argparse.ArgumentParser, defaults: PromptOptions, num_built_in: int | None = None
) -> None:
    """Adds the flags of these options, and that of the JSON report; without a file there are
    `num_built_in` prompts, None = all."""
    num_built_in = num_built_in or len(built_in_prompts())
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help=f"JSONL of `prompt` and, if wanted, `category` [{num_built_in} built-in prompts]",
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", type=int, metavar="N",
        help="take N prompts in all, the same number of first ones of each category; of fewer than "
        f"there are categories, one of each of the first N [{defaults.num_prompts or 'all'}]",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=defaults.max_tokens, metavar="N",
        help="tokens of a completion [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
