"""A small tokenizer, constraints of each kind, and random texts that a constraint allows."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from outrider.grammar.compiler import Grammar, Grammars, GrammarTokenizer
from outrider.grammar.constraint import Constraint
from outrider.grammar.matcher import PrefixMatcher
from tests.support.models import byte_level_tokenizer
from tests.support.toy_engine import ToyEngine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "quick"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": Constraint.of_schema(SCHEMA),
    "object": Constraint.any_object(),
    "regex": Constraint.of_regex(r"^(the|The) (quick )*[a-z]{1,3}\d?$"),
    "choice": Constraint.of_choices(["brown", "brown fox", 'a "b"\n', "naïve"]),
}


@cache
def hf_tokenizer() -> Any:
    return byte_level_tokenizer()


def eos() -> int:
    return int(hf_tokenizer().eos_token_id)


@cache
def tokens() -> GrammarTokenizer:
    return GrammarTokenizer(hf_tokenizer(), (eos(),))


def grammars() -> Grammars:
    return Grammars(tokens)


@cache
def grammar(name: str) -> Grammar:
    return tokens().compile(CONSTRAINTS[name])


def allowed_ids(matcher: PrefixMatcher) -> list[int]:
    flags = matcher.mask().flags(tokens().tokens.vocab_size)
    return [int(token_id) for token_id in np.flatnonzero(flags)]


def fresh_mask(name: str, token_ids: Sequence[int]) -> list[int]:
    """The tokens that may follow, by a new matcher that has read only these tokens."""
    matcher = PrefixMatcher(grammar(name), grammars())
    assert matcher.replace_from(0, token_ids) == len(token_ids)
    return allowed_ids(matcher)


class EndingEngine(ToyEngine):
    """Grammars over the tokenizer's vocabulary, with its end-of-text token."""

    def __init__(self, salt: int, max_model_len: int = 512) -> None:
        super().__init__(len(hf_tokenizer()), salt, max_model_len=max_model_len, num_pages=4096)
        self.info = replace(self.info, eos_token_ids=(eos(),))
