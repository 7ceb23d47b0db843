"""Verdicts and draft draws made from logits in one call against those made from full rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvariantError
from outrider.speculation import supports as supports_module
from outrider.speculation.drafting import draft_tokens, draw_from_logits
from outrider.speculation.noise import RoundNoise
from outrider.speculation.noise_rows import NoiseBatch
from outrider.speculation.philox import flat_uniforms
from outrider.speculation.philox_rows import row_uniforms
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, Proposal
from outrider.speculation.race import race
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.scoring import score
from outrider.speculation.supports import draw, likeliest, supports
from outrider.speculation.transforms import TokenHistory, target_probabilities
from outrider.speculation.verdicts import verdict_from_logits

INF = float("inf")
NO_HISTORY = TokenHistory()
RATIO_RULES = [Rule.TOKEN, Rule.BLOCK]


@st.composite
def rows_of_logits(draw_from, num_rows):
    """Peaked, flat and tied rows of many widths, some tokens of which are forbidden."""
    vocab_size = draw_from(st.sampled_from([1, 2, 7, 60, 300, 3000]))
    torch.manual_seed(draw_from(st.integers(0, 2**32)))
    spread = torch.tensor([draw_from(st.sampled_from([0.0, 0.7, 3.0, 9.0]))] * num_rows)
    logits = torch.randn(num_rows, vocab_size) * spread[:, None]
    if draw_from(st.booleans()):
        logits = (logits * 2).round() / 2
    if draw_from(st.booleans()):
        logits[:, 1:][torch.rand(num_rows, vocab_size - 1) < 0.3] = -INF
    dtype = draw_from(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return logits.to(dtype)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 1e-9]),
    top_k=st.sampled_from([0, 1, 5, 70]),
    min_p=st.sampled_from([0.0, 0.013, 0.37]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((0, 1.5), (9, -100.0))]),
)
HISTORY = TokenHistory(prompt_ids=[0, 3], output_ids=[5, 5, 1], drafted_ids=[2, 0, 4])


@settings(max_examples=150, deadline=None)
@given(logits=rows_of_logits(3), params=PARAMS)
def test_supports_are_the_positive_probabilities(logits, params):
    """The same tokens as in the full rows, with the same probabilities."""
    before = logits.clone()
    expected = target_probabilities(logits, params, HISTORY)
    for row, full in zip(supports(logits, params, HISTORY), expected.numpy(), strict=True):
        assert row.ids.tolist() == np.flatnonzero(full).tolist()
        np.testing.assert_allclose(row.mass, full[row.ids], rtol=1e-12)
        assert row.at(len(full)) == 0.0
        assert [row.at(v) for v in range(min(len(full), 12))] == pytest.approx(full[:12].tolist())
    assert torch.equal(logits, before)


@settings(max_examples=150, deadline=None)
@given(
    logits=rows_of_logits(4),
    params=PARAMS,
    rule=st.sampled_from([Rule.TOKEN, Rule.BLOCK, Rule.COUPLED]),
    seed=st.integers(0, 2**64 - 1),
    num_draft_tokens=st.integers(0, 3),
    one_hot=st.booleans(),
)
def test_a_fused_verdict_is_the_verdict_on_full_rows(
    logits, params, rule, seed, num_draft_tokens, one_hot
):
    """Bit-equal tokens, and acceptance within 1e-12, for drafts near the target and far from it
    (and, every now and then, with a token that the target does not have)."""
    noise = RoundNoise(seed, rule, 40 + num_draft_tokens)
    near = logits.double() + torch.randn(logits.shape, dtype=torch.float64)
    wide = torch.cat([near, near[:, :1]], dim=1)[:num_draft_tokens]
    sampling = SamplingParams(temperature=0.0) if one_hot else SamplingParams(top_p=0.9)
    drafted = [
        draft_tokens(row[None], [noise], [index], entries_max=16)[0]
        for index, row in enumerate(target_probabilities(wide, sampling) if len(wide) else wide)
    ]
    q = tuple(entry for _, entry in drafted) if rule.needs_q else ()
    proposal = Proposal(tuple(token_id for token_id, _ in drafted), q)
    rows = logits[: num_draft_tokens + 1]
    expected = score(target_probabilities(rows, params, HISTORY), proposal, noise)
    verdict = verdict_from_logits(rows, params, HISTORY, proposal, noise)
    assert verdict.correction == expected.correction
    assert verdict.accept_probability == pytest.approx(
        expected.accept_probability, rel=1e-12, abs=1e-12
    )


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_drafts_and_verdicts_over_wide_rows(rule):
    """Where hundreds of tokens have a chance, and the draft lists some that the target does not:
    the draft keeps the likeliest, and only what the target lists counts against it."""
    torch.manual_seed(12)
    target, draft = SamplingParams(top_p=0.7), SamplingParams()
    for seed in range(30):
        logits = torch.randn(4, 400) * 1.5
        near = logits[:3] + torch.randn(3, 400)
        noise = RoundNoise(seed, rule, 30)
        drafted = draft_tokens(target_probabilities(near, draft), [noise] * 3, range(3), 16)
        assert draw_from_logits(near, draft, [noise] * 3, range(3), 16)[0] == drafted
        proposal = Proposal(*zip(*drafted, strict=True))
        expected = score(target_probabilities(logits, target), proposal, noise)
        verdict = verdict_from_logits(logits, target, NO_HISTORY, proposal, noise)
        assert verdict.correction == expected.correction
        assert verdict.accept_probability == pytest.approx(
            expected.accept_probability, rel=1e-12, abs=1e-12
        )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias=((3, 2.5),), frequency_penalty=2.0),
    ],
)
def test_greedy_takes_the_lowest_of_the_likeliest(params):
    """Without a full row of anything; ties, bias and penalties as in the full form."""
    torch.manual_seed(4)
    logits = torch.randn(3, 50).round()
    proposal = Proposal((int(logits[0].argmax()), 7))
    noise = RoundNoise(1, Rule.GREEDY, 9)
    expected = score(target_probabilities(logits, params, HISTORY), proposal, noise)
    assert verdict_from_logits(logits, params, HISTORY, proposal, noise) == expected
    one_hot = supports(logits, params, HISTORY)
    assert [row.ids.tolist() for row in one_hot] == [[v] for v in expected.correction]
    warm = SamplingParams(top_p=0.5)
    assert verdict_from_logits(logits, warm, HISTORY, proposal, noise) == score(
        target_probabilities(logits, warm), proposal, noise
    )


def test_the_largest_is_the_same_on_any_device():
    """Arrays and tensors agree on ties and on what is no number."""
    rows = torch.tensor([[1.0, 3.0, 3.0], [0.0, float("nan"), INF], [-INF, -INF, -INF]])
    found, largest = supports_module._largest(rows)
    assert found == [1, 1, 0]
    by_torch = supports_module._largest_by_torch(rows)
    assert (found, str(largest)) == (by_torch[0], str(by_torch[1]))


def test_a_residual_with_nothing_left_falls_back_to_p():
    """p = q, and a path that the target cannot take: the same fallbacks as with full rows."""
    half = DraftDistribution((0, 1), (COUNT_TOTAL // 2, COUNT_TOTAL // 2))
    beyond = DraftDistribution((1, 9), (COUNT_TOTAL // 2, COUNT_TOTAL // 2))
    logits = torch.tensor([[0.0, 0.0, -INF]] * 4)
    for rule in RATIO_RULES:
        noise = RoundNoise(6, rule, 8)
        for proposal in (
            Proposal((1, 0, 1), (half, half, half)),
            Proposal((9, 1, 0), (beyond, half, None)),
        ):
            expected = score(target_probabilities(logits, SamplingParams()), proposal, noise)
            verdict = verdict_from_logits(logits, SamplingParams(), NO_HISTORY, proposal, noise)
            assert verdict == expected


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("presence_penalty", [0.0, 1.0])
def test_logits_that_are_no_numbers_name_their_row(bad, rule, presence_penalty):
    """As with full rows, under every rule, penalised or not."""
    temperature = 0.0 if rule is Rule.GREEDY else 1.0
    params = SamplingParams(temperature=temperature, presence_penalty=presence_penalty)
    logits = torch.zeros(2, 4)
    logits[1, 1] = bad
    proposal = Proposal((1,), (None,))
    with pytest.raises(InvariantError, match="row 1"):
        verdict_from_logits(logits, params, HISTORY, proposal, RoundNoise(1, rule, 4))
    with pytest.raises(InvariantError, match="row 0"):
        likeliest(torch.full((1, 4), -INF), params)


@pytest.mark.parametrize(
    ("shape", "proposal", "rule"),
    [
        ((2, 3), Proposal(), Rule.COUPLED),
        ((2, 0), Proposal((1,)), Rule.COUPLED),
        ((3,), Proposal(), Rule.TOKEN),
        ((2, 3), Proposal((1,)), Rule.TOKEN),
        ((2, 3), Proposal((2,), (DraftDistribution((0, 1), (1, COUNT_TOTAL - 1)),)), Rule.BLOCK),
    ],
)
def test_what_does_not_fit_is_refused(shape, proposal, rule):
    """Wrong shapes, a missing q, and a draft token outside its own q never become a verdict."""
    with pytest.raises(InvariantError):
        verdict_from_logits(
            torch.zeros(shape), SamplingParams(), NO_HISTORY, proposal, RoundNoise(0, rule, 4)
        )


@settings(max_examples=60, deadline=None)
@given(logits=rows_of_logits(3), params=PARAMS, rule=st.sampled_from(Rule), greedy=st.booleans())
def test_draft_draws_from_logits(logits, params, rule, greedy):
    """Tokens and quantised distributions are those of the full rows, for several sessions."""
    params = SamplingParams(temperature=0.0) if greedy else params
    noises = [RoundNoise(2**40 + index, rule, 50 + index) for index in range(3)]
    probabilities = target_probabilities(logits, params, HISTORY)
    expected = draft_tokens(probabilities, noises, [0, 2, 1], 16)
    assert draw_from_logits(logits, params, noises, [0, 2, 1], 16, HISTORY)[0] == expected
    assert draw_from_logits(logits[:0], params, [], [])[0] == []


def test_draft_draws_check_their_arguments():
    """As many rows as sessions, and room for at least one token."""
    noises = [RoundNoise(1, Rule.TOKEN, 4)]
    with pytest.raises(InvariantError, match="one noise"):
        draw_from_logits(torch.zeros(2, 4), SamplingParams(), noises, [0])
    with pytest.raises(InvariantError, match="entries_max"):
        draw_from_logits(torch.zeros(1, 4), SamplingParams(), noises, [0], 0)


def test_listed_noise_is_that_of_full_rows():
    """One session's rows share their seed and several sessions' do not; both read the same
    numbers as full rows do."""
    ids = [np.array([0, 5, 6, 4001]), np.array([3]), np.arange(7, 900)]
    listed, sizes = np.concatenate(ids), [len(row) for row in ids]
    for noises in (
        [RoundNoise(2**63 + 5, Rule.TOKEN, 9)],
        [RoundNoise(seed, Rule.TOKEN, 9 + seed % 5) for seed in (3, 2**33, 3)],
    ):
        keys = NoiseBatch.of(noises).correction_keys(2 if len(noises) == 1 else 0)
        full = row_uniforms(keys, 4002, "cpu").numpy()
        expected = np.concatenate([full[row, ids[row]] for row in range(3)])
        assert flat_uniforms(keys, sizes, listed).tolist() == expected.tolist()
        few = flat_uniforms(keys.of([0, 1]), sizes[:2], listed[:5])
        assert few.tolist() == expected[:5].tolist()


def test_sparse_and_whole_rows_are_drawn_side_by_side():
    """Rows that list everything, most, few or one of the tokens: the winners of full rows, with
    zeros among the weights and in a row of nothing else."""
    torch.manual_seed(8)
    full = torch.rand(5, 2000, dtype=torch.float64)
    full[1, torch.rand(2000) < 0.4] = 0.0
    full[2, torch.rand(2000) < 0.95] = 0.0
    full[3] = 0.0
    full[3, 1999] = 1.0
    full[4, :] = 0.0
    rows = [(np.flatnonzero(row), row[row > 0].numpy()) for row in full[:4]]
    rows.append((np.arange(2000), np.zeros(2000)))
    keys = NoiseBatch.of([RoundNoise(8, Rule.COUPLED, 77)]).correction_keys(4)
    assert draw(rows, keys) == race(full, keys).tolist()
