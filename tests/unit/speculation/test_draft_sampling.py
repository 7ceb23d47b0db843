"""Draft draws: quantised before they are sampled, with the noise that the target expects."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from outrider.errors import InvariantError
from outrider.foundation.tokens import TokenSequence
from outrider.limits import SEED_MAX
from outrider.speculation import draft_sampling
from outrider.speculation.draft_sampling import draw_from_logits, quantise
from outrider.speculation.gumbel_max import numbers, token_keys, uniforms
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import COUNT_TOTAL, decode_q, encode_q
from outrider.speculation.random_streams import RoundNoise, Stream
from outrider.speculation.sampling_params import Rule, SamplingParams, TokenHistory
from tests.exactness.law import FALSE_ALARM
from tests.support.cuda_substitutes import draw_without_kernels
from tests.support.verdict_laws import draft_token, row_keys


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0, 1) | st.just(0.0), min_size=1, max_size=40).filter(any),
    entries_max=st.integers(1, 20),
)
def test_quantise(weights, entries_max):
    """Counts are positive and sum to 2^16, over at most `entries_max` of the likeliest tokens,
    likeliest first. The count of each of these tokens, even if 0, is within one of its share."""
    probabilities = torch.tensor(weights, dtype=torch.float64)
    q = quantise(probabilities, entries_max)
    assert sum(q.counts) == COUNT_TOTAL
    assert min(q.counts) > 0
    assert len(set(q.token_ids)) == len(q.token_ids)
    listed = [weights[token_id] for token_id in q.token_ids]
    assert listed == sorted(listed, reverse=True)
    ranked = sorted(weights, reverse=True)[:entries_max]
    assert listed[-1] >= ranked[-1]
    counts = dict(zip(q.token_ids, q.counts, strict=True))
    for token_id, weight in enumerate(weights):
        if weight > ranked[-1] or token_id in counts:
            share = weight / sum(ranked) * COUNT_TOTAL
            assert abs(counts.get(token_id, 0) - share) < 1 + 1e-6


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_the_draw_is_where_a_uniform_falls_on_the_counts(rule, monkeypatch):
    """Token and block draw by DRAFT noise from exactly what is sent."""
    monkeypatch.setattr(draft_sampling, "DRAFT_SUPPORT_ENTRIES", 8)
    probabilities = torch.rand(500, dtype=torch.float64) ** 4
    seen = set()
    for index in range(40):
        noise = RoundNoise(11, rule, 40)
        token_id, q = draft_token(probabilities, noise, index)
        assert q == quantise(probabilities, 8)
        keys = token_keys(row_keys(11, [noise.place(index)], [Stream.DRAFT]))
        level = float(uniforms(numbers(keys, np.array([[0]])))[0, 0]) * COUNT_TOTAL
        place = sum(total <= level for total in itertools.accumulate(q.counts))
        assert token_id == q.token_ids[place]
        assert decode_q(encode_q([q]), [token_id]) == (q,)
        seen.add(token_id)
    assert len(seen) > 3


def test_a_draw_at_the_edge_of_a_count_is_on_the_side_of_the_counts():
    """The draws of a session whose numbers fall on the first value of a token, where the model's
    own distribution often ends a little later. Of 2^16 draws each value is hit once on average."""
    logits, noises = 0.3 * torch.arange(30), [RoundNoise(3, Rule.TOKEN, n) for n in range(2**16)]
    params = [SamplingParams()]
    [(_, q)], _ = draw_from_logits(logits[None], params, noises[:1], [0])
    firsts = dict(zip(np.cumsum((0, *q.counts)).tolist(), q.token_ids, strict=False))
    keys = token_keys(row_keys(3, [noise.place(0) for noise in noises], [Stream.DRAFT] * 2**16))
    levels = uniforms(numbers(keys, np.array([[0]])))[:, 0] * COUNT_TOTAL // 1
    found = [(noise, int(level)) for noise, level in zip(noises, levels, strict=True)]
    found = [(noise, level) for noise, level in found if level in firsts]
    assert len(found) > 15
    rest = params * len(found), [noise for noise, _ in found], [0] * len(found)
    drawn, _ = draw_from_logits(logits.expand(len(found), -1), *rest)
    assert [token_id for token_id, _ in drawn] == [firsts[level] for _, level in found]


SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(top_k=5_000),
    SamplingParams(min_p=0.05, top_k=40, top_p=0.6),
    SamplingParams(top_p=1e-9),
    SamplingParams(repetition_penalty=1.3, logit_bias=((5, 4.0),)),
    SamplingParams(temperature=0.0),
    SamplingParams(logit_bias=((4, 3.0), (5, 4.0), (8, -1.0), (30_000, 2.0))),
    SamplingParams(temperature=0.0, presence_penalty=1.5, logit_bias=((5, 4.0), (6, 9.0))),
)
NUM_DEPTHS = 3


@pytest.mark.parametrize("vocab_size", [50, 3_001])
@pytest.mark.parametrize("num_entries", [1, 7, 64])
@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("rules", [tuple(Rule), (Rule.TOKEN,), (Rule.COUPLED,), (Rule.GREEDY,)])
def test_the_same_tokens_and_the_same_q(
    vocab_size: int,
    num_entries: int,
    rules: tuple[Rule, ...],
    is_reduced: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels draw for a batch of every rule and all sampling parameters, and the host draws for
    each row alone. A draft whose vocabulary has every third token draws as one for which no other
    token is possible. Rounding changes a count with a probability below 1e-8."""
    monkeypatch.setattr(draft_sampling, "DRAFT_SUPPORT_ENTRIES", num_entries)
    asked = [
        (sampling, RoundNoise(SEED_MAX - 7 * i, rule, 1_000 + i))
        for i, (sampling, rule) in enumerate((s, r) for s in SAMPLINGS for r in rules)
        if sampling.greedy == (rule is Rule.GREEDY)
    ]
    samplings, noises = zip(*asked, strict=True)
    histories = [TokenHistory((2, 5, 3), (8, 8, 4))] * len(asked)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn((NUM_DEPTHS, len(asked), vocab_size), generator=generator)
    vocabulary = DraftVocabulary(3 * np.arange(vocab_size) + 2) if is_reduced else None
    for depth, rows in enumerate(logits):
        with monkeypatch.context() as patched:
            draw_without_kernels(patched)
            rest = samplings, noises, [depth] * len(asked), histories
            tokens, likely = draw_from_logits(rows.to(device), *rest, vocabulary)
        if vocabulary is not None:
            wide = torch.full((len(asked), 3 * vocab_size), -torch.inf)
            wide[:, torch.from_numpy(vocabulary.token_ids)] = rows
            assert draw_from_logits(wide, *rest)[0] == tokens
        for index, (sampling, noise) in enumerate(asked):
            [token], [row] = draw_from_logits(
                rows[index][None], [sampling], [noise], [depth], histories[:1], vocabulary
            )
            found = likely[index]
            assert tokens[index] == token
            assert (found is None) == (row is None)
            if found is not None and row is not None:
                shares = found.mass / found.mass[0, 0]
                np.testing.assert_allclose(shares, row.mass / row.mass[0, 0], rtol=1e-5)
                is_possible = row.mass > 0
                assert (found.ids == row.ids)[is_possible].all()


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_drafts_after_other_prefixes_draw_independently(rule: Rule) -> None:
    """Two outcomes of a round have equal length, and differ in their last token. Of 8,000 draws
    from 8 x 8 equally likely pairs, each has 125 in expectation."""
    num, width = 8_000, 8
    drawn = []
    for last in (3, 4):
        noises = [
            RoundNoise(seed, rule, 2, TokenSequence((1, last)).digest()) for seed in range(num)
        ]
        tokens, _ = draw_from_logits(
            torch.zeros((num, width)), [SamplingParams()] * num, noises, [0] * num
        )
        drawn.append(np.array([token_id for token_id, _ in tokens]))
    pairs = np.bincount(drawn[0] * width + drawn[1], minlength=width**2)
    assert chisquare(pairs).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_logits_that_are_no_numbers(
    bad: float, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernels:
        draw_without_kernels(monkeypatch)
    logits = torch.zeros((2, 20))
    logits[1, 3] = bad
    noise = RoundNoise(1, Rule.TOKEN, 5)
    draw_from_logits(logits[:1], [SamplingParams()], [noise], [0])
    with pytest.raises(InvariantError, match="row 1 cannot be sampled from"):
        draw_from_logits(logits, [SamplingParams()] * 2, [noise] * 2, [0, 0])


def test_a_mask_may_leave_fewer_tokens_than_q_has_entries():
    """The width is no multiple of a block, so the search for the likeliest pads the rows."""
    vocabulary = DraftVocabulary(2 * np.arange(20_001) + 1)
    logits = torch.full((1, 20_001), -torch.inf)
    logits[0, [5, 20_000]] = torch.tensor([2.0, 1.0])
    noise = RoundNoise(1, Rule.TOKEN, 5)
    rest = [SamplingParams()], [noise], [0], (), vocabulary
    [(token_id, q)], [likely] = draw_from_logits(logits, *rest)
    assert q.token_ids == (11, 40_001)
    assert token_id in q.token_ids
    assert likely.ids[0, :2].tolist() == [11, 40_001]
