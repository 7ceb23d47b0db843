"""Verdicts on single proposals, compared with the formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvariantError
from outrider.speculation.accept_reject import decide
from outrider.speculation.gumbel_max import race
from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, Proposal
from outrider.speculation.random_streams import RoundNoise, Stream
from outrider.speculation.sampling_params import Rule, SamplingParams, TokenHistory
from outrider.speculation.verification import VerifyInput, verdicts_from_logits
from tests.support.verdict_laws import drafted, row_keys, score, verdict_from_logits

P = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.4, 0.0], [0.1, 0.1, 0.8]], dtype=torch.float64)
HALF = COUNT_TOTAL // 2
Q1 = DraftDistribution((0, 2), (HALF, HALF))
Q2 = DraftDistribution((0, 1), (COUNT_TOTAL // 4, 3 * COUNT_TOTAL // 4))


def winner(weights: torch.Tensor, noise: RoundNoise, index: int, stream: Stream) -> int:
    return int(race(weights[None], row_keys(noise.seed, [noise.place(index)], [stream]))[0])


def test_token_rule_by_hand():
    """min(1, p/q); residuals by RESIDUAL noise at their index, the bonus by TARGET noise at K."""
    noise = RoundNoise(3, Rule.TOKEN, 20)
    verdict = score(P, Proposal((0, 1), (Q1, Q2)), noise)
    assert verdict.accept_probability == (0.2 / 0.5, 0.4 / 0.75)
    first = torch.tensor([0.0, 0.3, 0.0], dtype=torch.float64)
    second = torch.tensor([0.6 - 0.25, 0.0, 0.0], dtype=torch.float64)
    assert verdict.correction == (
        winner(first, noise, 0, Stream.RESIDUAL),
        winner(second, noise, 1, Stream.RESIDUAL),
        winner(P[2], noise, 2, Stream.TARGET),
    )


def test_block_rule_by_hand():
    """h_1 = Z_1 / (Z_1 + 1 - pi_1), h_2 = pi_2, and the residual scaled by pi."""
    noise = RoundNoise(3, Rule.BLOCK, 20)
    verdict = score(P, Proposal((0, 1), (Q1, Q2)), noise)
    pi_1 = 0.4
    z_1 = max(pi_1 * 0.6 - 0.25, 0) + max(pi_1 * 0.4 - 0.75, 0)
    assert z_1 == 0
    assert verdict.accept_probability == pytest.approx((0.0, pi_1 * 0.4 / 0.75))
    verdict = score(P, Proposal((2, 1), (Q1, Q2)), noise)
    assert verdict.accept_probability == pytest.approx((1.0, 0.4 / 0.75))
    sparse = DraftDistribution((1, 2), (HALF, HALF))
    verdict = score(P, Proposal((0, 1), (Q1, sparse)), noise)
    z_1 = 0.4 * 0.6
    assert verdict.accept_probability == pytest.approx((z_1 / (z_1 + 0.6), 0.4 * 0.4 / 0.5))
    assert verdict.correction[1] == 0


def test_an_empty_residual_falls_back_to_p():
    """If p = q, the residual is empty. The correction is never used, but must be a possible
    token."""
    p = torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    for rule in (Rule.TOKEN, Rule.BLOCK):
        noise = RoundNoise(6, rule, 8)
        verdict = score(p, Proposal((1,), (Q2,)), noise)
        assert verdict.accept_probability == (1.0,)
        assert verdict.correction[0] == winner(p[0], noise, 0, Stream.RESIDUAL)


@pytest.mark.parametrize(
    ("rows", "proposal", "rule"),
    [
        (P, Proposal((1,)), Rule.COUPLED),
        (P, Proposal((0, 1)), Rule.TOKEN),
        (P, Proposal((0, 1), (Q1,)), Rule.BLOCK),
        (P, Proposal((1, 1), (Q1, Q2)), Rule.TOKEN),
        (P[0], Proposal(), Rule.TOKEN),
    ],
)
def test_what_does_not_fit_is_refused(rows, proposal, rule):
    """A row has a wrong shape, q is missing, or a draft token is not in its q."""
    noise = RoundNoise(0, rule, 4)
    with pytest.raises(InvariantError):
        verdict_from_logits(rows.log(), SamplingParams(), NO_HISTORY, proposal, noise)


INF = float("inf")
NO_HISTORY = TokenHistory()


@st.composite
def rows_of_logits(draw_from, num_rows):
    """Peaked, flat and tied rows of many widths, with forbidden tokens."""
    vocab_size = draw_from(st.sampled_from([1, 2, 7, 60, 300, 3000]))
    torch.manual_seed(draw_from(st.integers(0, 2**32)))
    spread = torch.tensor([draw_from(st.sampled_from([0.0, 0.7, 3.0, 9.0]))] * num_rows)
    logits = torch.randn(num_rows, vocab_size) * spread[:, None]
    if draw_from(st.booleans()):
        logits = (logits * 2).round() / 2
    if draw_from(st.booleans()):
        logits[:, 1:][torch.rand(num_rows, vocab_size - 1) < 0.3] = -INF
    return logits.double()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 1e-9]),
    top_k=st.sampled_from([0, 1, 5, 70]),
    min_p=st.sampled_from([0.0, 0.013, 0.37]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((0, 1.5), (9, -100.0))]),
)
HISTORY = TokenHistory(prompt_ids=[0, 3], output_ids=[5, 5, 1], drafted_ids=[2, 0, 4])


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
    """In float64, tokens are equal and acceptance agrees to 1e-12. Drafts are near the target or
    far from it, and some have a token that the target lacks."""
    rule = Rule.GREEDY if params.greedy else rule
    noise = RoundNoise(seed, rule, 40 + num_draft_tokens)
    near = logits.double() + torch.randn(logits.shape, dtype=torch.float64)
    wide = torch.cat([near, near[:, :1]], dim=1)[:num_draft_tokens]
    sampling = SamplingParams(temperature=0.0) if one_hot else SamplingParams(top_p=0.9)
    proposal = drafted(wide, sampling, noise)
    rows = logits[: num_draft_tokens + 1]
    expected = score(target_probabilities(rows, params, HISTORY), proposal, noise)
    verdict = verdict_from_logits(rows, params, HISTORY, proposal, noise)
    assert verdict.correction == expected.correction
    accept = pytest.approx(expected.accept_probability, rel=1e-12, abs=1e-12)
    assert verdict.accept_probability == accept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, top_k=3000, min_p=1e-4)]
)
def test_float32_rows_are_the_float64_ones_to_their_precision(dtype, rule, params):
    """Acceptance agrees to 1e-5, and tokens are equal: a race could differ only if two scores are
    within 1e-5 of each other, which does not occur for these seeds."""
    generator = torch.Generator().manual_seed(3)
    for seed in range(20):
        logits = (torch.randn(4, 20_000, generator=generator) * 3).to(dtype)
        noise = RoundNoise(seed, rule, 30)
        near = logits[:3].float() + torch.randn(3, 20_000, generator=generator)
        proposal = drafted(near, SamplingParams(), noise)
        found = verdict_from_logits(logits, params, NO_HISTORY, proposal, noise)
        expected = verdict_from_logits(logits.double(), params, NO_HISTORY, proposal, noise)
        assert found.correction == expected.correction
        accept = pytest.approx(expected.accept_probability, rel=1e-5, abs=1e-12)
        assert found.accept_probability == accept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sessions_in_one_pass_have_the_verdicts_that_each_has_alone(dtype):
    generator = torch.Generator().manual_seed(5)
    inputs = []
    for index, rule in enumerate([*Rule, *Rule, Rule.TOKEN]):
        num = (3, 0, 5, 3)[index % 4]
        greedy = rule is Rule.GREEDY
        params = (
            SamplingParams(temperature=0.0)
            if greedy
            else SamplingParams(top_p=0.9, top_k=40)
            if index % 3 == 0
            else SamplingParams(temperature=0.8, presence_penalty=0.4 * (index % 3 == 1))
        )
        logits = (torch.randn(num + 1, 9_000, generator=generator) * 3).to(dtype)
        noise = RoundNoise(index, rule, 20 + index)
        near = logits[:num].float() + torch.randn(num, 9_000, generator=generator) / 2
        proposal = drafted(near, params, noise)
        inputs.append(VerifyInput(logits, params, NO_HISTORY, proposal, noise))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = verdicts_from_logits(inputs)
    finally:
        torch.set_num_threads(threads)
    assert together == [verdicts_from_logits([verify_input])[0] for verify_input in inputs]


def test_greedy_sessions_whose_logits_are_adjacent_keep_their_own_rows():
    """The rows of a pass, of which one session's have a bias, and another's last row is NaN."""
    sizes = [1, 3, 2, 4, 1]
    rows = torch.randn(sum(sizes), 500, generator=torch.Generator().manual_seed(7))
    rows[9] = float("nan")
    inputs = []
    for index, logits in enumerate(rows.split(sizes)):
        noise = RoundNoise(index, Rule.GREEDY, 20)
        bias = ((3, 100.0),) if index == 2 else ()
        params = SamplingParams(temperature=0.0, logit_bias=bias)
        proposal = Proposal(tuple(logits[:-1].argmax(dim=1).tolist()), ())
        inputs.append(VerifyInput(logits, params, NO_HISTORY, proposal, noise))
    together = verdicts_from_logits(inputs)
    assert together == [verdicts_from_logits([one])[0] for one in inputs]
    likeliest = rows[:4].argmax(dim=1).tolist()
    assert [*together[0].correction, *together[1].correction] == likeliest
    assert together[1].accept_probability == (1.0, 1.0)
    assert together[2].correction == (3, 3)
    assert together[3].accept_probability == (1.0, 1.0, 0.0)


UNUSABLE = [float("nan"), INF, -INF]
"""Values of a logit, or of all logits of a row, without which the row would have a distribution."""
TRANSFORMS = [
    {},
    {"presence_penalty": 1.0},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 9, "top_p": 0.9},
]


def with_bad_row(logits, row, bad):
    found = logits.clone()
    found[row, 1 if bad != -INF else slice(None)] = bad
    return found


def transforms_of(rule, fields):
    return SamplingParams(**{**fields, **({"temperature": 0.0} if rule is Rule.GREEDY else {})})


@pytest.mark.parametrize("bad", UNUSABLE)
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("fields", TRANSFORMS)
def test_a_first_row_without_a_distribution_fails(bad, rule, fields):
    for proposal in (Proposal(), Proposal((1,), (None,))):
        logits = with_bad_row(torch.zeros(len(proposal) + 1, 12), 0, bad)
        noise, params = RoundNoise(1, rule, 4), transforms_of(rule, fields)
        with pytest.raises(InvariantError, match="row 0"):
            verdict_from_logits(logits, params, HISTORY, proposal, noise)


@pytest.mark.parametrize("bad", UNUSABLE)
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("fields", TRANSFORMS)
def test_an_outcome_ends_before_a_row_without_a_distribution(bad, rule, fields):
    """The outcome is that of the proposal that ends before this row. If it reaches the row, it has
    no token from it. The verdicts of other sessions are as before."""
    generator = torch.Generator().manual_seed(7)
    params, num, num_ended = transforms_of(rule, fields), 3, 0
    for seed in range(24):
        noise, row = RoundNoise(seed, rule, 30), 1 + seed % num
        logits = torch.randn(num + 1, 12, generator=generator)
        proposal = drafted(logits[:num] + torch.randn(num, 12, generator=generator), params, noise)
        if rule.absolute_noise and seed % 2:
            own = verdict_from_logits(logits, params, HISTORY, proposal, noise).correction
            proposal = Proposal(own[:num])
        cut = Proposal(proposal.token_ids[:row], proposal.q[:row])
        good = verdict_from_logits(logits[: row + 1], params, HISTORY, cut, noise)
        expected = decide(good, cut.token_ids, rule, noise.accept_uniforms(row)).token_ids
        broken = VerifyInput(with_bad_row(logits, row, bad), params, HISTORY, proposal, noise)
        whole = VerifyInput(logits, params, HISTORY, proposal, noise)
        [found, other] = verdicts_from_logits([broken, whole])
        outcome = decide(found, proposal.token_ids, rule, noise.accept_uniforms(num))
        assert outcome.token_ids == expected[:row]
        assert other == verdicts_from_logits([whole])[0]
        if len(expected) <= row:
            assert found.accept_probability == (*good.accept_probability, *[0.0] * (num - row))
        num_ended += len(expected) > row
    assert 0 < num_ended < 24
