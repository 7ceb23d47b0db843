"""score(): verdicts on single proposals, checked against the formulas written out."""

from __future__ import annotations

import pytest
import torch
from verdict_laws import NoiseRows, draft_rows, score, score_rows, verdict_law

from outrider.errors import InvariantError
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.gumbel_max import race
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, Proposal
from outrider.speculation.random_streams import RoundNoise, Stream, row_keys
from outrider.speculation.sampling_params import Rule

P = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.4, 0.0], [0.1, 0.1, 0.8]], dtype=torch.float64)
HALF = COUNT_TOTAL // 2
Q1 = DraftDistribution((0, 2), (HALF, HALF))
Q2 = DraftDistribution((0, 1), (COUNT_TOTAL // 4, 3 * COUNT_TOTAL // 4))


def winner(weights: torch.Tensor, noise: RoundNoise, index: int, stream: Stream) -> int:
    return int(race(weights[None], row_keys(noise.seed, [noise.place(index)], [stream])))


def test_token_rule_by_hand(device):
    """min(1, p/q), residuals by RESIDUAL noise at their index, bonus by TARGET noise at K."""
    noise = RoundNoise(3, Rule.TOKEN, 20)
    verdict = score(P.to(device), Proposal((0, 1), (Q1, Q2)), noise)
    assert verdict.accept_probability == (0.2 / 0.5, 0.4 / 0.75)
    first = torch.tensor([0.0, 0.3, 0.0], dtype=torch.float64)
    second = torch.tensor([0.6 - 0.25, 0.0, 0.0], dtype=torch.float64)
    assert verdict.correction == (
        winner(first, noise, 0, Stream.RESIDUAL),
        winner(second, noise, 1, Stream.RESIDUAL),
        winner(P[2], noise, 2, Stream.TARGET),
    )


def test_block_rule_by_hand(device):
    """h_1 = Z_1 / (Z_1 + 1 - pi_1), h_2 = pi_2, and the residual scaled by pi."""
    noise = RoundNoise(3, Rule.BLOCK, 20)
    verdict = score(P.to(device), Proposal((0, 1), (Q1, Q2)), noise)
    pi_1 = 0.4
    z_1 = max(pi_1 * 0.6 - 0.25, 0) + max(pi_1 * 0.4 - 0.75, 0)
    assert z_1 == 0
    assert verdict.accept_probability == pytest.approx((0.0, pi_1 * 0.4 / 0.75))
    verdict = score(P.to(device), Proposal((2, 1), (Q1, Q2)), noise)
    assert verdict.accept_probability == pytest.approx((1.0, 0.4 / 0.75))
    sparse = DraftDistribution((1, 2), (HALF, HALF))
    verdict = score(P.to(device), Proposal((0, 1), (Q1, sparse)), noise)
    z_1 = 0.4 * 0.6
    assert verdict.accept_probability == pytest.approx((z_1 / (z_1 + 0.6), 0.4 * 0.4 / 0.5))
    assert verdict.correction[1] == 0


def test_coupled_and_greedy_by_hand(device):
    """A draft token is accepted iff it is what the target takes itself."""
    noise = RoundNoise(9, Rule.COUPLED, 2**20)
    own = tuple(winner(P[i], noise, i, Stream.TARGET) for i in range(3))
    assert score(P.to(device), Proposal(own[:2]), noise) == Verdict((1.0, 1.0), own)
    other = (own[0], (own[1] + 1) % 3)
    assert score(P.to(device), Proposal(other), noise) == Verdict((1.0, 0.0), own)
    greedy = RoundNoise(9, Rule.GREEDY, 4)
    assert score(P.to(device), Proposal((2, 1)), greedy) == Verdict((1.0, 0.0), (2, 0, 2))


@pytest.mark.parametrize("rule", Rule)
def test_without_draft_tokens_a_verdict_is_one_draw(rule, device):
    """K = 0 is the target decoding alone: by TARGET noise at index 0."""
    noise = RoundNoise(5, rule, 8)
    expected = 2 if rule is Rule.GREEDY else winner(P[0], noise, 0, Stream.TARGET)
    assert score(P[:1].to(device), Proposal(), noise) == Verdict((), (expected,))


@pytest.mark.parametrize("rule", Rule)
def test_vocabularies_padded_differently(rule, device):
    """Draft ids beyond the target's width have p = 0; the target's tokens beyond the draft's
    width have q = 0 and stay in the residual."""
    wide = DraftDistribution((1, 9), (HALF, HALF))
    noise = RoundNoise(5, rule, 8)
    verdict = score(P.to(device), Proposal((9, 9), (wide, None)), noise)
    assert verdict.accept_probability == (0.0, 0.0)
    assert all(token_id < 3 for token_id in verdict.correction)
    if rule.needs_q:
        drafts = rows_of((9, 9), (1, 9), (0.5, 0.5))
        weights = verdict_law(rule, P[None], drafts).weights[0]
        torch.testing.assert_close(weights[0], torch.tensor([0.2, 0.0, 0.5], dtype=torch.float64))


def rows_of(token_ids: tuple[int, ...], support: tuple[int, ...], mass: tuple[float, ...]):
    """One proposal whose positions share a distribution."""
    num = len(token_ids)
    return draft_rows(
        torch.tensor([token_ids]),
        torch.tensor([[support] * num]),
        torch.tensor([[mass] * num], dtype=torch.float64),
    )


def test_a_one_hot_draft_is_accepted_by_p_and_its_token_leaves_the_residual(device):
    """n-gram and argmax drafts: accept with p(x), else another token."""
    noise = RoundNoise(6, Rule.TOKEN, 8)
    verdict = score(P.to(device), Proposal((2, 0), (None, None)), noise)
    assert verdict.accept_probability == (0.5, 0.6)
    assert verdict.correction[0] != 2
    assert verdict.correction[1] == 1


def test_an_empty_residual_falls_back_to_p():
    """Where p = q nothing is left over; the correction that nobody asks for is still a token that
    the target could say."""
    p = torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    for rule in (Rule.TOKEN, Rule.BLOCK):
        noise = RoundNoise(6, rule, 8)
        verdict = score(p, Proposal((1,), (Q2,)), noise)
        assert verdict.accept_probability == (1.0,)
        assert verdict.correction[0] == winner(p[0], noise, 0, Stream.RESIDUAL)


def test_a_path_the_target_cannot_take_is_never_accepted_under_block():
    """Behind a token with p = 0 every h is 0, to the end of the block, and all of it is finite."""
    verdict = score(P, Proposal((0, 2), (Q1, DraftDistribution((1, 2), (HALF, HALF)))), ROUND)
    assert verdict.accept_probability[1] == 0.0
    dead = torch.tensor([[0.0, 0.5, 0.5]] * 3, dtype=torch.float64)
    assert score(dead, Proposal((0, 1), (Q1, Q2)), ROUND).accept_probability == (0.0, 0.0)


ROUND = RoundNoise(1, Rule.BLOCK, 5)


def test_long_paths_of_small_ratios_keep_their_precision():
    """pi is summed as logarithms: after ratios whose product is far under the smallest float, and
    as many large ones, it is 1 again."""
    rows = torch.zeros(201, 2, dtype=torch.float64)
    rows[:, 0] = 1.0
    rows[:4] = torch.tensor([1e-100, 1.0], dtype=torch.float64)
    law = verdict_law(Rule.BLOCK, rows[None], rows_of((0,) * 200, (0, 1), (2**-16, 1 - 2**-16)))
    assert law.accept[0, -1] == 1.0
    assert law.accept[0, 4] == 0.0


@pytest.mark.parametrize("rule", Rule)
def test_rows_of_many_sessions_score_as_each_alone(rule, device):
    """Batching proposals changes nothing, and inputs are left as they were."""
    torch.manual_seed(2)
    p = torch.rand(4, 4, 600, dtype=torch.float64) ** 20
    p = (p / p.sum(dim=2, keepdim=True)).to(device)
    before = p.clone()
    ids = torch.stack([torch.randperm(600)[:5].sort().values for _ in range(12)]).view(4, 3, 5)
    counts = torch.tensor([1000, 20000, 30000, 14000, 536], dtype=torch.float64)
    mass = (counts / COUNT_TOTAL).expand(4, 3, 5)
    drafts = draft_rows(ids[..., 2].to(device), ids.to(device), mass.to(device))
    noises = [RoundNoise(b, rule, 50 + b) for b in range(4)]
    accept, correction = score_rows(p, drafts, NoiseRows.of(noises))
    for b in range(4):
        q = tuple(
            DraftDistribution(tuple(row.tolist()), tuple(int(c) for c in counts)) for row in ids[b]
        )
        proposal = Proposal(tuple(ids[b, :, 2].tolist()), q)
        verdict = score(p[b], proposal, noises[b])
        assert verdict == Verdict(tuple(accept[b].tolist()), tuple(correction[b].tolist()))
    assert torch.equal(p, before)


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
    """Wrong shapes, a missing q, and a draft token outside its own q never become a verdict."""
    with pytest.raises(InvariantError):
        score(rows, proposal, RoundNoise(0, rule, 4))
