"""A grammar over three letters, few enough completions that their law can be written down."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.grammar.compiler import Grammars, GrammarTokenizer
from outrider.grammar.constraint import Constraint
from outrider.grammar.matcher import PrefixMatcher
from outrider.grammar.token_mask import TokenMask

END = 3
CONSTRAINT = Constraint.of_regex("[ab]c?[abc]{0,2}")


@cache
def letters() -> Any:
    vocabulary = {"a": 0, "b": 1, "c": 2, "<|end|>": END}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    special = {"eos_token": "<|end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def grammars() -> Grammars:
    return Grammars(lambda: GrammarTokenizer(letters(), (END,)))


def mask_of() -> Callable[[tuple[int, ...]], TokenMask | None]:
    """What may follow a prefix of a completion; behind its end stands `END` alone."""
    matcher = PrefixMatcher(GrammarTokenizer(letters(), (END,)).compile(CONSTRAINT))

    def mask(prefix: tuple[int, ...]) -> TokenMask | None:
        matcher.stand(0, prefix)
        return matcher.mask()

    return mask
