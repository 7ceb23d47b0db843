"""What a measurement of whole completions is asked for: which prompts, and how they are decoded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Final

from outrider.errors import SettingError
from outrider.limits import NUM_DRAFT_TOKENS_MAX, TEMPERATURE_MAX
from outrider.settings import check_range
from outrider.speculation.sampling_params import Rule, SamplingParams, resolve_rule

from .measurement import Decoding
from .prompt_options import PromptOptions, add_prompt_arguments, prompt_values

RULES: Final = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
"""Rules of a temperature above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions(PromptOptions):
    """Prompts, and how they are decoded. Wrong values raise `SettingError`."""

    temperature: float = 0.0
    rule: Rule = Rule.TOKEN
    """Of a temperature above 0."""
    num_draft_tokens: int | None = None
    """Bound K; None = the deployment's own."""

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        check_range("temperature", self.temperature, 0, TEMPERATURE_MAX)
        check_range("num_draft_tokens", self.num_draft_tokens, 1, NUM_DRAFT_TOKENS_MAX)
        if self.rule not in RULES:
            allowed = ", ".join(rule.value for rule in RULES)
            raise SettingError("rule", f"{self.rule.value!r} is wrong; it must be one of {allowed}")

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
    return prompt_values(arguments) | {
        "temperature": arguments.temperature,
        "rule": Rule(arguments.rule),
    }


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of prompts and decoding, and that of the JSON report. `--num-draft-tokens` is
    not among them: it is a setting of the deployment as well, whose flag the caller has."""
    defaults = DecodingOptions()
    add_prompt_arguments(parser, defaults)
    parser.add_argument(
        "--temperature", type=float, default=defaults.temperature, metavar="T",
        help="0 = always the likeliest token [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--rule", choices=[rule.value for rule in RULES], default=defaults.rule.value,
        help="how drafts are accepted at a temperature above 0 [%(default)s]",
    )  # fmt: skip
