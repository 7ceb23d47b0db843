"""Greedy text of `generate` in transformers, and how to compare an engine's text with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NEAR_TIE = 1e-3
"""If the logits of the two likeliest tokens differ by less, either token may win in float32."""


@dataclass(frozen=True)
class LibraryText:
    """Greedy tokens, and at each token the gap between the two largest logits."""

    tokens: list[int]
    gaps: list[float]

    def check(self, got: Sequence[int]) -> None:
        """Asserts that `got` equals these tokens, or first differs from them at a near tie."""
        for position, (mine, theirs) in enumerate(zip(got, self.tokens, strict=False)):
            if mine != theirs:
                gap = self.gaps[position]
                assert gap < NEAR_TIE, f"token {position}: {mine}, the library {theirs} by {gap}"
                return
        assert len(got) == len(self.tokens)


def library_text(module: Any, prompt: Sequence[int], num_tokens: int) -> LibraryText:
    """Generates for one prompt, with a module that no engine uses."""
    ids = torch.tensor([prompt])
    out = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    gaps = [float(row[0].topk(2).values.diff().abs()) for row in out.logits]
    return LibraryText(out.sequences[0, len(prompt) :].tolist(), gaps)
