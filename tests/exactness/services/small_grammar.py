"""A grammar over three letters, few enough completions that their law can be written down."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.grammar.compiler import Grammars, GrammarTokenizer
from outrider.grammar.constraint import Constraint
from outrider.grammar.matcher import PrefixMatcher
from outrider.speculation.logits_processing import masked_logits, target_probabilities
from outrider.speculation.sampling_params import SamplingParams

END = 3
"""Ends the text."""
CONSTRAINT = Constraint.of_regex("[ab]c?[abc]{0,2}")


@cache
def letters() -> Any:
    """A tokenizer of three letters and `END`."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "<|end|>": END}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    special = {"eos_token": "<|end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def grammars() -> Grammars:
    return Grammars(lambda: GrammarTokenizer(letters(), (END,)))


def constrained_law(
    module: Any, prompt: tuple[int, ...], length: int, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of the first tokens of a completion under the grammar; behind its end stands
    `END` alone."""
    matcher = PrefixMatcher(GrammarTokenizer(letters(), (END,)).compile(CONSTRAINT))
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, chance in law.items():
            matcher.stand(0, prefix)
            with torch.inference_mode():
                logits = module(torch.tensor([[*prompt, *prefix]])).logits[:, -1].float()
            p = target_probabilities(masked_logits(logits, [matcher.mask()]), params)[0]
            for token_id in p.nonzero()[:, 0].tolist():
                longer[(*prefix, token_id)] = chance * float(p[token_id])
        law = longer
    return law
