"""A draft whose head has rows for some tokens draws as one that gives the others nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verdict_laws import draft_tokens

from outrider.errors import InvariantError
from outrider.speculation.draft_sampling import draw_from_logits, quantise
from outrider.speculation.logits_processing import (
    DraftVocabulary,
    TokenHistory,
    target_probabilities,
)
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

VOCAB = 700
NUM_COLUMNS = 90
ROWS = 24
BIASED = ((3, 2.5), (5, -100.0), (8, 1.0), (640, 3.0))
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy-biased": SamplingParams(temperature=0.0, logit_bias=BIASED, presence_penalty=1.5),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6, top_p=0.8),
    "top-k": SamplingParams(top_k=7, min_p=0.01),
    "wide-top-k": SamplingParams(top_k=NUM_COLUMNS + 5),
    "biased": SamplingParams(logit_bias=BIASED, top_p=0.95),
    "penalised": SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=BIASED
    ),
}


@pytest.fixture(scope="module")
def vocabulary() -> DraftVocabulary:
    random = np.random.default_rng(3)
    others = random.choice(np.arange(10, VOCAB), NUM_COLUMNS - 2, replace=False)
    return DraftVocabulary(np.sort([3, 5, *others]))


@pytest.fixture(scope="module")
def logits(vocabulary: DraftVocabulary) -> torch.Tensor:
    """Over the columns; none are tied, as any of tied ones may be listed."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, NUM_COLUMNS, generator=generator, dtype=torch.float64) * 2


def scattered(rows: torch.Tensor, vocabulary: DraftVocabulary, nothing: float) -> torch.Tensor:
    wide = torch.full((len(rows), VOCAB), nothing, dtype=rows.dtype)
    wide[:, torch.from_numpy(vocabulary.token_ids)] = rows
    return wide


def noises(rule: Rule) -> list[RoundNoise]:
    return [RoundNoise(100 + row, rule, 40 + row) for row in range(ROWS)]


def history(vocabulary: DraftVocabulary) -> TokenHistory:
    """With repeats, and tokens of both kinds."""
    listed = vocabulary.token_ids.tolist()
    return TokenHistory((*listed[:20], 0, 1, 2), (*listed[10:30], *listed[10:12], 4, 3, 8, 8))


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
@pytest.mark.parametrize("name", PARAMS)
def test_it_draws_as_the_whole_vocabulary_with_nothing_elsewhere(
    vocabulary: DraftVocabulary, logits: torch.Tensor, name: str, rule: Rule
) -> None:
    """Same tokens, same distributions, by the target's ids, from logits and from probabilities:
    bias, penalties and filters mean the same in the small space."""
    params = PARAMS[name]
    rule = Rule.GREEDY if params.greedy else rule
    places, seen = list(range(ROWS)), history(vocabulary)
    got, _ = draw_from_logits(logits, params, noises(rule), places, 16, seen, vocabulary)
    wide = scattered(logits, vocabulary, -torch.inf)
    assert got == draw_from_logits(wide, params, noises(rule), places, 16, seen)[0]
    assert {token_id for token_id, _ in got} <= set(vocabulary.token_ids.tolist())
    small = target_probabilities(logits, vocabulary.params(params), vocabulary.history(seen))
    assert draft_tokens(small, noises(rule), places, 16, vocabulary) == got


def test_quantised_columns_are_the_targets_tokens(
    vocabulary: DraftVocabulary, logits: torch.Tensor
) -> None:
    row = target_probabilities(logits, SamplingParams())[0]
    wide = scattered(row[None], vocabulary, 0.0)[0]
    assert quantise(row, 12, vocabulary) == quantise(wide, 12)


def test_columns_are_found_by_token(vocabulary: DraftVocabulary) -> None:
    listed = vocabulary.token_ids
    known, columns = vocabulary.columns([0, int(listed[7]), VOCAB, int(listed[-1]), 1])
    assert known.tolist() == [1, 3]
    assert columns.tolist() == [7, NUM_COLUMNS - 1]


def test_tokens_out_of_order_are_refused() -> None:
    with pytest.raises(InvariantError, match="ascend"):
        DraftVocabulary(np.array([2, 1]))
    assert DraftVocabulary.of(()) is None
