"""Masks on logits: what is forbidden has no probability under every transform, on every path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from verdict_laws import score

from outrider.errors import Incompatible, InvariantError, OutriderError
from outrider.grammar.token_mask import TokenMask
from outrider.speculation.draft_sampling import draw_from_logits, draw_siblings
from outrider.speculation.logits_processing import (
    DraftVocabulary,
    TokenHistory,
    draft_mask,
    masked_logits,
    row_masks,
    target_probabilities,
)
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.verification import verdict_from_logits

V = 300


def mask_of(ids: Sequence[int], vocab_size: int = V) -> TokenMask:
    flags = np.zeros(vocab_size, dtype=bool)
    flags[list(ids)] = True
    return TokenMask(np.packbits(flags, bitorder="little"))


class Listed:
    """Allows what it lists behind each path."""

    def __init__(self, listed: dict[tuple[int, ...], TokenMask | OutriderError | None]) -> None:
        self.listed = listed
        self.asked: list[tuple[int, ...]] = []

    def after(self, drafted: Sequence[int]) -> TokenMask | None:
        self.asked.append(tuple(drafted))
        found = self.listed[tuple(drafted)]
        if isinstance(found, OutriderError):
            raise found
        return found

    def num_legal(self, drafted: Sequence[int]) -> int:
        raise NotImplementedError

    def behind(self, committed: Sequence[int]) -> Listed:
        raise NotImplementedError


def test_a_mask_says_which_tokens_may_stand() -> None:
    mask = mask_of([0, 7, 8, 299])
    assert np.flatnonzero(mask.flags(V)).tolist() == [0, 7, 8, 299]
    assert np.flatnonzero(mask.flags(1000)).tolist() == [0, 7, 8, 299]
    assert np.flatnonzero(mask.flags(8)).tolist() == [0, 7]
    assert [v for v in range(1000) if mask.has(v)] == [0, 7, 8, 299]


@pytest.mark.parametrize("width", [V - 10, V, V + 40])
def test_rows_are_masked_each_by_its_own(device: str, width: int) -> None:
    """Tokens that the tokenizer lacks, as those of a padded vocabulary, may not stand either."""
    logits = torch.randn(3, width, device=device)
    before = logits.clone()
    masked = masked_logits(logits, [mask_of([1, 5]), None, mask_of([2])])
    assert torch.equal(logits, before)
    assert torch.equal(masked[1], logits[1])
    assert masked[0].isfinite().nonzero()[:, 0].tolist() == [1, 5]
    assert masked[2].isfinite().nonzero()[:, 0].tolist() == [2]
    assert torch.equal(masked[0, [1, 5]], logits[0, [1, 5]])
    assert masked_logits(logits, [None] * 3) is logits


def test_columns_of_a_reduced_vocabulary_are_masked_by_their_tokens(device: str) -> None:
    vocabulary = DraftVocabulary(np.array([3, 8, 200, 290]))
    masked = masked_logits(torch.zeros(1, 4, device=device), [mask_of([8, 9, 290])], vocabulary)
    assert masked[0].isfinite().nonzero()[:, 0].tolist() == [1, 3]


def test_each_row_of_a_tree_has_the_mask_of_its_path() -> None:
    """0 -> 10 -> (20, 21), 0 -> 11 (forbidden) -> 30."""
    masks = {
        (): mask_of([10]), (10,): mask_of([20, 21]), (10, 20): mask_of([1]),
        (10, 21): mask_of([2]), (11,): None,
    }  # fmt: skip
    allowed = Listed(masks)
    found = row_masks(allowed, Proposal((10, 11, 20, 21, 30), (), (-1, -1, 0, 0, 1)))
    assert found.masks == [masks[()], masks[10,], None, masks[10, 20], masks[10, 21], None]
    assert not found.untold
    assert (11, 30) not in allowed.asked


@pytest.mark.parametrize("behind", [None, Incompatible("regex: too hard")])
def test_a_legal_draft_token_behind_which_nothing_is_told_is_no_error(
    behind: OutriderError | None,
) -> None:
    """It may be refused. Nothing is asked behind it, and a forbidden token is not one of them."""
    allowed = Listed({(): mask_of([10]), (10,): behind})
    found = row_masks(allowed, Proposal((10, 20, 11), (), (-1, 0, -1)))
    assert found.masks == [allowed.listed[()], None, None, None]
    assert found.untold == {1}
    assert allowed.asked == [(), (10,)]


def test_what_cannot_be_told_behind_the_committed_tokens_is_an_error() -> None:
    with pytest.raises(Incompatible, match="too hard"):
        row_masks(Listed({(): Incompatible("regex: too hard")}), Proposal((10,), ()))


def test_a_draft_stops_where_nothing_may_follow() -> None:
    over = TokenMask(mask_of([0]).bits, is_over=True)
    allowed = Listed({(): mask_of([4]), (4,): over, (5,): None})
    assert draft_mask(allowed, ()) is allowed.listed[()]
    assert draft_mask(allowed, (4,)) is None
    assert draft_mask(allowed, (5,)) is None
    assert draft_mask(allowed, (), DraftVocabulary(np.array([1, 2]))) is None
    assert draft_mask(allowed, (), DraftVocabulary(np.array([1, 4]))) is not None

    for error in (Incompatible("regex: too hard"), InvariantError("it was legal before")):
        assert draft_mask(Failing(error), ()) is None


class Failing(Listed):
    def __init__(self, error: OutriderError) -> None:
        super().__init__({})
        self.error = error

    def after(self, drafted: Sequence[int]) -> TokenMask | None:
        raise self.error


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.7, top_k=40, min_p=0.01),
    SamplingParams(top_k=50),
    SamplingParams(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
        logit_bias=((3, 100.0), (9, -100.0)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
@pytest.mark.parametrize("num_allowed", [1, 2, 40, 290])
def test_the_quick_verdict_on_masked_logits_is_the_reference_ones(
    params: SamplingParams, rule: Rule, num_allowed: int
) -> None:
    """Draft tokens that are allowed, forbidden (p = 0), and behind a forbidden one (no mask). Bias
    and penalties bring nothing forbidden back."""
    random = np.random.default_rng([num_allowed, len(rule)])
    for seed in range(6):
        logits = torch.from_numpy(random.normal(0, 2, (4, V)))
        ids = [random.permutation(V)[:num_allowed].tolist() for _ in range(3)]
        masks = [mask_of(ids[0]), mask_of(ids[1]), None, None]
        forbidden = next(v for v in range(V) if v not in ids[1])
        entries = sorted({ids[0][0], 3, forbidden, 17})
        counts = [COUNT_TOTAL // len(entries)] * len(entries)
        counts[0] += COUNT_TOTAL - sum(counts)
        q = DraftDistribution(tuple(entries), tuple(counts))
        tokens = (ids[0][0], forbidden, 17)
        proposal = Proposal(tokens, (q, q, q) if rule.needs_q else ())
        history = TokenHistory((3, 4), (9, 3), tokens)
        masked, noise = masked_logits(logits, masks), RoundNoise(seed, rule, 11)
        found = verdict_from_logits(masked, params, history, proposal, noise)
        expected = score(target_probabilities(masked, params, history), proposal, noise)
        assert found.correction == expected.correction
        assert found.accept_probability == pytest.approx(expected.accept_probability, abs=1e-12)
        assert found.accept_probability[1] == 0.0
        assert found.correction[0] in ids[0]
        assert found.correction[1] in ids[1]


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED, Rule.GREEDY])
@pytest.mark.parametrize("num_allowed", [1, 3, 200])
def test_drafts_draw_what_is_allowed_alone(rule: Rule, num_allowed: int) -> None:
    random = np.random.default_rng(num_allowed)
    params = SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0)
    for seed in range(10):
        logits = torch.from_numpy(random.normal(0, 2, (1, V))).float()
        ids = random.permutation(V)[:num_allowed].tolist()
        masked, noise = masked_logits(logits, [mask_of(ids)]), RoundNoise(seed, rule, 4)
        tokens, _ = draw_from_logits(masked, params, [noise], [0])
        token_id, q = tokens[0]
        assert token_id in ids
        assert q is None or set(q.token_ids) <= set(ids)
        assert (q is None) == (num_allowed == 1 or rule is not Rule.TOKEN)
        siblings, q = draw_siblings(masked, params, [noise], [0], [4])[0]
        assert siblings[0] == token_id
        assert q is None or set(siblings) <= set(ids)
