"""Sampling transforms compared with their plain definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import Incompatible, InvariantError, OutriderError
from outrider.grammar.token_mask import TokenMask
from outrider.speculation.logits_processing import (
    DraftVocabulary,
    adjusted_logits,
    draft_mask,
    masked_logits,
    raw_logprobs,
    row_masks,
    target_probabilities,
)
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling_params import SamplingParams, TokenHistory

INF = float("inf")


def naive_row(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min-p, top-k and top-p, computed on sorted lists."""
    scaled = [x / params.temperature for x in logits]
    largest = max(scaled)
    weights = [math.exp(x - largest) for x in scaled]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    ranked = sorted((v for v, w in enumerate(weights) if w > 0), key=lambda v: (-weights[v], v))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    mass, kept = sum(weights[v] for v in ranked), []
    for v in ranked:
        if params.top_p < 1 and kept and sum(weights[k] for k in kept) >= params.top_p * mass:
            break
        kept.append(v)
    total = sum(weights[v] for v in kept)
    return [weights[v] / total if v in kept else 0.0 for v in range(len(logits))]


def rows_of(width: int) -> st.SearchStrategy[list[float]]:
    logits = st.integers(-12, 12).map(lambda i: i / 4) | st.just(-INF)
    return st.lists(logits, min_size=width, max_size=width).filter(lambda row: max(row) > -INF)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(2, 9).flatmap(lambda v: st.lists(rows_of(v), min_size=1, max_size=3)),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.97, 0.713, 0.291, 1e-9]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 100]),
    min_p=st.sampled_from([0.0, 0.013, 0.37, 1.0]),
)
def test_filters_against_the_naive_form(rows, temperature, top_p, top_k, min_p):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    logits = torch.tensor(rows, dtype=torch.float64)
    result = target_probabilities(logits, params)
    expected = torch.tensor([naive_row(row, params) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-15)
    assert torch.equal(result > 0, expected > 0)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
def test_top_p_of_wide_rows(spread, top_p):
    """The bucket search finds the same tokens as a full sort."""
    torch.manual_seed(1)
    logits = torch.randn(3, 5000) * spread
    logits[2] = (logits[2] * 4).round() / 4
    result = target_probabilities(logits, SamplingParams(top_p=top_p))
    full = logits.double().softmax(dim=1)
    ranked = full.sort(descending=True, stable=True)
    num_kept = (ranked.values.cumsum(dim=1) < top_p * (1 - 1e-13)).sum(dim=1) + 1
    for row in range(3):
        kept = ranked.indices[row, : num_kept[row]].sort().values
        assert torch.equal(result[row].nonzero()[:, 0], kept)
        expected = full[row, kept] / full[row, kept].sum()
        torch.testing.assert_close(result[row, kept], expected, rtol=1e-12, atol=0)


def test_exact_ties_keep_the_lowest_ids():
    flat = torch.zeros(2, 1000)
    three = target_probabilities(flat, SamplingParams(top_k=3)).nonzero().tolist()
    assert three == [[row, v] for row in range(2) for v in range(3)]
    few = target_probabilities(flat, SamplingParams(top_p=0.0025))
    assert few[0].nonzero()[:, 0].tolist() == [0, 1, 2]
    many = target_probabilities(flat, SamplingParams(top_p=0.4995))
    assert many[1].nonzero()[:, 0].tolist() == list(range(500))


def test_greedy_is_one_hot_at_the_lowest_of_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 3.0], [-INF, -5.0, -6.0]])
    params = SamplingParams(temperature=0.0, top_p=0.1)
    assert target_probabilities(logits, params).tolist() == [[0, 1, 0], [0, 1, 0]]
    biased = SamplingParams(temperature=0.0, logit_bias=((2, 1.5), (9, 100.0)))
    assert target_probabilities(logits, biased).tolist() == [[0, 0, 1], [0, 0, 1]]
    assert target_probabilities(logits.bfloat16(), params).dtype == torch.float64


def test_penalties_count_what_each_row_has_seen():
    """Repetition counts prompt and output, presence and frequency the output only; row i counts
    x_1..x_{i-1}; bias comes first."""
    history = TokenHistory(prompt_ids=[0, 7], output_ids=[1, 1], drafted_ids=[2, 1])
    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((0, -3.0), (3, 1.0)),
    )
    logits = torch.tensor([[1.0, 4.0, -2.0, 0.5]] * 3, dtype=torch.float64)
    before = logits.clone()
    expected = [
        [-4.0, 2.0 - 0.5 - 0.25 * 2, -2.0, 1.5],
        [-4.0, 2.0 - 0.5 - 0.25 * 2, -4.0 - 0.5 - 0.25, 1.5],
        [-4.0, 2.0 - 0.5 - 0.25 * 3, -4.0 - 0.5 - 0.25, 1.5],
    ]
    result = target_probabilities(logits, params, history)
    law = torch.tensor(expected, dtype=torch.float64).softmax(dim=1)
    torch.testing.assert_close(result, law, rtol=1e-12, atol=0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_biases_are_the_same_with_a_penalty_that_changes_nothing(dtype: torch.dtype) -> None:
    """Without penalties, biases are added by other code. No token is in the output."""
    most = torch.finfo(dtype).max
    values = [0.0, -0.0, 1.5, torch.inf, -torch.inf, torch.nan, most, -most]
    logits = torch.tensor([values, values[::-1]], dtype=dtype)
    for bias in (-100.0, -0.3, 100.0):
        params = SamplingParams(logit_bias=tuple((token_id, bias) for token_id in range(1, 12)))
        expected = adjusted_logits(logits, replace(params, presence_penalty=1.0))
        torch.testing.assert_close(
            adjusted_logits(logits, params), expected, rtol=0, atol=0, equal_nan=True
        )


def test_the_hardest_parameters_stay_numbers():
    logits = torch.tensor([[3e4, -3e4, 0.0, -INF]])
    for penalty in (1e-308, 5e-324, 10.0):
        params = SamplingParams(
            temperature=1.1e-5,
            repetition_penalty=penalty,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((0, -100.0), (1, 100.0)),
        )
        result = target_probabilities(logits, params, TokenHistory([0, 1, 2, 3], [0, 0, 1]))
        assert result.sum().item() == pytest.approx(1.0)
        assert result[0, 3] == 0


def test_raw_logprobs():
    """Tokens outside the vocabulary have -inf. Of equal tokens the lowest ids come first."""
    logits = torch.tensor([[1.0, 2.0, 2.0, -INF], [0.0, 0.0, 0.0, 0.0]])
    exact = logits.double().log_softmax(dim=1)
    entries = raw_logprobs(logits, [1, 3, 9, 2], 2, rows=[0, 0, 0, 1])
    expected = [float(exact[0, 1]), -INF, -INF, float(exact[1, 2])]
    assert [logprob for logprob, _ in entries] == pytest.approx(expected)
    assert [[v for v, _ in top] for _, top in entries] == [[1, 2], [1, 2], [1, 2], [0, 1]]
    assert entries[0][1][0][1] == entries[0][0]
    bare = raw_logprobs(logits, [0, 0], 0, rows=[0, 1])
    assert [logprob for logprob, _ in bare] == pytest.approx(exact[:, 0].tolist())
    assert [top for _, top in bare] == [(), ()]


V = 300


def mask_of(ids: Sequence[int]) -> TokenMask:
    flags = np.zeros(V, dtype=bool)
    flags[list(ids)] = True
    return TokenMask(np.packbits(flags, bitorder="little"))


class Listed:
    """Allows the tokens that it lists for each path."""

    def __init__(self, listed: dict[tuple[int, ...], TokenMask | OutriderError | None]) -> None:
        self.listed = listed
        self.asked: list[tuple[int, ...]] = []

    def mask_after(self, drafted: Sequence[int]) -> TokenMask | None:
        self.asked.append(tuple(drafted))
        found = self.listed[tuple(drafted)]
        if isinstance(found, OutriderError):
            raise found
        return found


@pytest.mark.parametrize("width", [V - 10, V, V + 40])
def test_rows_are_masked_each_by_its_own(width: int) -> None:
    """Tokens beyond the mask's end, as in a padded vocabulary, are forbidden, too."""
    logits = torch.randn(3, width)
    before = logits.clone()
    masked = masked_logits(logits, [mask_of([1, 5]), None, mask_of([2])])
    assert torch.equal(logits, before)
    assert torch.equal(masked[1], logits[1])
    assert masked[0].isfinite().nonzero()[:, 0].tolist() == [1, 5]
    assert masked[2].isfinite().nonzero()[:, 0].tolist() == [2]
    assert torch.equal(masked[0, [1, 5]], logits[0, [1, 5]])
    assert masked_logits(logits, [None] * 3) is logits


def test_columns_of_a_reduced_vocabulary_are_masked_by_their_tokens() -> None:
    vocabulary = DraftVocabulary.of([3, 8, 200, 290])
    masked = masked_logits(torch.zeros(1, 4), [mask_of([8, 9, 290])], vocabulary)
    assert masked[0].isfinite().nonzero()[:, 0].tolist() == [1, 3]


def test_each_row_has_the_mask_of_the_tokens_before_it() -> None:
    """After a forbidden draft token there are no masks, and `first_without_mask` is None."""
    masks = {(): mask_of([10]), (10,): mask_of([20, 21]), (10, 20): mask_of([1])}
    allowed = Listed(masks)
    found = row_masks(allowed, Proposal((10, 20, 11, 30)))
    assert found.masks == [masks[()], masks[10,], masks[10, 20], None, None]
    assert found.first_without_mask is None
    assert allowed.asked == [(), (10,), (10, 20)]


@pytest.mark.parametrize("behind", [None, Incompatible("regex: too hard")])
def test_a_legal_draft_token_behind_which_nothing_is_told_is_no_error(
    behind: OutriderError | None,
) -> None:
    """The draft token may be rejected. No mask is computed after it."""
    allowed = Listed({(): mask_of([10]), (10,): behind})
    found = row_masks(allowed, Proposal((10, 20, 11)))
    assert found.masks == [allowed.listed[()], None, None, None]
    assert found.first_without_mask == 1
    assert allowed.asked == [(), (10,)]


def test_a_draft_stops_where_nothing_may_follow() -> None:
    over = TokenMask(mask_of([0]).bits, is_over=True)
    allowed = Listed({(): mask_of([4]), (4,): over, (5,): None})
    assert draft_mask(allowed, ()) is allowed.listed[()]
    assert draft_mask(allowed, (4,)) is None
    assert draft_mask(allowed, (5,)) is None
    assert draft_mask(allowed, (), DraftVocabulary(np.array([1, 2]))) is None
    assert draft_mask(allowed, (), DraftVocabulary(np.array([1, 4]))) is not None
    for error in (Incompatible("regex: too hard"), InvariantError("it was legal before")):
        assert draft_mask(Listed({(): error}), ()) is None
