"""Trees of draft tokens: the law of one round by enumeration; several: `test_core_rounds.py`."""

import itertools

import numpy as np
import pytest
import torch
from core_toys import EXACT, ToyPair, random_pair
from verdict_laws import tree_law

from outrider.speculation.accept_reject import Origin, Verdict, decide
from outrider.speculation.draft_sampling import draw_from_logits, draw_siblings
from outrider.speculation.proposal import (
    COUNT_TOTAL,
    DraftDistribution,
    DraftTree,
    Proposal,
    caterpillar_tree,
    draft_tree,
)
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

SHAPES = {
    "caterpillar": caterpillar_tree((2, 1)),
    "two of two": (-1, -1, 0, 0, 1, 1),
    "behind the second": (-1, -1, 1, 1),
    "three at once": (-1, -1, -1),
    "not by depth": (-1, 0, -1, 2, 0),
}


def entry(pair: ToyPair, state: int) -> DraftDistribution | None:
    """q of a state as it is sent."""
    counts = (pair.mass[0][state] * COUNT_TOTAL).long().tolist()
    ids = tuple(i for i, count in enumerate(counts) if count > 0)
    return DraftDistribution(ids, tuple(counts[i] for i in ids)) if len(ids) > 1 else None


def orders(q: DraftDistribution | None, only: int, count: int):
    """Every ordered draw of `count` tokens without replacement, with its probability; for a one-hot
    q its token and the next ones by number."""
    if q is None:
        yield tuple((only + i) % 3 for i in range(count)), 1.0
        return
    mass = dict(zip(q.token_ids, q.counts, strict=True))
    for order in itertools.permutations(q.token_ids, count):
        chance, left = 1.0, float(COUNT_TOTAL)
        for token_id in order:
            chance *= mass[token_id] / left
            left -= mass[token_id]
        yield order, chance


def drafted_trees(pair: ToyPair, parents: tuple[int, ...]):
    """Every proposal of this shape that can be drafted, its probability, and the state after the
    last committed token and each draft token. Skips those whose q has too few tokens for a
    group."""
    tree = draft_tree(parents, len(parents))
    found = [((), (), 1.0, {-1: 0})]
    for group in tree.groups:
        grown = []
        for tokens, q, chance, states in found:
            state = states[parents[group[0]]]
            mine = entry(pair, state)
            only = int(pair.mass[0][state].argmax())
            for order, likely in orders(mine, only, len(group)):
                pairs = zip(group, order, strict=True)
                behind = {i: int(pair.step[state, token_id]) for i, token_id in pairs}
                drawn = dict(tokens) | dict(zip(group, order, strict=True))
                grown.append((drawn, (*q, mine), chance * likely, states | behind))
        found = grown
    for tokens, q, chance, states in found:
        ids = tuple(tokens[i] for i in range(len(parents)))
        yield Proposal(ids, q, parents), chance, states


def accepted_paths(tree: DraftTree, accept, node: int = -1, chance: float = 1.0):
    """Every path that may be accepted, with its probability: siblings are tried in turn."""
    left = chance
    for child in tree.children[node + 1]:
        yield from accepted_paths(tree, accept, child, left * accept[child])
        left *= 1.0 - accept[child]
    yield node, left


def path_to(tree: DraftTree, node: int) -> list[int]:
    return [] if node == -1 else [*path_to(tree, tree.parents[node]), node]


def fits(pair: ToyPair, parents: tuple[int, ...]) -> bool:
    """Whether every possible q has enough tokens for its group."""
    tree = draft_tree(parents, len(parents))
    most = max(map(len, tree.groups))
    sizes = [(row > 0).sum().item() for row in pair.mass[0]]
    return all(size == 1 or size >= most for size in sizes)


def tree_round_law(pair: ToyPair, parents: tuple[int, ...], num_tokens: int, is_drafted):
    """The law of `num_tokens` tokens of rounds with the drafted trees of this shape, continued by
    the target alone."""
    tree = draft_tree(parents, len(parents))
    law = np.zeros((3,) * num_tokens)
    for proposal, chance, states in drafted_trees(pair, parents):
        if not is_drafted(proposal):
            continue
        rows = pair.p[[states[i] for i in range(-1, len(parents))]]
        accept, weights = tree_law(rows, proposal)
        weights = weights / weights.sum(dim=1, keepdim=True)
        for node, likely in accepted_paths(tree, accept):
            begun = tuple(proposal.token_ids[i] for i in path_to(tree, node))
            for token_id in range(3):
                after = pair.continuation(
                    pair.step[states[node], token_id], num_tokens - len(begun) - 1
                )
                law[(*begun, token_id)] += (
                    chance * likely * float(weights[node + 1, token_id]) * after
                )
    return law


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_round_with_a_tree_has_the_targets_law(shape, seed):
    """The rule is token. For every draw of every tree, the law of depth + 1 tokens is p's, to
    1e-12."""
    pairs = (random_pair(3, 100 * seed + i) for i in itertools.count())
    pair = next(p for p in pairs if fits(p, SHAPES[shape]))
    num_tokens = draft_tree(SHAPES[shape], len(SHAPES[shape])).num_depths + 1
    law = tree_round_law(pair, SHAPES[shape], num_tokens, lambda proposal: True)
    np.testing.assert_allclose(law, pair.law(num_tokens), atol=EXACT)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_siblings", [1, 2])
def test_a_tree_may_stop_by_what_was_drawn(num_siblings, seed):
    """Whether there is a second position depends on the candidates for the first, siblings
    included. It is decided before the second draw, as by a deadline."""
    short, long = caterpillar_tree((num_siblings,)), caterpillar_tree((num_siblings, 1))
    pairs = (random_pair(3, 100 * seed + i) for i in itertools.count())
    pair = next(p for p in pairs if fits(p, long) and bool((p.mass[0][0] > 0).all()))

    def has_second(proposal: Proposal) -> bool:
        return proposal.token_ids[0] == seed % 3 or proposal.token_ids[num_siblings] == 0

    goes_on = tree_round_law(pair, long, 3, has_second)
    stops = tree_round_law(pair, short, 3, lambda proposal: not has_second(proposal))
    assert min(goes_on.sum(), stops.sum()) > 0.01
    law = goes_on + stops
    np.testing.assert_allclose(law, pair.law(3), atol=EXACT)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED, Rule.GREEDY])
def test_the_first_sibling_is_what_a_chain_has(rule):
    random = np.random.default_rng(5)
    params = SamplingParams(temperature=0.0) if rule is Rule.GREEDY else SamplingParams()
    for seed in range(50):
        logits = torch.from_numpy(random.normal(0, 2, (2, 300)))
        noises = [RoundNoise(seed, rule, 9), RoundNoise(seed + 1, rule, 3)]
        alone, _ = draw_from_logits(logits, params, noises, [0, 2])
        groups = draw_siblings(logits, params, noises, [0, 2], [4, 1])
        assert [(ids[0], q) for ids, q in groups] == alone
        assert [len(set(ids)) for ids, _ in groups] == [4, 1]
        if rule is Rule.TOKEN:
            assert all(set(ids) <= set(q.token_ids) for ids, q in groups)


def test_a_path_is_decided_by_siblings_in_turn():
    parents = (-1, -1, 1, 1)
    verdict = Verdict((0.1, 0.9, 0.1, 0.9), (10, 11, 12, 13, 14))
    expected = {
        (0.5, 0.5, 0.5, 0.5): ((1, 3), (21, 23, 14), "bonus"),
        (0.5, 0.5, 0.5, 0.95): ((1,), (21, 12), "correction"),
        (0.05, 0.5, 0.5, 0.5): ((0,), (20, 11), "bonus"),
        (0.5, 0.95, 0.05, 0.05): ((), (10,), "correction"),
    }
    for uniforms, (path, token_ids, last) in expected.items():
        outcome = decide(verdict, (20, 21, 22, 23), Rule.TOKEN, uniforms, parents)
        assert (outcome.path, outcome.token_ids) == (path, token_ids)
        assert outcome.origins == (Origin.ACCEPTED,) * len(path) + (Origin(last),)
