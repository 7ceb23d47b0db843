"""The exact law of one round, by adding up everything that can happen in it."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from core_toys import ToyPair

from outrider.speculation.decision import count_accepted, decide
from outrider.speculation.sampling import Rule
from outrider.speculation.scoring import verdict_law
from outrider.speculation.verdict import Verdict

EXACT = 1e-12
"""How far rounding may take an exact law from its closed form."""


def accepted_law(rule: Rule, accept: np.ndarray) -> np.ndarray:
    """Probability of n = 0..K accepted tokens, [B, K+1], from acceptance probabilities [B, K]: a
    sum over which of the independent tests pass."""
    num, k = accept.shape
    law = np.zeros((num, k + 1))
    for passes in itertools.product((False, True), repeat=k):
        chance = np.prod(np.where(passes, accept, 1 - accept), axis=1)
        law[:, count_accepted(rule, passes)] += chance
    return law


def round_law(pair: ToyPair, rule: Rule, k: int, drafter: int = 0) -> tuple[np.ndarray, float]:
    """The law of k+1 tokens, [V] * (k+1), when one round of K = k under token or block is followed
    by the target alone; and the expected number of accepted draft tokens."""
    tokens, states = pair.paths(k)
    before = states[:, :-1]
    drafts = pair.draft_rows(tokens, before, drafter)
    chance = pair.mass[drafter][before].gather(2, tokens[..., None])[..., 0].prod(dim=1).numpy()
    taken = chance > 0
    drafts = pair.draft_rows(tokens[taken], before[taken], drafter)
    verdict = verdict_law(rule, pair.p[states[taken]], drafts)
    counts = accepted_law(rule, verdict.accept.numpy()) * chance[taken, None]
    weights = verdict.weights / verdict.weights.sum(dim=2, keepdim=True)
    law = np.zeros((pair.vocab_size,) * (k + 1))
    for path, visited, count, row in zip(
        tokens[taken].tolist(), states[taken], counts, weights.numpy(), strict=True
    ):
        for n in range(k + 1):
            if count[n] == 0:
                continue
            for token_id in row[n].nonzero()[0].tolist():
                rest = pair.continuation(pair.step[visited[n], token_id], k - n)
                law[(*path[:n], token_id)] += count[n] * row[n][token_id] * rest
    return law, float((counts * np.arange(k + 1)).sum())


def own_draw_law(pair: ToyPair, rule: Rule, k: int, seed: int) -> np.ndarray:
    """The law of k+1 tokens when one round of the target's own draws t_i ~ p_i is followed by the
    target alone, with draft tokens that depend on those draws in an arbitrary way (as they do when
    noise is shared): x_i is drawn from a row that t_i picks."""
    random = np.random.default_rng(seed)
    drafter = random.dirichlet([0.5] * pair.vocab_size, pair.vocab_size)
    law = np.zeros((pair.vocab_size,) * (k + 1))
    every = range(pair.vocab_size)
    for path in itertools.product(every, repeat=k):
        states = [torch.tensor(0)]
        for token_id in path:
            states.append(pair.step[states[-1], token_id])
        for own in itertools.product(every, repeat=k + 1):
            chance = np.prod([float(pair.p[s, t]) for s, t in zip(states, own, strict=True)])
            chance *= np.prod([drafter[t, x] for t, x in zip(own, path, strict=False)])
            if chance == 0:
                continue
            accept = tuple(float(t == x) for t, x in zip(own, path, strict=False))
            outcome = decide(Verdict(accept, own), path, rule, (0.5,) * k)
            state = pair.step[states[outcome.num_accepted], outcome.token_ids[-1]]
            rest = pair.continuation(state, k - outcome.num_accepted)
            law[outcome.token_ids] += chance * rest
    return law


def assert_exact(pair: ToyPair, rule: Rule, k: int) -> float:
    """The committed law is the target's; returns the expected number of accepted tokens."""
    law, accepted = round_law(pair, rule, k)
    np.testing.assert_allclose(law, pair.law(k + 1), atol=EXACT)
    return accepted
