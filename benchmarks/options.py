"""Options of a benchmark: a frozen dataclass, whose fields are the options of its command."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import click

from outrider.errors import SettingError
from outrider.limits import MAX_TOKENS_DEFAULT, NUM_DRAFT_TOKENS_MAX
from outrider.speculation.sampling_params import Rule, SamplingParams, resolve_rule

from .measurement import Decoding
from .prompts import PROMPTS_MAX, BenchPrompt, built_in_prompts, read_prompts, select_prompts

Kind = TypeVar("Kind", bound=click.Option)
ENGINE_PARTS = ("sessions", "waits", "steps")
RANDOM_MODELS = ("random-1b", "random-7b")
"""For `bench device`: a Llama of 6.7 billion random parameters, made on the device."""


@dataclass(frozen=True)
class Value(click.ParamType[Any]):
    """A value, or several with commas between."""

    kind: Any
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    several: bool = False
    name = "value"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """From a text; a default is no text."""
        if not isinstance(value, str):
            return value
        if self.several:
            return tuple(self._one(part.strip()) for part in value.split(","))
        return self._one(value)

    def _one(self, text: str) -> Any:
        found = None
        with suppress(ValueError):
            found = self.kind(text)
        is_number = isinstance(found, int | float)
        if (
            found is None
            or (self.choices and found not in self.choices)
            or (is_number and not self.low <= found <= self.high)
        ):
            wrong = repr(text if found is None else found)
            bounds = f"from {self.low} to {self.high}"
            allowed = "one of " + ", ".join(self.choices) if self.choices else bounds
            self.fail(f"{wrong} is wrong; it must be {allowed}")
        return found


def option(
    default: Any,
    help: str,  # noqa: A002 (as click calls it)
    low: float = -math.inf,
    high: float = math.inf,
    *,
    choices: tuple[str, ...] = (),
    kind: Any = None,
    **attributes: Any,
) -> Any:
    """A field with an option; `attributes` are click's. A boolean is a switch, and a tuple has its
    entries with commas between. `kind` makes a value of a text, where the default does not show how
    or is None, which else stands for a whole number."""
    is_tuple = isinstance(default, tuple)
    if kind is None:
        kind = type(default[0] if is_tuple else 0 if default is None else default)
    if kind is bool:
        attributes["is_flag"] = True
    else:
        several = is_tuple and "several" not in attributes
        attributes["type"] = Value(kind, low, high, choices, several)
        attributes.setdefault("metavar", "|".join(choices) or "N")
    return field(default=default, metadata=attributes | {"help": help})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base of all. A subclass may give a field another default and keeps its option. What a
    single value may be is checked where it is read."""

    @classmethod
    def params(cls, kind: type[Kind]) -> list[Kind]:
        """An option of a command for each field that has one."""
        defaults = {entry.name: entry.default for entry in fields(cls)}
        found = {
            name: entry.metadata
            for base in reversed(cls.__mro__)
            for name, entry in vars(base).get("__dataclass_fields__", {}).items()
            if entry.metadata
        }
        return [
            kind([f"--{name.replace('_', '-')}"], default=defaults[name], **attributes)
            for name, attributes in found.items()
        ]

    @classmethod
    def from_arguments(cls, arguments: Any) -> Self:
        """From what a command with these options was given, an attribute each."""
        given = vars(arguments)
        return cls(
            **{entry.name: given[entry.name] for entry in fields(cls) if entry.name in given}
        )


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options):
    """Prompts, and the lengths of their completions."""

    prompts: Path | None = option(
        None, "JSONL of `prompt` and, if wanted, `category`, `max_tokens` and `response_format` "
        f"[{len(built_in_prompts())} built-in prompts]", metavar="FILE", kind=Path,
    )  # fmt: skip
    num_prompts: int | None = option(
        None, "take N prompts in all, the same number of first ones of each category; of fewer "
        "than there are categories, one of each of the first N", low=1, high=PROMPTS_MAX,
    )  # fmt: skip
    max_tokens: int = option(256, "tokens of a completion", low=1, high=MAX_TOKENS_DEFAULT)
    raw: bool = option(False, "do not apply the model's chat template")
    seed: int = 0
    """Of the first prompt; each one after it has the next."""

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to measure with. Raises `SettingError` for a file that is wrong."""
        prompts = read_prompts(self.prompts)
        return prompts if self.num_prompts is None else select_prompts(prompts, self.num_prompts)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(PromptOptions):
    """Prompts, and how they are decoded."""

    rule: str = option(
        Rule.TOKEN.value, "how drafts are accepted at a temperature above 0",
        choices=(Rule.TOKEN.value, Rule.BLOCK.value, Rule.COUPLED.value),
    )  # fmt: skip
    num_draft_tokens: int | None = option(
        None, "draft tokens a round [the deployment's own]", low=1, high=NUM_DRAFT_TOKENS_MAX,
        metavar="K",
    )  # fmt: skip

    def drafted(self, num_draft_tokens: int, temperature: float) -> Decoding:
        """How the first prompt is decoded with drafts, by a deployment that drafts so many tokens
        where a request does not say. Raises `SettingError` where none would be drafted."""
        bound = self.num_draft_tokens or num_draft_tokens
        if bound == 0:
            raise SettingError(
                "num_draft_tokens", "0 is plain decoding; there is nothing to compare"
            )
        sampling = SamplingParams(temperature=temperature)
        return Decoding(
            max_tokens=self.max_tokens,
            temperature=temperature,
            rule=resolve_rule(sampling, Rule(self.rule), seeded=True),
            seed=self.seed,
            num_draft_tokens=bound,
        )


@dataclass(frozen=True, kw_only=True)
class AcceptanceOptions(PromptOptions):
    """What `bench acceptance` is asked for."""

    max_tokens: int = 128
    hits: bool = option(
        False, "play rounds besides: how often a draft model guesses what a round comes to"
    )
    num_draft_tokens: int = option(
        4, "draft tokens of a round, with --hits", low=1, high=NUM_DRAFT_TOKENS_MAX, metavar="K"
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """What `bench engine` is asked for."""

    repetitions: int = option(3, "rounds, of which medians are taken", low=1, high=100)
    parts: tuple[str, ...] = option(
        ENGINE_PARTS, "what to measure", choices=ENGINE_PARTS, metavar="NAMES"
    )


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """What `bench device` is asked for."""

    model: str = option(
        RANDOM_MODELS[-1], f"a model, or {' or '.join(RANDOM_MODELS)}: random numbers of that size",
        metavar="MODEL",
    )  # fmt: skip
    device: str = option("auto", "auto, cpu or cuda[:N]", metavar="DEVICE")
    dtype: str = option("bfloat16", "of weights and keys and values", metavar="DTYPE")
    context_tokens: int = option(256, "tokens before the steps", low=1, high=1_000_000)
    num_draft_tokens: int = option(
        8, "tokens of a draft and a verification", low=1, high=NUM_DRAFT_TOKENS_MAX
    )
    repetitions: int = 50
