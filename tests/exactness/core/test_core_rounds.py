"""Several rounds of every rule by the product's draws, noise, verdicts and decisions, against the
target's own law. A controller may read all that a round has shown.

A test rejects an exact rule with probability <= 1e-6, and finds a total variation of 0.05 (in
`make test-full` 0.02) with probability 0.99. It rejects faults of real implementations, planted
here."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider.speculation.accept_reject import Outcome, Verdict, decide
from outrider.speculation.draft_sampling import DraftedToken, draw_from_logits
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise, Stream
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams
from outrider.speculation.verification import VerifyInput, verdicts_from_logits
from tests.exactness.law import cells_of, chi_square
from tests.support.core_toys import RATIO_RULES, ToyPair, random_pair, sampling_pair
from tests.support.verdict_laws import ABSOLUTE_PLACES

PROMPT_LENGTH = 5
NUM_SEQUENCES = 12_000
NUM_TOKENS = 3
Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """What a controller may read of a round."""

    verdict: Verdict
    outcome: Outcome
    token_ids: tuple[int, ...]
    uniforms: tuple[float, ...]


Plan = tuple[int, int]
"""The number of draft tokens, and the drafter."""
Controller = Callable[[Seen | None], Plan]


def drafts(num_draft_tokens: int) -> Controller:
    """A controller that plans the same for every round."""
    return lambda seen: (num_draft_tokens, 0)


def reads_everything(seen: Seen | None) -> Plan:
    """Tries to keep a good slot that was discarded: its uniform, token, acceptance and correction
    choose K and the drafter of the next round."""
    if seen is None or (slot := seen.outcome.num_accepted + 1) >= len(seen.token_ids):
        return 3, 0
    token_id, accept = seen.token_ids[slot], seen.verdict.accept_probability[slot]
    is_wanted = token_id == seen.verdict.correction[slot] and accept >= 0.7
    return (3 if seen.uniforms[slot] < 0.5 else 0) ^ is_wanted, int(token_id == 2)


def grows_after_weak_slots(seen: Seen | None) -> Plan:
    """Many draft tokens after a round whose last slot was weak."""
    if seen is None:
        return 2, 0
    return (3 if seen.verdict.accept_probability[-1] < 0.5 else 1), 0


class Sequences:
    """Sequences of one rule, a seed each, that are decoded side by side."""

    def __init__(self, pair: ToyPair, rule: Rule, num: int) -> None:
        self._pair, self._rule = pair, rule
        self._params = SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0)
        self._step = pair.step.tolist()
        self._states = [0] * num
        self._seen: list[Seen | None] = [None] * num
        self.tokens: list[list[int]] = [[] for _ in range(num)]

    def decode(
        self, controller: Controller, num_tokens: int, rows: Logits = lambda p: p
    ) -> np.ndarray:
        """The first tokens [N, num_tokens]. `rows` is applied to the target's logits."""
        while running := [n for n, ids in enumerate(self.tokens) if len(ids) < num_tokens]:
            plans: dict[Plan, list[int]] = defaultdict(list)
            for number in running:
                plans[controller(self._seen[number])].append(number)
            for plan, numbers in plans.items():
                self._round(plan, numbers, rows)
        return np.array([ids[:num_tokens] for ids in self.tokens])

    def _round(self, plan: Plan, numbers: Sequence[int], rows: Logits) -> None:
        noises = [
            RoundNoise(number, self._rule, PROMPT_LENGTH + len(self.tokens[number]))
            for number in numbers
        ]
        proposals = self._drafted(plan, numbers, noises)
        visited, inputs = [], []
        for number, noise, proposal in zip(numbers, noises, proposals, strict=True):
            states = [self._states[number]]
            for token_id in proposal.token_ids:
                states.append(self._step[states[-1]][token_id])
            visited.append(states)
            logits = rows(self._pair.p[states].log())
            inputs.append(VerifyInput(logits, self._params, NO_HISTORY, proposal, noise))
        for number, states, verify_input, verdict in zip(
            numbers, visited, inputs, verdicts_from_logits(inputs), strict=True
        ):
            ids = verify_input.proposal.token_ids
            uniforms = tuple(verify_input.noise.accept_uniforms(len(ids)))
            outcome = decide(verdict, ids, self._rule, uniforms)
            self._seen[number] = Seen(verdict, outcome, ids, uniforms)
            self._states[number] = self._step[states[outcome.num_accepted]][outcome.token_ids[-1]]
            self.tokens[number] += outcome.token_ids

    def _drafted(
        self, plan: Plan, numbers: Sequence[int], noises: Sequence[RoundNoise]
    ) -> list[Proposal]:
        num_draft_tokens, drafter = plan
        states = [self._states[number] for number in numbers]
        drafted: list[list[DraftedToken]] = [[] for _ in numbers]
        for index in range(num_draft_tokens):
            logits = self._pair.q[drafter][states].log()
            params, indices = [self._params] * len(numbers), [index] * len(numbers)
            drawn, _ = draw_from_logits(logits, params, noises, indices)
            for own, token in zip(drafted, drawn, strict=True):
                own.append(token)
            pairs = zip(states, drawn, strict=True)
            states = [self._step[state][token_id] for state, (token_id, _) in pairs]
        found = []
        for own in drafted:
            q = tuple(q for _, q in own) if self._rule.needs_q else ()
            found.append(Proposal(tuple(token_id for token_id, _ in own), q))
        return found


@pytest.fixture(scope="module")
def pair() -> ToyPair:
    return sampling_pair()


@pytest.mark.parametrize(
    ("distance", "num"), [(0.05, NUM_SEQUENCES), pytest.param(0.02, 75_000, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("rule", "controller"),
    [
        (Rule.TOKEN, drafts(3)),
        (Rule.TOKEN, reads_everything),
        (Rule.TOKEN, grows_after_weak_slots),
        (Rule.BLOCK, drafts(3)),
        (Rule.BLOCK, reads_everything),
        (Rule.COUPLED, reads_everything),
    ],
)
def test_sequences_have_the_targets_law(pair, rule, controller, distance, num):
    tokens = Sequences(pair, rule, num).decode(controller, NUM_TOKENS)
    result = chi_square(cells_of(tokens, 3), pair.law(NUM_TOKENS))
    assert result.power(distance) > 0.99
    assert not result.rejects, result


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY])
def test_own_tokens_do_not_depend_on_what_is_drafted(pair, rule):
    plain = Sequences(pair, rule, 500).decode(drafts(0), 6)
    for controller in (drafts(1), drafts(2), drafts(3), reads_everything):
        assert np.array_equal(Sequences(pair, rule, 500).decode(controller, 6), plain)


UNEVEN = random_pair(3, 4)
"""With this pair most planted faults show more."""


def check_rejected(
    pair: ToyPair, rule: Rule, controller: Controller, rows: Logits = lambda p: p
) -> None:
    tokens = Sequences(pair, rule, 4_000).decode(controller, NUM_TOKENS, rows)
    assert chi_square(cells_of(tokens, 3), pair.law(NUM_TOKENS)).rejects


def last_row_twice(rows: torch.Tensor) -> torch.Tensor:
    """Draws the bonus from p of the last draft token."""
    return torch.cat([rows[:-1], rows[-2:-1]]) if len(rows) > 1 else rows


@pytest.mark.parametrize(
    ("pair", "faults"),
    [
        (sampling_pair(), {"residual_stream": Stream.DRAFT}),
        (UNEVEN, ABSOLUTE_PLACES),
        (UNEVEN, {"accept_uniforms": lambda noise, num: [1e-12] * num}),
    ],
    ids=["shared noise", "absolute places", "u = 0"],
)
def test_wrong_noise_is_found(pair, faults, monkeypatch):
    """A token after a rejection has the noise of the rejected token, discarded places lend theirs
    to the next round, or every token is accepted."""
    for name, value in faults.items():
        monkeypatch.setattr(RoundNoise, name, value)
    check_rejected(pair, Rule.BLOCK, drafts(3))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_bonus_from_another_row_is_found(rule):
    check_rejected(UNEVEN, rule, drafts(1), last_row_twice)
