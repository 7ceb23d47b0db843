"""Laws under the coordinator's own choice of lengths where it could read numbers of the round that
it chooses for: those of another session with the same seed, and those of a proposal that was drawn
before the round began. Each test passes with the product and rejects a planted fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_lengths import ENDLESS, NERVOUS, ChosenLate
from core_rounds import K_MAX, PROMPT_LENGTH, ChiSquare, accepted_of, chi_square, power, seeds_of
from core_toys import flat_pair
from verdict_laws import NoiseRows, draft_rows, score_rows

from coordinator.draft_length.controller import LengthControl, LengthControls
from coordinator.draft_length.policy import PlayedRound
from outrider.engine.step_costs import StepCosts
from outrider.messages import ReplicaDescription
from outrider.speculation.accept_reject import survival
from outrider.speculation.draft_sampling import count_levels, draw_quantised
from outrider.speculation.sampling_params import Rule

PAIR = flat_pair([0.2, 0.3, 0.5], [0.6, 0.3, 0.1])
TARGET_S, DRAFT_S = 1.0, 0.6
"""With these, drafting pays where more than 0.6 of the draft tokens are accepted."""
TUNING = replace(NERVOUS, plain_rounds=4, plain_rounds_max=4)
NUM_SEEDS = 700
SLOW = 0
"""A draft takes long where this is the first token that it draws ..."""
STALL_S = 4.0
"""... by so much."""
RATIO_RULES = [Rule.TOKEN, Rule.BLOCK]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class FirstRound:
    """The round behind the prompt of one session for each seed, for every K."""

    def __init__(self, rule: Rule, seeds: np.ndarray) -> None:
        begun_at = np.full(len(seeds), PROMPT_LENGTH, dtype=np.uint64)
        noise = NoiseRows(seeds, rule, begun_at)
        mass = PAIR.mass[0, 0].expand(len(seeds), K_MAX, -1)
        every = torch.arange(3).expand(len(seeds), -1)
        depths = [np.full(len(seeds), i, dtype=np.uint64) for i in range(K_MAX)]
        drafted = [
            torch.from_numpy(
                draw_quantised(
                    every.numpy(), count_levels(mass[:, i].numpy()), noise.draft_keys(depths[i])
                )
            )
            for i in range(K_MAX)
        ]
        self.drafted = drafted[0].tolist()
        self.accept: list[list[list[float]]] = []
        self.num_tokens: list[list[int]] = []
        self.first_token: list[list[int]] = []
        for k in range(K_MAX + 1):
            tokens = torch.stack(drafted[:k], dim=1) if k else torch.zeros(len(seeds), 0).long()
            rows = draft_rows(tokens, every[:, None].expand(-1, k, -1), mass[:, :k])
            accept, correction = score_rows(PAIR.p[0].expand(len(seeds), k + 1, -1), rows, noise)
            accepted = accepted_of(rule, noise.accept_uniforms(k) <= accept)
            first = torch.where(accepted > 0, drafted[0], correction[:, 0])
            self.accept.append(accept.tolist())
            self.num_tokens.append((accepted + 1).tolist())
            self.first_token.append(first.tolist())


def made() -> LengthControls:
    target, draft = (
        ReplicaDescription("m", "", "", 3, "float64", 0, (), 64, costs)
        for costs in (StepCosts((1, 8), (TARGET_S, TARGET_S)), StepCosts((1,), (DRAFT_S,)))
    )
    return LengthControls(target, draft, 2, TUNING)


def begin(controls: LengthControls, rule: Rule, seed: int) -> LengthControl:
    """A session behind its first round, which runs the prompt."""
    session = controls.open(rule, seed, K_MAX, PROMPT_LENGTH)
    session.choose(0, ENDLESS)
    session.note(PlayedRound(0, (), 1, PROMPT_LENGTH, 0.0, TARGET_S, 0.0))
    return session


def second_sessions(rule: Rule) -> ChiSquare:
    """The first token of a session whose seed another one had before, at one coordinator."""
    seeds = seeds_of(NUM_SEEDS, test_seed=21)
    rounds = FirstRound(rule, seeds)
    tokens = []
    for row, seed in enumerate(seeds.tolist()):
        controls = made()
        first = begin(controls, rule, seed)
        k = first.choose(1, ENDLESS).num_draft_tokens
        told = survival(rule, rounds.accept[k][row])
        num_tokens, draft_s = rounds.num_tokens[k][row], DRAFT_S * k
        first.note(
            PlayedRound(k, told, num_tokens, PROMPT_LENGTH, draft_s, TARGET_S, TARGET_S + draft_s)
        )
        first.close()
        k = begin(controls, rule, seed).choose(1, ENDLESS).num_draft_tokens
        tokens.append(rounds.first_token[k][row])
    return chi_square(np.array(tokens), PAIR.law(1))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_second_session_with_a_seed_has_the_law(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """False alarm 1e-6. Where seeds are not looked at, the second session drafts if the first one's
    draft tokens were accepted, which are its own: found."""
    assert not second_sessions(rule).rejects
    monkeypatch.setattr(LengthControls, "_knows", lambda self, seed: False)
    assert second_sessions(rule).rejects


def behind_slow_drafts(rule: Rule) -> ChiSquare:
    """The first token of a round whose proposal is drawn while the round before runs: the time of
    that round tells a draft token."""
    seeds = seeds_of(NUM_SEEDS, test_seed=22)
    rounds = FirstRound(rule, seeds)
    tokens = []
    for row, seed in enumerate(seeds.tolist()):
        session, now = begin(made(), rule, seed), 0.0
        for index in (1, 2, 3):
            k = session.choose(index, ENDLESS).num_draft_tokens
            stalls = index == 3 and rounds.drafted[row] == SLOW
            stall_s = STALL_S if stalls else 0.0
            now += TARGET_S + DRAFT_S * k + stall_s
            told = tuple(0.8 ** (n + 1) for n in range(k))
            session.note(PlayedRound(k, told, 1 + k, PROMPT_LENGTH, DRAFT_S * k, TARGET_S, now))
        k = session.choose(4, ENDLESS).num_draft_tokens
        tokens.append(rounds.first_token[k][row])
    return chi_square(np.array(tokens), PAIR.law(1))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_times_that_tell_of_the_next_proposal_leave_the_law(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """False alarm 1e-6. A length that is chosen when those times are known is found."""
    assert not behind_slow_drafts(rule).rejects
    monkeypatch.setattr("coordinator.draft_length.controller.LengthControl", ChosenLate)
    assert behind_slow_drafts(rule).rejects


def test_power() -> None:
    """What is found with probability 0.99."""
    assert power(0.18, NUM_SEEDS, degrees=2) > 0.99
