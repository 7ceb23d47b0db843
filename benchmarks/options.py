"""Options of a benchmark: a frozen dataclass, whose fields are the options of its command."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import click

from outrider.errors import SettingError
from outrider.limits import MAX_TOKENS_DEFAULT, NUM_DRAFT_TOKENS_MAX, SEED_MAX
from outrider.settings import check_range
from outrider.speculation.sampling_params import Rule, SamplingParams, resolve_rule

from .measurement import Decoding
from .prompts import PROMPTS_MAX, BenchPrompt, built_in_prompts, read_prompts, select_prompts

Kind = TypeVar("Kind", bound=click.Option)
RANDOM_MODEL: Final = "random-7b"
"""For `bench device`: a Llama of 6.7 billion random parameters, made on the device."""


def option(
    default: object,
    help: str,  # noqa: A002 (as click calls it)
    *,
    low: float | None = None,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    metavar: str = "N",
    parse: Callable[[str], Any] | None = None,
    several: bool = False,
) -> Any:
    """A field with an option. A boolean is a switch; the entries of a tuple have the bounds or
    choices. `several` = it takes words, instead of one with commas. `parse` raises `ValueError`;
    None = the type of the default, or a whole number."""
    parse = parse or (int if default is None else type(default))
    flag = {"help": help, "low": low, "high": high, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=flag | {"parse": parse, "several": several})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base of all. Wrong values raise `SettingError`. A subclass may give a field another
    default and keeps its option."""

    def __post_init__(self) -> None:
        for name, flag in self.flags().items():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if flag["low"] is not None:
                    check_range(name, one, flag["low"], flag["high"])
                if flag["choices"] and one not in flag["choices"]:
                    allowed = ", ".join(flag["choices"])
                    raise SettingError(name, f"{one!r} is wrong; it must be one of {allowed}")

    @classmethod
    def flags(cls) -> dict[str, Mapping[str, Any]]:
        """What `option` was told, by name of the field."""
        return {
            name: entry.metadata
            for base in reversed(cls.__mro__)
            for name, entry in vars(base).get("__dataclass_fields__", {}).items()
            if entry.metadata
        }

    @classmethod
    def params(cls, kind: type[Kind]) -> list[Kind]:
        """An option of a command for each."""
        defaults = {entry.name: entry.default for entry in fields(cls)}
        found = []
        for name, flag in cls.flags().items():
            more: dict[str, Any] = {"is_flag": True}
            if not isinstance(defaults[name], bool):
                metavar = flag["metavar"]
                if flag["choices"] and not isinstance(defaults[name], tuple):
                    metavar = "|".join(flag["choices"])
                more = {"default": defaults[name], "metavar": metavar, "type": _type(flag["parse"])}
            if flag["several"]:
                more["several"] = True
            found.append(kind([f"--{name.replace('_', '-')}"], help=flag["help"], **more))
        return found

    @classmethod
    def from_arguments(cls, arguments: Any, **others: object) -> Self:
        """From what a command with these options was given, an attribute each."""
        return cls(**{name: getattr(arguments, name) for name in cls.flags()} | others)


def _type(parse: Callable[[str], Any]) -> Any:
    """What click converts a text by; a default, which is no text, stays as it is."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return parse if parse in (int, float) else convert


def _separated(kind: Callable[[str], Any], what: str, text: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is wrong; it must be {what} with commas between") from None


whole_numbers: Final = partial(_separated, int, "whole numbers")
"""Parses `1,2,3`; the next ones likewise."""
numbers: Final = partial(_separated, float, "numbers")
words: Final = partial(_separated, str.strip, "names")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options):
    """Prompts, and the lengths of their completions."""

    prompts: Path | None = option(
        None, "JSONL of `prompt` and, if wanted, `category`, `max_tokens` and `response_format` "
        f"[{len(built_in_prompts())} built-in prompts]", metavar="FILE", parse=Path,
    )  # fmt: skip
    num_prompts: int | None = option(
        None, "take N prompts in all, the same number of first ones of each category; of fewer "
        "than there are categories, one of each of the first N", low=1, high=PROMPTS_MAX,
    )  # fmt: skip
    max_tokens: int = option(256, "tokens of a completion", low=1, high=MAX_TOKENS_DEFAULT)
    raw: bool = option(False, "do not apply the model's chat template")
    seed: int = 0
    """Of the first prompt; each one after it has the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("seed", self.seed, 0, SEED_MAX)

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to measure with. Raises `SettingError` for a file that is wrong."""
        prompts = built_in_prompts() if self.prompts is None else read_prompts(self.prompts)
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
    """What `bench acceptance` is asked for. Wrong values raise `SettingError`."""

    max_tokens: int = 128
    hits: bool = option(
        False, "play rounds besides: how often a draft model guesses what a round comes to"
    )
    num_draft_tokens: int = option(
        4, "draft tokens of a round, with --hits", low=1, high=NUM_DRAFT_TOKENS_MAX, metavar="K"
    )


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """What `bench device` is asked for. Wrong values raise `SettingError`."""

    model: str = option(
        RANDOM_MODEL, f"a model, or {RANDOM_MODEL}: random numbers of that size", metavar="MODEL",
    )  # fmt: skip
    device: str = option("auto", "auto, cpu or cuda[:N]", metavar="DEVICE")
    dtype: str = option("bfloat16", "of weights and keys and values", metavar="DTYPE")
    context_tokens: int = option(256, "tokens before the steps", low=1, high=1_000_000)
    num_draft_tokens: int = option(
        8, "tokens of a draft and a verification", low=1, high=NUM_DRAFT_TOKENS_MAX
    )
    repetitions: int = option(50, "of each step, of which medians are taken", low=1, high=10_000)
