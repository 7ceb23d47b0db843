"""What a measurement of whole completions is asked for: which prompts, and how they are decoded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import SettingError
from outrider.limits import MAX_TOKENS_DEFAULT, NUM_DRAFT_TOKENS_MAX, SEED_MAX, TEMPERATURE_MAX
from outrider.settings import check_range
from outrider.speculation.sampling import Rule, SamplingParams, resolve_rule

from .measurement import Decoding
from .prompts import PROMPTS_MAX, BenchPrompt, built_in_prompts, read_prompts, select_prompts

RULES: Final = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
"""Rules of a temperature above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """Prompts, and how they are decoded. Wrong values raise `SettingError`."""

    prompts: Path | None = None
    """JSONL file of `prompt` and, if wanted, `category`; None = the built-in prompts."""
    num_prompts: int | None = None
    """Of all categories together; None = all."""
    max_tokens: int = 256
    """Of a completion; an EOS ends it sooner."""
    temperature: float = 0.0
    rule: Rule = Rule.TOKEN
    """Of a temperature above 0."""
    num_draft_tokens: int | None = None
    """Bound K; None = the deployment's own."""
    seed: int = 0
    """Of the first prompt; each one after it has the next."""
    raw: bool = False
    """Whether prompts go in as they are, without the model's chat template."""

    def __post_init__(self) -> None:
        check_range("num_prompts", self.num_prompts, 1, PROMPTS_MAX)
        check_range("max_tokens", self.max_tokens, 1, MAX_TOKENS_DEFAULT)
        check_range("temperature", self.temperature, 0, TEMPERATURE_MAX)
        check_range("num_draft_tokens", self.num_draft_tokens, 1, NUM_DRAFT_TOKENS_MAX)
        check_range("seed", self.seed, 0, SEED_MAX)
        if self.rule not in RULES:
            allowed = ", ".join(rule.value for rule in RULES)
            raise SettingError("rule", f"{self.rule.value!r} is wrong; it must be one of {allowed}")

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to measure with. Raises `SettingError` for a file that is wrong."""
        prompts = built_in_prompts() if self.prompts is None else read_prompts(self.prompts)
        return prompts if self.num_prompts is None else select_prompts(prompts, self.num_prompts)

    def drafted(self, num_draft_tokens: int) -> Decoding:
        """How the first prompt is decoded with drafts, by a deployment that drafts so many tokens
        where a request does not say. Raises `SettingError` where none would be drafted."""
        bound = self.num_draft_tokens or num_draft_tokens
        if bound == 0:
            raise SettingError(
                "num_draft_tokens", "0 is plain decoding; there is nothing to compare"
            )
        return Decoding(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            rule=resolve_rule(SamplingParams(temperature=self.temperature), self.rule, seeded=True),
            seed=self.seed,
            num_draft_tokens=bound,
        )


def decoding_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options, by name, that a parser with `add_decoding_arguments` returned."""
    return {
        "prompts": arguments.prompts,
        "num_prompts": arguments.num_prompts,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "rule": Rule(arguments.rule),
        "raw": arguments.raw,
    }


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of prompts and decoding, and that of the JSON report. `--num-draft-tokens` is
    not among them: it is a setting of the deployment as well, whose flag the caller has."""
    defaults = DecodingOptions()
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="JSONL of `prompt` and, if wanted, `category` [48 built-in prompts]",
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", type=int, metavar="N",
        help="take the first N/categories of each category, one at least [all]",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=defaults.max_tokens, metavar="N",
        help="tokens of a completion [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=defaults.temperature, metavar="T",
        help="0 = always the likeliest token [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--rule", choices=[rule.value for rule in RULES], default=defaults.rule.value,
        help="how drafts are accepted at a temperature above 0 [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
