"""Several rounds of every rule by the product's draws, noise, verdicts and decisions, of chains and
trees, against the target's own law. A controller may read all that a round has shown.

A test rejects an exact rule with probability <= 1e-6, and finds a total variation of 0.05 (in
`make test-full` 0.02) with probability 0.99. It rejects faults of real implementations, planted
here."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from core_toys import ToyPair, flat_pair, random_pair, sampling_pair
from exactness.law import cells_of, chi_square, power
from verdict_laws import ABSOLUTE_PLACES

from outrider.speculation import random_streams
from outrider.speculation.accept_reject import Outcome, Verdict, decide
from outrider.speculation.draft_sampling import draw_siblings
from outrider.speculation.logits_processing import NO_HISTORY
from outrider.speculation.proposal import Proposal, caterpillar_tree, draft_tree
from outrider.speculation.random_streams import RoundNoise, Stream
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.verification import Question, verdicts_from_logits

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


Plan = tuple[tuple[int, ...], int]
"""Siblings beside each draft token, and the drafter."""
Controller = Callable[[Seen | None], Plan]


def drafts(*siblings: int) -> Controller:
    """A controller that plans the same for every round."""
    return lambda seen: (siblings, 0)


def reads_everything(seen: Seen | None) -> Plan:
    """Tries to keep a good slot that was discarded: its uniform, token, acceptance and correction
    choose K and the drafter of the next round."""
    if seen is None or (slot := seen.outcome.num_accepted + 1) >= len(seen.token_ids):
        return (0, 0, 0), 0
    token_id, accept = seen.token_ids[slot], seen.verdict.accept_probability[slot]
    is_wanted = token_id == seen.verdict.correction[slot] and accept >= 0.7
    num = (3 if seen.uniforms[slot] < 0.5 else 0) ^ is_wanted
    return (0,) * num, int(token_id == 2)


def grows_after_weak_slots(seen: Seen | None) -> Plan:
    """A large tree after a round whose last slot was weak."""
    if seen is None or not seen.verdict.accept_probability:
        return (1, 1), 0
    return ((2, 1) if seen.verdict.accept_probability[-1] < 0.5 else (0, 1)), 0


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
        visited, questions = [], []
        for number, noise, proposal in zip(numbers, noises, proposals, strict=True):
            states = [self._states[number]]
            for parent, token_id in zip(proposal.tree.parents, proposal.token_ids, strict=True):
                states.append(self._step[states[parent + 1]][token_id])
            visited.append(states)
            logits = rows(self._pair.p[states].log())
            questions.append(Question(logits, self._params, NO_HISTORY, proposal, noise))
        for number, states, question, verdict in zip(
            numbers, visited, questions, verdicts_from_logits(questions), strict=True
        ):
            ids, parents = question.proposal.token_ids, question.proposal.parents
            uniforms = tuple(question.noise.accept_uniforms(len(ids), parents))
            outcome = decide(verdict, ids, self._rule, uniforms, parents)
            self._seen[number] = Seen(verdict, outcome, ids, uniforms)
            self._states[number] = self._step[states[outcome.last]][outcome.token_ids[-1]]
            self.tokens[number] += outcome.token_ids

    def _drafted(
        self, plan: Plan, numbers: Sequence[int], noises: Sequence[RoundNoise]
    ) -> list[Proposal]:
        siblings, drafter = plan
        states, num = [self._states[number] for number in numbers], len(numbers)
        depths = []
        for depth, others in enumerate(siblings):
            logits = self._pair.q[drafter][states].log()
            counts = [1 + others] * num
            groups = draw_siblings(logits, self._params, noises, [depth] * num, counts)
            states = [
                self._step[state][ids[0]] for state, (ids, _) in zip(states, groups, strict=True)
            ]
            depths.append(groups)
        found = []
        for groups in zip(*depths, strict=True) if depths else [()] * num:
            parents = caterpillar_tree([len(ids) - 1 for ids, _ in groups])
            ids = tuple(token_id for group, _ in groups for token_id in group)
            q = tuple(q for _, q in groups) if self._rule.needs_q else ()
            found.append(Proposal(ids, q, parents))
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
        (Rule.TOKEN, drafts(0, 0, 0)),
        (Rule.TOKEN, reads_everything),
        (Rule.TOKEN, drafts(1, 1)),
        (Rule.TOKEN, grows_after_weak_slots),
        (Rule.BLOCK, drafts(0, 0, 0)),
        (Rule.BLOCK, reads_everything),
        (Rule.COUPLED, reads_everything),
    ],
)
def test_sequences_have_the_targets_law(pair, rule, controller, distance, num):
    tokens = Sequences(pair, rule, num).decode(controller, NUM_TOKENS)
    result = chi_square(cells_of(tokens, 3), pair.law(NUM_TOKENS))
    assert power(distance, num, result.degrees) > 0.99
    assert not result.rejects, result


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY])
def test_own_tokens_do_not_depend_on_what_is_drafted(pair, rule):
    plain = Sequences(pair, rule, 500).decode(drafts(), 6)
    for controller in (
        drafts(0, 0, 0), drafts(1), drafts(2, 1), drafts(1, 1, 2), reads_everything,
    ):  # fmt: skip
        assert np.array_equal(Sequences(pair, rule, 500).decode(controller, 6), plain)


UNEVEN = random_pair(3, 4)
"""With this pair most planted faults show more."""


def check_rejected(
    pair: ToyPair, rule: Rule, controller: Controller, rows: Logits = lambda p: p,
    num: int = 4_000,
) -> None:  # fmt: skip
    tokens = Sequences(pair, rule, num).decode(controller, NUM_TOKENS, rows)
    assert chi_square(cells_of(tokens, 3), pair.law(NUM_TOKENS)).rejects


def last_row_twice(rows: torch.Tensor) -> torch.Tensor:
    """Draws the bonus from p of the last draft token."""
    return torch.cat([rows[:-1], rows[-2:-1]]) if len(rows) > 1 else rows


@pytest.mark.parametrize(
    ("pair", "faults"),
    [
        (sampling_pair(), {"residual_stream": Stream.DRAFT}),
        (UNEVEN, ABSOLUTE_PLACES),
        (UNEVEN, {"accept_uniforms": lambda *given: [1e-12] * given[1]}),
    ],
    ids=["shared noise", "absolute places", "u = 0"],
)
def test_wrong_noise_is_found(pair, faults, monkeypatch):
    """A token after a rejection has the noise of the rejected token, discarded places lend theirs
    to the next round, or every token is accepted."""
    for name, value in faults.items():
        monkeypatch.setattr(RoundNoise, name, value)
    check_rejected(pair, Rule.BLOCK, drafts(0, 0, 0))


def test_a_bonus_from_another_row_is_found():
    check_rejected(UNEVEN, Rule.BLOCK, drafts(0), last_row_twice)


def test_siblings_that_share_their_noise_are_found(monkeypatch):
    def shared(parents, num_tokens):
        return replace(draft_tree(parents, num_tokens), ranks=(0,) * num_tokens)

    monkeypatch.setattr(random_streams, "draft_tree", shared)
    places = random_streams._places_in_one.__wrapped__
    monkeypatch.setattr(random_streams, "_places_in_one", places)
    pair = flat_pair([0.2, 0.6, 0.2], [0.8, 0.1, 0.1])
    check_rejected(pair, Rule.TOKEN, drafts(1, 1), num=2_000)  # Without a cache it is slow.
