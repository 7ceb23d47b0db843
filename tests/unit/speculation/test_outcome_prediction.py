"""Predicted corrections, in the order of the round's own race."""

import math
import random

import numpy as np
import pytest
import torch

from outrider.limits import LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.speculation.draft_sampling import LikelyTokens, likely_tokens
from outrider.speculation.gumbel_max import scores as scores_of
from outrider.speculation.logits_processing import DraftVocabulary, target_probabilities
from outrider.speculation.outcome_prediction import (
    EVIDENCE_MAX,
    RANKS_MAX,
    OutcomeGuesses,
    OutcomeModel,
    OutcomeModels,
    guess_outcomes,
)
from outrider.speculation.random_streams import RoundNoise, Stream
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams
from tests.support.verdict_laws import row_keys

V, K = 50, 3
DRAFTED = (7, 3, 11)
HOT = SamplingParams(temperature=1.0)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(K + 1, V, generator=torch.Generator().manual_seed(seed)) * 2


def likely(
    rows: torch.Tensor, params: SamplingParams, vocabulary: DraftVocabulary | None = None
) -> LikelyTokens:
    return likely_tokens(rows, [params] * len(rows), vocabulary)


def waits(noise: RoundNoise, index: int, stream: Stream) -> np.ndarray:
    """The waits of the tokens at one position."""
    keys = row_keys(noise.seed, [noise.place(index)], [stream])
    return 1 / scores_of(np.ones((1, V)), np.arange(V)[None], keys)[0]


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
@pytest.mark.parametrize("params", [HOT, SamplingParams(temperature=0.7, top_k=20)])
def test_the_order_is_by_log_q_and_the_rounds_noise(rule: Rule, params: SamplingParams) -> None:
    noise = RoundNoise(5, rule, 40)
    found = guess_outcomes(likely(logits(), params), params, noise, DRAFTED)
    q = target_probabilities(logits(), params, NO_HISTORY).numpy()
    for n in range(K + 1):
        stream = noise.draft_stream.TARGET if n == K else noise.residual_stream
        with np.errstate(divide="ignore"):
            scores = np.log(q[n]) - np.log(waits(noise, n, stream))
        if n < K:
            scores[DRAFTED[n]] = -np.inf
        expected = [int(v) for v in np.argsort(-scores) if scores[v] > -np.inf][:RANKS_MAX]
        assert found.corrections[n] == expected
        falls = scores[expected] - scores[expected[0]]
        np.testing.assert_allclose(found.scores[n] - found.scores[n, 0], falls, atol=1e-5)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY])
def test_what_won_by_much_is_likely_to_win_again(rule: Rule) -> None:
    """The evidence is the lead over the next score. A token that is not among the likeliest has the
    lowest evidence."""
    params = SamplingParams(temperature=0.0) if rule is Rule.GREEDY else HOT
    noise = RoundNoise(5, rule, 40)
    scores = []
    for n, row in enumerate(logits()[:K].double().numpy()):
        late = np.log(waits(noise, n, noise.residual_stream))
        scores.append(row if rule is Rule.GREEDY else row - late)
    order = [np.argsort(-row) for row in scores]
    drafted = (int(order[0][0]), int(order[1][2]), int(order[2][-1]))
    found = guess_outcomes(likely(logits(), params), params, noise, drafted)
    first = scores[0][order[0][0]] - scores[0][order[0][1]]
    second = scores[1][order[1][2]] - scores[1][order[1][0]]
    np.testing.assert_allclose(found.evidence, [first, second, -EVIDENCE_MAX], atol=1e-4)


def test_greedy_guesses_are_the_likeliest_tokens() -> None:
    params, noise = SamplingParams(temperature=0.0), RoundNoise(5, Rule.GREEDY, 40)
    ranked = guess_outcomes(likely(logits(), params), params, noise, DRAFTED).corrections
    for n, row in enumerate(logits().tolist()):
        order = sorted(range(V), key=lambda v: -row[v])
        assert ranked[n] == [v for v in order if n == K or v != DRAFTED[n]][:RANKS_MAX]


def test_a_reduced_vocabulary_is_guessed_in_the_targets_ids() -> None:
    ids = np.arange(5, 5 + 2 * V, 2)
    vocabulary = DraftVocabulary(ids)
    wide = torch.full((K + 1, 200), -torch.inf)
    wide[:, torch.from_numpy(ids)] = logits()
    for rule in (Rule.TOKEN, Rule.COUPLED, Rule.GREEDY):
        params = SamplingParams(temperature=0.0) if rule is Rule.GREEDY else HOT
        noise = RoundNoise(5, rule, 40)
        narrow = guess_outcomes(likely(logits(), params, vocabulary), params, noise, DRAFTED)
        full = guess_outcomes(likely(wide, params), params, noise, DRAFTED)
        assert narrow.corrections == full.corrections
        np.testing.assert_allclose(narrow.scores, full.scores)
        np.testing.assert_allclose(narrow.evidence, full.evidence)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
def test_rows_that_were_seen_need_not_be_run_again(rule: Rule) -> None:
    noise = RoundNoise(5, rule, 40)
    whole = guess_outcomes(likely(logits(), HOT), HOT, noise, DRAFTED)
    *seen, bonus = likely(logits(), HOT).split([1] * (K + 1))
    refusals = guess_outcomes(LikelyTokens.joined(seen), HOT, noise, DRAFTED)
    assert refusals.corrections == whole.corrections[:K]
    assert refusals.rank(K, whole.corrections[K][0]) is None
    found = guess_outcomes(LikelyTokens.joined([*seen, bonus]), HOT, noise, DRAFTED)
    assert found.corrections == whole.corrections
    np.testing.assert_allclose(found.scores, whole.scores)
    np.testing.assert_allclose(found.evidence, whole.evidence)
    assert whole.rank(K, whole.corrections[K][2]) == 2


SCORES = [5.0, 4.0, 2.0, 1.0]


def guesses(evidence: list[float], scores: list[float] = SCORES) -> OutcomeGuesses:
    rows = np.array([scores] * (len(evidence) + 1))
    corrections = [list(range(len(scores)))] * len(rows)
    return OutcomeGuesses(corrections, rows, np.array(evidence))


def learned(weight: float, offset: float, sharpness: float) -> OutcomeModel:
    """A model after rounds drawn with these coefficients."""
    draw = random.Random(3)
    fan_out = OutcomeModel()
    shares = [math.exp(sharpness * score) for score in SCORES]
    for _ in range(3000):
        seen = guesses([draw.uniform(0, 3) for _ in range(4)])
        accepted = 0
        while accepted < 4 and draw.random() < chance(weight * seen.evidence[accepted] + offset):
            accepted += 1
        fan_out.note(seen, accepted, draw.choices(range(4), shares)[0])
    return fan_out


def chance(total: float) -> float:
    return 1 / (1 + math.exp(-total))


@pytest.mark.parametrize(
    ("weight", "offset", "sharpness"), [(2.0, -0.5, 1.5), (0.3, 1.0, 3.0), (1.0, 0.0, 0.5)]
)
def test_chances_are_those_of_the_law_that_rounds_follow(
    weight: float, offset: float, sharpness: float
) -> None:
    fan_out = learned(weight, offset, sharpness)
    seen = guesses([0.5, 2.5, 1.0, 1.5])
    plan = fan_out.plan(seen, LOOK_AHEAD_MAX)
    found = {(guess.num_accepted, guess.rank): guess.chance for guess in plan}
    shares = np.exp(sharpness * np.array(SCORES))
    shares /= shares.sum()
    reached = 1.0
    for depth, evidence in enumerate([*seen.evidence, math.inf]):
        passes = chance(weight * evidence + offset) if depth < 4 else 0.0
        for rank, share in enumerate(shares):
            expected = reached * (1 - passes) * share
            assert found[depth, rank] == pytest.approx(expected, abs=0.07)
        reached *= passes


@pytest.mark.parametrize("num_drafted", [0, 1, 5, NUM_DRAFT_TOKENS_MAX])
@pytest.mark.parametrize("num_guesses", [1, 12, LOOK_AHEAD_MAX, 1000])
def test_a_plan_has_the_likeliest_outcomes_once_each(num_drafted: int, num_guesses: int) -> None:
    seen = guesses([1.0] * num_drafted, [1.0 - 0.1 * rank for rank in range(RANKS_MAX)])
    plan = OutcomeModel().plan(seen, num_guesses)
    possible = (num_drafted + 1) * RANKS_MAX
    assert len(plan) == min(num_guesses, LOOK_AHEAD_MAX, possible)
    places = {(guess.num_accepted, guess.rank) for guess in plan}
    assert len(places) == len(plan)
    assert all(0 <= n <= num_drafted and 0 <= rank < RANKS_MAX for n, rank in places)
    chances = [guess.chance for guess in plan]
    assert chances == sorted(chances, reverse=True)
    whole = OutcomeModel().plan(seen, LOOK_AHEAD_MAX)
    assert plan == whole[: len(plan)]
    assert sum(chances) <= 1 + 1e-9
    # A correction's guesses are planned in order.
    assert all((n, rank - 1) in places for n, rank in places if rank > 0)


def test_what_is_not_a_guess_is_not_planned() -> None:
    """Some rows have fewer guesses than others or none, and evidence is extreme."""
    rows = np.array([[3.0, -np.inf], [-np.inf, -np.inf], [2.0, 1.0]])
    seen = OutcomeGuesses([[7], [], [8, 9]], rows, np.array([-16.0, 16.0]))
    fan_out = OutcomeModel()
    for _ in range(50):
        fan_out.note(seen, 0, 0)
        fan_out.note(seen, 1, None)
    plan = fan_out.plan(seen, LOOK_AHEAD_MAX)
    assert {(guess.num_accepted, guess.rank) for guess in plan} == {(0, 0), (2, 0), (2, 1)}
    assert all(0 < guess.chance <= 1 for guess in plan)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_session_with_a_seed_that_another_had_learns_alone(rule: Rule) -> None:
    """A second session with a seed has the noise that decided the first one's outcomes."""
    known = OutcomeModels()
    shared = known.of("a", 1, 1, rule, 1.0)
    alone = known.of("b", 1, 1, rule, 1.0)
    assert alone is not shared
    assert known.of("b", 1, 1, rule, 1.0) is alone
    assert known.of("a", 1, 1, rule, 1.04) is known.of("c", 1, 2, rule, 1.0) is shared
    assert known.of("c", 1, 2, rule, 0.5) is not shared
    # A session that was taken over may repeat rounds whose outcomes its models have learned.
    resumed = known.of("a", 2, 1, rule, 1.0)
    assert resumed is known.of("a", 2, 1, rule, 1.0)
    assert known.of("a", 3, 1, rule, 1.0) not in (shared, alone, resumed)
    known.forget("a")
    known.forget("b")
    assert known.of("b", 1, 1, rule, 1.0) not in (alone, shared)


def test_forgotten_seeds_take_what_was_learned_along() -> None:
    known = OutcomeModels(seeds_max=2)
    shared, coupled = known.of("a", 1, 1, Rule.TOKEN, 1.0), known.of("a", 1, 1, Rule.COUPLED, 1.0)
    assert known.of("b", 1, 2, Rule.TOKEN, 1.0) is shared
    assert known.of("c", 1, 3, Rule.TOKEN, 1.0) is not shared
    assert known.of("d", 1, 1, Rule.TOKEN, 1.0) is known.of("c", 1, 3, Rule.TOKEN, 1.0)
    assert known.of("a", 1, 1, Rule.COUPLED, 1.0) is coupled
