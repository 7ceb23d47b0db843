"""Options of a benchmark: a class of settings, whose fields are the options of its command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import click

from outrider.errors import ConfigError, SettingError
from outrider.limits import (
    MAX_TOKENS_DEFAULT,
    NUM_DRAFT_TOKENS_MAX,
    SESSIONS_PER_COORDINATOR_MAX,
    TEMPERATURE_MAX,
)
from outrider.settings import Internal, Setting, between, checked, settings_of
from outrider.speculation.sampling_params import Rule

from .measurement import Decoding
from .prompts import PROMPTS_MAX, BenchPrompt, read_prompts, select_prompts

Kind = TypeVar("Kind", bound=click.Option)
RANDOM_MODELS = ("random-1b", "random-7b")
"""For `bench device`: a Llama of 6.7 billion random parameters, made on the device."""

Concurrency = Annotated[int, between(1, SESSIONS_PER_COORDINATOR_MAX)]
DraftTokens = Annotated[int, between(1, NUM_DRAFT_TOKENS_MAX)]
MaxTokens = Annotated[int, between(1, MAX_TOKENS_DEFAULT)]
NumPrompts = Annotated[int | None, between(1, PROMPTS_MAX)]
Temperature = Annotated[float, between(0, TEMPERATURE_MAX)]


def _option(kind: Callable[..., Kind], setting: Setting) -> Kind:
    def parse(raw: object) -> object:
        try:
            return setting.parse(raw, setting.flag)
        except ConfigError as error:
            raise click.UsageError(error.message) from error

    attributes: dict[str, Any] = {"type": parse, "metavar": setting.metavar}
    if setting.schema["type"] == "boolean":
        attributes = {"is_flag": True}
    return kind([setting.flag], default=setting.default, help=setting.doc, **attributes)


@checked()
class Options:
    """The base of all."""

    @classmethod
    def params(cls, kind: Callable[..., Kind]) -> list[Kind]:
        """An option of a command for each field that is not internal."""
        return [_option(kind, setting) for setting in settings_of(cls).values()]

    @classmethod
    def from_arguments(cls, arguments: Any) -> Self:
        """From what a command with these options was given, an attribute each."""
        given = vars(arguments)
        return cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})


@checked()
class PromptOptions(Options):
    """Prompts, and the lengths of their completions."""

    prompts: Path | None = None
    """JSONL of `prompt` and, if wanted, `category`, `max_tokens` and `response_format`; unset =
    the built-in prompts."""
    num_prompts: NumPrompts = None
    """Number of prompts, divided evenly among the categories; with fewer than there are categories,
    one prompt of each of the first N."""
    max_tokens: MaxTokens = 256
    """Tokens of a completion."""
    raw: bool = False
    """Do not apply the model's chat template."""
    seed: Internal[int] = 0
    """Of the first prompt; each one after it has the next."""

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to measure with. Raises `SettingError` for a file that is wrong."""
        prompts = read_prompts(self.prompts)
        return prompts if self.num_prompts is None else select_prompts(prompts, self.num_prompts)


@checked()
class DecodingOptions(PromptOptions):
    """Prompts, and how they are decoded."""

    rule: Literal["token", "block", "coupled"] = "block"
    """How drafts are accepted at a temperature above 0; only token and coupled use trees."""
    num_draft_tokens: DraftTokens | None = None
    """Draft tokens a round; unset = the deployment's own."""

    def drafted(self, num_draft_tokens: int, temperature: float) -> Decoding:
        """How the first prompt is decoded with drafts, by a deployment that drafts so many tokens
        where a request does not say. Raises `SettingError` where none would be drafted."""
        bound = self.num_draft_tokens or num_draft_tokens
        if bound == 0:
            raise SettingError(
                "num_draft_tokens", "0 is plain decoding; there is nothing to compare"
            )
        return Decoding(
            max_tokens=self.max_tokens,
            temperature=temperature,
            rule=Rule(self.rule) if temperature else Rule.GREEDY,
            seed=self.seed,
            num_draft_tokens=bound,
        )


@checked()
class AcceptanceOptions(PromptOptions):
    """What `bench acceptance` is asked for."""

    max_tokens: MaxTokens = 128
    hits: bool = False
    """Play rounds besides: how often a draft model guesses what a round comes to."""
    num_draft_tokens: DraftTokens = 4
    """Draft tokens of a round, with `--hits`."""


@checked()
class EngineOptions(Options):
    """What `bench engine` is asked for."""

    repetitions: Annotated[int, between(1, 100)] = 3
    """Rounds, of which medians are taken."""
    parts: tuple[Literal["sessions", "waits", "steps"], ...] = ("sessions", "waits", "steps")
    """What to measure."""


@checked()
class DeviceOptions(Options):
    """What `bench device` is asked for."""

    model: str = RANDOM_MODELS[-1]
    """A model, or `random-1b` or `random-7b`: random numbers of that size."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda[:N]`."""
    dtype: str = "bfloat16"
    """Of weights and keys and values."""
    context_tokens: Annotated[int, between(1, 1_000_000)] = 256
    """Tokens before the steps."""
    num_draft_tokens: DraftTokens = 8
    """Tokens of a draft and a verification."""
    repetitions: Internal[int] = 50
