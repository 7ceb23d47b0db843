"""The specification of an emulated target and draft. This module imports no numeric library."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from outrider.errors import ConfigError
from outrider.limits import NUM_DRAFT_TOKENS_MAX

SCHEME = "emulated"  # an emulated model is named `emulated:SPECIFICATION`
VOCAB_SIZE_MAX = 2**20
PAGES_MAX = 2**16
JUDGED_SUPPORT_MIN = 2
"""Smallest `support` if `acceptance_rates` is set: the target replaces a rejected id by another."""
Share = Annotated[float, Field(ge=0, le=1)]
Parts = BeforeValidator(lambda value: value.split("/") if isinstance(value, str) else value)
"""Splits a text A/B/... into a list."""


class EmulatedSpec(BaseModel, frozen=True, extra="forbid"):
    """Describes an emulated target and its draft, which must have the same specification."""

    vocab_size: int = Field(default=32_000, ge=2, le=VOCAB_SIZE_MAX)
    support: int = Field(default=64, ge=1)  # number of token ids with a probability above zero
    exponent: float = Field(default=1.706, ge=0, le=100)
    """The Zipf exponent. The id of rank r (from 1) has weight r ** -exponent. 0 = uniform."""
    deviation: float = Field(default=0.65, ge=0, le=100)
    """The standard deviation of log q - log p before q is normalised. 0 = a perfect draft."""
    order: int = Field(default=3, ge=1, le=64)  # a token depends on this many tokens before it
    verify_ms: float = Field(default=18.3, ge=0, le=60_000)
    """A target step of n new tokens takes verify_ms * ceil(n / verify_tokens)."""
    verify_tokens: int = Field(default=16, ge=1)
    draft_ms: float = Field(default=1.3, ge=0, le=60_000)
    """A draft step with n rows of logits takes draft_ms * ceil(n / draft_branches)."""
    draft_branches: int = Field(default=64, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**64)
    max_model_len: int = Field(default=8192, ge=1, le=2**20)
    eos: int = Field(default=-1, ge=-1)  # the token id that ends a text; -1 = none
    num_pages: int = Field(default=4096, ge=1, le=PAGES_MAX)
    acceptance_rates: Annotated[
        tuple[Share, ...], Parts, Field(max_length=NUM_DRAFT_TOKENS_MAX)
    ] = ()
    """The probabilities that a round accepts at least 1, 2, ... draft tokens, written A/B/... in a
    setting. No round accepts more tokens than there are rates. Empty = no fixed rates."""
    novel_share: Share = 0.0
    """The probability that a token of the target is new: no earlier token of the text equals it, so
    a look-up finds no match. It does not apply to draft tokens under `acceptance_rates`. New tokens
    have the last `max_model_len` ids, and all other tokens have the ids below."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        rates, size, wrong = self.acceptance_rates, self.vocab_size, {}
        if rates and self.support < JUDGED_SUPPORT_MIN:
            wrong["support"] = f"with acceptance_rates, at least {JUDGED_SUPPORT_MIN}"
        if self.support > size:
            wrong["support"] = f"1..{size} (vocab_size)"
        elif self.support > self.num_plain_ids:
            least = self.support + self.max_model_len
            wrong["vocab_size"] = f"with novel_share, at least {least} (support + max_model_len)"
        if self.eos >= size:
            wrong["eos"] = f"-1 (none)..{size - 1}"
        if any(rate > before for before, rate in pairwise(rates)):
            wrong["acceptance_rates"] = "rates that do not increase"
        if wrong:
            key, allowed = next(iter(wrong.items()))
            value = getattr(self, key)
            raise ConfigError(f"{SCHEME}: {key}={value} is wrong; allowed: {allowed}")
        return self

    @property
    def num_plain_ids(self) -> int:
        """The number of ids, from 0 on, that are not kept for new tokens."""
        return self.vocab_size - (self.max_model_len if self.novel_share else 0)

    @classmethod
    def parse(cls, text: str) -> EmulatedSpec:
        """Parses `key=value,...`, with or without the prefix `emulated:`. Raises `ConfigError`."""
        return parse_numbers(cls, text.removeprefix(f"{SCHEME}:"), SCHEME)

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()


Numbers = TypeVar("Numbers", bound=BaseModel)


def parse_numbers(kind: type[Numbers], text: str, what: str) -> Numbers:
    """Parses `key=value,...` into a pydantic model of type `kind`. Raises `ConfigError`, whose
    message begins with `what`."""
    given: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key in given:
            raise ConfigError(f"{what}: {key} is given twice")
        given[key] = value
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        wrong = "=".join([*map(str, first["loc"][:1]), repr(first["input"])])
        known = ", ".join(kind.model_fields)
        raise ConfigError(f"{what}: {wrong}: {first['msg']}; known keys: {known}") from None
