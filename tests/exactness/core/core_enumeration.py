"""The exact law of one round, by adding up everything that can happen in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from core_toys import ToyPair
from verdict_laws import verdict_law

from outrider.speculation.accept_reject import Verdict, count_accepted, decide
from outrider.speculation.sampling_params import Rule

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


GoesOn = Callable[[tuple[int, ...]], float]
"""The chance that a further token is drawn behind these draft tokens."""


def round_law(
    pair: ToyPair,
    rule: Rule,
    k: int,
    drafter: int = 0,
    goes_on: GoesOn = lambda path: 1.0,
    *,
    decides_late: bool = False,
) -> tuple[np.ndarray, float]:
    """The law of k+1 tokens, [V] * (k+1), when one round of K = k under token or block is followed
    by the target alone; and the expected number of accepted draft tokens. Before each draw
    `goes_on` decides whether it is made; or, as it must not be, after it: `decides_late` asks for
    the path with the new token, which is dropped where the answer is no."""
    law = np.zeros((pair.vocab_size,) * (k + 1))
    accepted = 0.0
    for length in range(k + 1):
        tokens, states = pair.paths(length)
        before = states[:, :-1]
        drawn = pair.mass[drafter][before].gather(2, tokens[..., None])[..., 0].prod(dim=1).numpy()
        ends = np.array([
            _ends_chance(pair.mass[drafter][end].numpy(), tuple(path), k, goes_on, decides_late)
            for path, end in zip(tokens.tolist(), states[:, -1], strict=True)
        ])  # fmt: skip
        chance = drawn * ends
        taken = chance > 0
        if not taken.any():
            continue
        drafts = pair.draft_rows(tokens[taken], before[taken], drafter)
        verdict = verdict_law(rule, pair.p[states[taken]], drafts)
        counts = accepted_law(rule, verdict.accept.numpy()) * chance[taken, None]
        weights = verdict.weights / verdict.weights.sum(dim=2, keepdim=True)
        for path, visited, count, row in zip(
            tokens[taken].tolist(), states[taken], counts, weights.numpy(), strict=True
        ):
            for n in count.nonzero()[0].tolist():
                for token_id in row[n].nonzero()[0].tolist():
                    rest = pair.continuation(pair.step[visited[n], token_id], k - n)
                    law[(*path[:n], token_id)] += count[n] * row[n][token_id] * rest
        accepted += float((counts * np.arange(length + 1)).sum())
    return law, accepted


def _ends_chance(
    q: np.ndarray, path: tuple[int, ...], k: int, goes_on: GoesOn, decides_late: bool
) -> float:
    """The chance that a proposal is this path, given the values of its draws; q [V] is what the
    next one would be drawn from."""
    if decides_late:
        gone_on = np.prod([goes_on(path[:n]) for n in range(1, len(path) + 1)])
        more = sum(q[v] * goes_on((*path, v)) for v in range(len(q))) if len(path) < k else 0.0
    else:
        gone_on = np.prod([goes_on(path[:n]) for n in range(len(path))])
        more = goes_on(path) if len(path) < k else 0.0
    return float(gone_on * (1.0 - more))


def stopping_rule(seed: int) -> GoesOn:
    """One that depends on the path alone: sure to go on, sure to stop, or either."""
    known: dict[tuple[int, ...], float] = {}

    def goes_on(path: tuple[int, ...]) -> float:
        random = np.random.default_rng([seed, len(path), *path])
        return known.setdefault(path, float(random.choice([0.0, 0.3, 1.0, 1.0])))

    return goes_on


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
