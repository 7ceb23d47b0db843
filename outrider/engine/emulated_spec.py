"""What an emulated pair is, by the setting that names it. Imports nothing that computes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any, Final

from outrider.errors import ConfigError

SCHEME: Final = "emulated"
"""A model's name begins with it and a colon; what follows is the specification."""
VOCAB_SIZE_MAX: Final = 2**20


@dataclass(frozen=True, slots=True)
class EmulatedSpec:
    """What a toy pair is; target and draft must be given the same one."""

    vocab_size: int = 32_000
    support: int = 64
    """Ids of probability above zero after each prefix."""
    exponent: float = 1.706
    """Of the Zipf law: the id of rank r (from 1) has weight r ** -exponent; 0 = uniform."""
    deviation: float = 0.65
    """Standard deviation of log q - log p before both are normalised; 0 = a perfect draft."""
    order: int = 3
    """Tokens of the prefix that the next distribution depends on."""
    verify_ms: float = 18.3
    """Time of a target step ..."""
    verify_tokens: int = 16
    """... for each begun so many new tokens in it."""
    draft_ms: float = 1.3
    """Time of a draft step ..."""
    draft_branches: int = 64
    """... for each begun so many rows of logits in it."""
    seed: int = 0
    max_model_len: int = 8192
    eos: int = -1
    """The id that ends a text; -1 = none."""
    num_pages: int = 4096
    """Of the engine, with `PAGE_SIZE` slots each."""

    def __post_init__(self) -> None:
        _require("vocab_size", 2 <= self.vocab_size <= VOCAB_SIZE_MAX, f"2..{VOCAB_SIZE_MAX}")
        _require("support", 1 <= self.support <= self.vocab_size, "1..vocab_size")
        _require("exponent", 0 <= self.exponent <= 100, "0..100")
        _require("deviation", 0 <= self.deviation <= 100, "0..100")
        _require("order", 1 <= self.order <= 64, "1..64")
        _require("verify_ms", 0 <= self.verify_ms <= 60_000, "0..60000")
        _require("verify_tokens", self.verify_tokens >= 1, "at least 1")
        _require("draft_ms", 0 <= self.draft_ms <= 60_000, "0..60000")
        _require("draft_branches", self.draft_branches >= 1, "at least 1")
        _require("seed", 0 <= self.seed < 2**64, "0..2^64-1")
        _require("max_model_len", 1 <= self.max_model_len <= 2**20, "1..2^20")
        _require("num_pages", 1 <= self.num_pages <= 2**16, "1..65536")
        _require("eos", -1 <= self.eos < self.vocab_size, "-1 or an id of the vocabulary")

    @classmethod
    def parse(cls, text: str) -> EmulatedSpec:
        """From `key=value,...`, with or without `emulated:` before it; "" is all defaults.

        Raises `ConfigError` naming a key that is unknown, repeated, or has a bad value."""
        kinds = {f.name: float if f.type == "float" else int for f in fields(cls)}
        values: dict[str, Any] = {}
        for item in filter(None, text.removeprefix(f"{SCHEME}:").split(",")):
            key, _, value = (part.strip() for part in item.partition("="))
            if key not in kinds:
                raise ConfigError(f"emulated: unknown key {key!r}; known: {', '.join(kinds)}")
            if key in values:
                raise ConfigError(f"emulated: {key} is given twice")
            try:
                values[key] = kinds[key](value)
            except ValueError as error:
                kind = "a whole number" if kinds[key] is int else "a number"
                raise ConfigError(f"emulated: {key}: {value!r} is not {kind}") from error
        return cls(**values)

    @property
    def fingerprint(self) -> str:
        """The same for equal specifications."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()


def _require(key: str, satisfied: bool, allowed: str) -> None:
    if not satisfied:  # NaN satisfies no comparison
        raise ConfigError(f"emulated: {key} is out of range; {allowed} is allowed")
