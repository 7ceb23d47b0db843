"""Guesses of corrections: the order in which the round's own race would let them win."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.speculation.draft_sampling import likely_tokens
from outrider.speculation.gumbel_max import scores as scores_of
from outrider.speculation.logits_processing import NO_HISTORY, DraftVocabulary, target_probabilities
from outrider.speculation.outcome_prediction import EVIDENCE_MAX, guess_outcomes, with_bonus
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise, Stream, row_keys
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.verification import verdict_from_logits

V, K = 50, 3
DRAFTED = (7, 3, 11)
HOT = SamplingParams(temperature=1.0)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(K + 1, V, generator=torch.Generator().manual_seed(seed)) * 2


def waits(noise: RoundNoise, index: int, stream: Stream) -> np.ndarray:
    """Of the tokens at one place."""
    keys = row_keys(noise.seed, [noise.place(index)], [stream])
    ones = torch.ones(1, V, dtype=torch.float64)
    return 1 / scores_of(ones, torch.arange(V)[None], keys)[0].numpy()


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
@pytest.mark.parametrize("params", [HOT, SamplingParams(temperature=0.7, top_k=20)])
def test_the_order_is_by_log_q_and_the_rounds_noise(rule: Rule, params: SamplingParams) -> None:
    noise = RoundNoise(5, rule, 40)
    found = guess_outcomes(logits(), params, noise, DRAFTED, 5)
    q = target_probabilities(logits(), params, NO_HISTORY).numpy()
    for n in range(K + 1):
        stream = noise.draft_stream.TARGET if n == K else noise.residual_stream
        with np.errstate(divide="ignore"):
            scores = np.log(q[n]) - np.log(waits(noise, n, stream))
        if n < K:
            scores[DRAFTED[n]] = -np.inf
        expected = [int(v) for v in np.argsort(-scores) if scores[v] > -np.inf][:5]
        assert found.corrections[n] == expected
        falls = scores[expected] - scores[expected[0]]
        np.testing.assert_allclose(found.scores[n] - found.scores[n, 0], falls, atol=1e-5)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY])
def test_what_won_by_much_is_likely_to_win_again(rule: Rule) -> None:
    """The evidence for a draft token is what its score is ahead of the next one's; for one that is
    not among the likeliest nothing speaks."""
    params = SamplingParams(temperature=0.0) if rule is Rule.GREEDY else HOT
    noise = RoundNoise(5, rule, 40)
    scores = []
    for n, row in enumerate(logits()[:K].double().numpy()):
        late = np.log(waits(noise, n, noise.residual_stream))
        scores.append(row if rule is Rule.GREEDY else row - late)
    order = [np.argsort(-row) for row in scores]
    drafted = (int(order[0][0]), int(order[1][2]), int(order[2][-1]))
    found = guess_outcomes(logits(), params, noise, drafted, 5)
    first = scores[0][order[0][0]] - scores[0][order[0][1]]
    second = scores[1][order[1][2]] - scores[1][order[1][0]]
    np.testing.assert_allclose(found.evidence, [first, second, -EVIDENCE_MAX], atol=1e-4)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_small_number_is_sure_to_pass(rule: Rule) -> None:
    noise = RoundNoise(5, rule, 40)
    found = guess_outcomes(logits(), HOT, noise, DRAFTED, 5)
    np.testing.assert_allclose(np.exp(-found.evidence), list(noise.accept_uniforms(K)))


def test_greedy_guesses_are_the_likeliest_tokens() -> None:
    params, noise = SamplingParams(temperature=0.0), RoundNoise(5, Rule.GREEDY, 40)
    ranked = guess_outcomes(logits(), params, noise, DRAFTED, 3).corrections
    for n, row in enumerate(logits().tolist()):
        order = sorted(range(V), key=lambda v: -row[v])
        assert ranked[n] == [v for v in order if n == K or v != DRAFTED[n]][:3]


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
def test_a_draft_that_is_the_target_guesses_right_at_once(rule: Rule) -> None:
    """The bonus under both rules, and under coupled every correction: they are the same race."""
    for seed in range(20):
        noise = RoundNoise(seed, rule, 12)
        one_hot = Proposal(DRAFTED, (None,) * K if rule.needs_q else ())
        verdict = verdict_from_logits(logits(seed), HOT, NO_HISTORY, one_hot, noise)
        ranked = guess_outcomes(logits(seed), HOT, noise, DRAFTED, 1).corrections
        assert ranked[K][0] == verdict.correction[K]
        if rule is Rule.COUPLED:
            for n in range(K):
                assert verdict.correction[n] in (DRAFTED[n], ranked[n][0])


def test_a_reduced_vocabulary_is_guessed_in_the_targets_ids() -> None:
    ids = np.arange(5, 5 + 2 * V, 2)
    vocabulary = DraftVocabulary(ids)
    wide = torch.full((K + 1, 200), -torch.inf)
    wide[:, torch.from_numpy(ids)] = logits()
    for rule in (Rule.TOKEN, Rule.COUPLED, Rule.GREEDY):
        params = SamplingParams(temperature=0.0) if rule is Rule.GREEDY else HOT
        noise = RoundNoise(5, rule, 40)
        narrow = guess_outcomes(logits(), params, noise, DRAFTED, 4, vocabulary)
        full = guess_outcomes(wide, params, noise, DRAFTED, 4)
        assert narrow.corrections == full.corrections
        np.testing.assert_allclose(narrow.scores, full.scores)
        np.testing.assert_allclose(narrow.evidence, full.evidence)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
def test_rows_that_were_seen_need_not_be_run_again(rule: Rule) -> None:
    """Refusals by them alone, and then the bonus by its own row, are what all rows give."""
    noise = RoundNoise(5, rule, 40)
    whole = guess_outcomes(logits(), HOT, noise, DRAFTED, 5)
    rows = likely_tokens(logits(), HOT)
    seen = [rows.row(index) for index in range(K)]
    refusals = guess_outcomes(None, HOT, noise, DRAFTED, 5, seen=seen)
    assert refusals.corrections == whole.corrections[:K]
    assert refusals.rank(K, whole.corrections[K][0]) is None
    for found in (
        with_bonus(refusals, logits()[K:], HOT, noise, 5),
        guess_outcomes(logits()[K:], HOT, noise, DRAFTED, 5, seen=seen),
    ):
        assert found.corrections == whole.corrections
        np.testing.assert_allclose(found.scores, whole.scores)
        np.testing.assert_allclose(found.evidence, whole.evidence)
    assert whole.rank(K, whole.corrections[K][2]) == 2
