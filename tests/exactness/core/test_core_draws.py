"""A draft's draw has exactly the law of the q that is sent. A draw distinguishes 2^16 values, and q
counts the values of each token. So the first and the last value of each token must draw it."""

import numpy as np
import pytest
import torch

from outrider.speculation import draft_sampling
from outrider.speculation.draft_sampling import DraftedToken, draw_from_logits
from outrider.speculation.proposal import COUNT_TOTAL
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.core_toys import RATIO_RULES

GENERATOR = torch.Generator().manual_seed(1)
ROWS = [
    torch.zeros(3),
    -0.37 * torch.arange(40),
    2 * torch.randn(50, generator=GENERATOR),
    torch.randn(200, generator=GENERATOR),
]
"""Logits. Of the row of 200, q has the likeliest tokens only."""


@pytest.mark.parametrize("row", ROWS, ids=len)
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_as_many_values_draw_a_token_as_its_count(
    row: torch.Tensor, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(values: np.ndarray) -> list[DraftedToken]:
        levels, num = (values + 0.5)[:, None] / COUNT_TOTAL, len(values)
        monkeypatch.setattr(draft_sampling, "uniforms", lambda bits: levels)
        noises = [RoundNoise(1, rule, 7)] * num
        logits, params = row.expand(num, -1), [SamplingParams()] * num
        return draw_from_logits(logits, params, noises, [0] * num)[0]

    [(_, q)] = drawn(np.zeros(1))
    ends = np.cumsum(q.counts)
    assert ends[-1] == COUNT_TOTAL
    expected = [(token_id, q) for token_id in q.token_ids]
    assert drawn(ends - q.counts) == expected
    assert drawn(ends - 1) == expected
