"""The product's sampling transforms against their definitions (`sampled_law`), in both precisions
and with everything that changes a row: bias, penalties, masks, `min_tokens`, filters."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from outrider.grammar.token_mask import TokenMask
from outrider.speculation.logits_processing import (
    adjusted_logits,
    allowed_by_min_tokens,
    masked_logits,
    row_masks,
    target_probabilities,
    write_weights,
)
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling_params import SamplingParams, TokenHistory
from tests.exactness.law import sampled_law

EOS = (4,)
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.6, "min_p": 0.02},
    {"top_k": -1, "top_p": 0.999},
]
ADJUSTMENTS: list[dict[str, Any]] = [
    {},
    {"logit_bias": ((0, 2.5), (5, -3.0))},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.9, "frequency_penalty": -0.4},
    {
        "logit_bias": ((1, -1.0), (2, 4.0)),
        "repetition_penalty": 0.6,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.1,
        "min_tokens": 3,
        "stop_token_ids": (2, 6),
    },
]
TEMPERATURES = [1.0, 0.6, 1.8, 0.0]


@pytest.mark.parametrize("width", [7, 90, 700])
@pytest.mark.parametrize("adjustment", ADJUSTMENTS, ids=str)
@pytest.mark.parametrize("is_masked", [False, True])
def test_transforms_are_what_their_definitions_say(
    width: int, adjustment: dict[str, Any], is_masked: bool
) -> None:
    """Row n follows n draft tokens. Masks allow 0.7 of the tokens, or all but early ends."""
    random = np.random.default_rng(width)
    for filters, temperature in product(FILTERS, TEMPERATURES):
        given = {"temperature": temperature, **filters, **adjustment}
        params = SamplingParams(**given | {"min_tokens": 0} if is_masked else given)
        ends = {*EOS, *params.stop_token_ids}
        prompt, output, ids = ([*map(int, random.integers(0, 7, num))] for num in (3, 2, 2))
        ids = [token_id for token_id in ids if token_id not in ends]
        rows = torch.from_numpy(random.normal(0.0, 2.0, (len(ids) + 1, width)))
        masks: list[TokenMask | None] = [None] * len(rows)
        allowed = None
        if is_masked:
            flags = random.random(width) < 0.7
            flags[[0, *ids]] = True
            allowed = {*np.flatnonzero(flags).tolist()}
            masks = [TokenMask(np.packbits(flags, bitorder="little"))] * len(rows)
        elif early := allowed_by_min_tokens(params, len(output), EOS, width):
            masks = row_masks(early, Proposal(tuple(ids))).masks
        masked, history = masked_logits(rows, masks), TokenHistory(prompt, output, ids)
        found = target_probabilities(masked, params, history).numpy()
        weights = torch.empty(masked.shape)
        write_weights(adjusted_logits(masked.float(), params, history), params, weights)
        for n, row in enumerate(rows):
            rest = params, prompt, [*output, *ids[:n]]
            expected = sampled_law(row.tolist(), *rest, eos=EOS, allowed=allowed)
            np.testing.assert_allclose(found[n], expected, rtol=2e-7, atol=1e-12)
            shares = (weights[n].double() / weights[n].double().sum()).numpy()
            np.testing.assert_allclose(shares, expected, atol=2e-6)
