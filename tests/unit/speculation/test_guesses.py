"""Guesses of corrections: the order in which the round's own race would let them win."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.speculation.guesses import ranked_corrections
from outrider.speculation.noise import RoundNoise, uniforms
from outrider.speculation.proposal import Proposal
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.transforms import NO_HISTORY, target_probabilities
from outrider.speculation.verdicts import verdict_from_logits

V, K = 50, 3
DRAFTED = (7, 3, 11)
HOT = SamplingParams(temperature=1.0)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(K + 1, V, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
@pytest.mark.parametrize("params", [HOT, SamplingParams(temperature=0.7, top_k=20)])
def test_the_order_is_by_log_q_and_the_rounds_noise(rule: Rule, params: SamplingParams) -> None:
    noise = RoundNoise(5, rule, 40)
    ranked = ranked_corrections(logits(), params, noise, DRAFTED, 5)
    q = target_probabilities(logits(), params, NO_HISTORY).numpy()
    for n in range(K + 1):
        stream = noise.draft_stream.TARGET if n == K else noise.residual_stream
        numbers = uniforms(noise.seed, [noise.place(n)], stream, V)[0].numpy()
        with np.errstate(divide="ignore"):
            scores = np.log(q[n]) - np.log(-np.log(numbers))
        if n < K:
            scores[DRAFTED[n]] = -np.inf
        expected = [int(v) for v in np.argsort(-scores) if scores[v] > -np.inf][:5]
        assert ranked[n] == expected


def test_greedy_guesses_are_the_likeliest_tokens() -> None:
    ranked = ranked_corrections(
        logits(), SamplingParams(temperature=0.0), RoundNoise(5, Rule.GREEDY, 40), DRAFTED, 3
    )
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
        ranked = ranked_corrections(logits(seed), HOT, noise, DRAFTED, 1)
        assert ranked[K][0] == verdict.correction[K]
        if rule is Rule.COUPLED:
            for n in range(K):
                assert verdict.correction[n] in (DRAFTED[n], ranked[n][0])


def test_a_reduced_vocabulary_is_guessed_in_the_targets_ids() -> None:
    ids = np.arange(5, 5 + 2 * V, 2)
    vocabulary = ReducedVocabulary(ids)
    wide = torch.full((K + 1, 200), -torch.inf)
    wide[:, torch.from_numpy(ids)] = logits()
    for rule in (Rule.TOKEN, Rule.COUPLED, Rule.GREEDY):
        params = SamplingParams(temperature=0.0) if rule is Rule.GREEDY else HOT
        noise = RoundNoise(5, rule, 40)
        narrow = ranked_corrections(logits(), params, noise, DRAFTED, 4, vocabulary)
        assert narrow == ranked_corrections(wide, params, noise, DRAFTED, 4)
