"""Toy language-model pairs whose laws can be computed exactly, and the exact law of one of their
rounds, by summing over all events."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from outrider.speculation.accept_reject import count_accepted
from outrider.speculation.draft_sampling import quantise
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, Proposal
from outrider.speculation.sampling_params import Rule
from tests.support.verdict_laws import verdict_law

RATIO_RULES = [Rule.TOKEN, Rule.BLOCK]
EXACT = 1e-12
"""Largest rounding error of an exact law."""


@dataclass(frozen=True)
class ToyPair:
    """A target and some drafters over V tokens; each looks at the last two tokens.

    State 0 is the start, 1 + t follows one token, 1 + V + V * s + t follows tokens s, t.
    `p` [S, V]; `q` [D, S, V] before and `mass` [D, S, V] after quantisation."""

    p: torch.Tensor
    q: torch.Tensor
    mass: torch.Tensor
    step: torch.Tensor
    """[S, V]: the state after a token."""

    @property
    def vocab_size(self) -> int:
        return self.p.shape[1]

    def law(self, num_tokens: int) -> np.ndarray:
        """The target's law of the first `num_tokens` tokens, [V] * num_tokens."""
        return self.continuation(torch.tensor(0), num_tokens)

    def continuation(self, state: torch.Tensor, num_tokens: int) -> np.ndarray:
        """The target's law of the next `num_tokens` tokens after `state`."""
        law, states = np.ones(()), state
        for _ in range(num_tokens):
            law = law[..., None] * self.p[states].numpy()
            states = self.step[states][..., : self.vocab_size]
        return law

    def paths(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every sequence of `num_tokens` tokens, [V^K, K], and the states before each and after
        the last, [V^K, K+1]."""
        paths = list(itertools.product(range(self.mass.shape[2]), repeat=num_tokens))
        tokens = torch.tensor(paths, dtype=torch.int64).view(len(paths), num_tokens)
        states = [torch.zeros(len(paths), dtype=torch.int64)]
        for i in range(num_tokens):
            states.append(self.step[states[-1], tokens[:, i]])
        return tokens, torch.stack(states, dim=1)


def proposal_of(token_ids: torch.Tensor, mass: torch.Tensor) -> Proposal:
    """The proposal of `token_ids` [K] that are drawn from the rows of `mass` [K, V]."""
    q = []
    for row in mass:
        entries = row.nonzero()[:, 0]
        counts = (row[entries] * COUNT_TOTAL).tolist()  # Not all are whole numbers.
        q.append(DraftDistribution(tuple(entries.tolist()), tuple(counts)))
    return Proposal(tuple(token_ids.tolist()), tuple(q))


def make_pair(p: torch.Tensor, drafters: torch.Tensor, entries_max: int = 64) -> ToyPair:
    """A pair from `p` [S, V] and `drafters` [D, S, V], unnormalised, quantised as drafts are."""
    num_states, vocab_size = p.shape
    step = torch.empty(num_states, vocab_size, dtype=torch.int64)
    for state in range(num_states):
        for token_id in range(vocab_size):
            pair = 1 + vocab_size * (1 + (state - 1) % vocab_size) + token_id
            step[state, token_id] = 1 + token_id if state == 0 else pair
    p = p / p.sum(dim=1, keepdim=True)
    q = drafters / drafters.sum(dim=2, keepdim=True)
    mass = torch.zeros_like(q)
    for row, out in zip(q.flatten(0, 1), mass.view(-1, vocab_size), strict=True):
        support = quantise(row, entries_max)
        out[list(support.token_ids)] = torch.tensor(support.counts, dtype=torch.float64)
    return ToyPair(p, q, mass / COUNT_TOTAL, step)


def random_pair(vocab_size: int, seed: int) -> ToyPair:
    """Weights are small integers. So there are zeros and ties everywhere, and equal, one-hot and
    disjoint rows."""
    random = np.random.default_rng(seed)
    num_states = 1 + vocab_size + vocab_size**2
    p = random.integers(0, 4, (num_states, vocab_size)).astype(float)
    q = random.integers(0, 4, (2, num_states, vocab_size)).astype(float)
    for rows in (p, q[0], q[1]):
        empty = rows.sum(axis=1) == 0
        rows[empty, random.integers(vocab_size, size=empty.sum())] = 1
    kinds = random.integers(0, 10, num_states)
    q[0][kinds == 0] = p[kinds == 0]
    q[0][kinds == 1] = np.eye(vocab_size)[random.integers(vocab_size, size=(kinds == 1).sum())]
    p[kinds == 2] = np.eye(vocab_size)[random.integers(vocab_size, size=(kinds == 2).sum())]
    apart = (kinds == 3) & (p.min(axis=1) == 0)
    q[0][apart] = (p[apart] == 0).astype(float)
    return make_pair(torch.from_numpy(p), torch.from_numpy(q))


def flat_pair(p: list[float], *drafters: list[float]) -> ToyPair:
    num_states = 1 + len(p) + len(p) ** 2
    target = torch.tensor(p, dtype=torch.float64).expand(num_states, -1)
    rows = torch.tensor(drafters, dtype=torch.float64)[:, None].expand(-1, num_states, -1)
    return make_pair(target, rows)


def sampling_pair() -> ToyPair:
    """Vocabulary 3 for Monte Carlo: context matters, some tokens are impossible for one side, some
    rows are tied. Drafter 0 is fair; drafter 1 is bad and knows only the first two tokens."""
    random = np.random.default_rng(17)
    p = random.dirichlet([2.0, 2.0, 2.0], 13) + 0.05
    q = np.stack([random.dirichlet([1.5, 1.5, 1.5], 13) + 0.1, np.ones((13, 3))])
    p[2], p[7] = [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]
    q[0, 3], q[0, 5] = [0.0, 0.5, 0.5], [1.0, 1.0, 1.0]
    q[1, :, 0], q[1, :, 2] = 3.0, 0.0
    return make_pair(torch.from_numpy(p), torch.from_numpy(q))


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
"""The probability of another draw after these draft tokens."""


def round_law(
    pair: ToyPair, rule: Rule, k: int, goes_on: GoesOn = lambda path: 1.0
) -> tuple[np.ndarray, float]:
    """The law of k+1 tokens, [V] * (k+1), if one round of K = k under token or block is followed by
    the target alone; and the expected number of accepted draft tokens. `goes_on` decides before
    each draw whether to make it."""
    law = np.zeros((pair.vocab_size,) * (k + 1))
    accepted = 0.0
    for length in range(k + 1):
        tokens, states = pair.paths(length)
        before = states[:, :-1]
        drawn = pair.mass[0][before].gather(2, tokens[..., None])[..., 0].prod(dim=1).numpy()
        ends = np.array([_ends_chance(tuple(path), k, goes_on) for path in tokens.tolist()])
        chance = drawn * ends
        taken = chance > 0
        if not taken.any():
            continue
        proposals = [*map(proposal_of, tokens[taken], pair.mass[0][before[taken]])]
        verdict = verdict_law(rule, pair.p[states[taken]], proposals)
        counts = accepted_law(rule, verdict.accept.numpy()) * chance[taken, None]
        weights = (verdict.weights / verdict.weights.sum(dim=2, keepdim=True)).numpy()
        paths, visited = tokens[taken].tolist(), states[taken]
        for row, n, token_id in zip(*np.nonzero(counts[..., None] * weights), strict=True):
            rest = pair.continuation(pair.step[visited[row, n], token_id], k - n)
            law[(*paths[row][:n], token_id)] += counts[row, n] * weights[row, n, token_id] * rest
        accepted += float((counts * np.arange(length + 1)).sum())
    return law, accepted


def _ends_chance(path: tuple[int, ...], k: int, goes_on: GoesOn) -> float:
    """The chance that a proposal is this path, given the values of its draws."""
    gone_on = np.prod([goes_on(path[:n]) for n in range(len(path))])
    return float(gone_on * (1.0 - (goes_on(path) if len(path) < k else 0.0)))


def stopping_rule(seed: int) -> GoesOn:
    """The rule depends on the path alone: it always continues, always stops, or may do either."""
    known: dict[tuple[int, ...], float] = {}

    def goes_on(path: tuple[int, ...]) -> float:
        random = np.random.default_rng([seed, len(path), *path])
        return known.setdefault(path, float(random.choice([0.0, 0.3, 1.0, 1.0])))

    return goes_on


def assert_exact(pair: ToyPair, rule: Rule, k: int) -> float:
    """The committed law is the target's; returns the expected number of accepted tokens."""
    law, accepted = round_law(pair, rule, k)
    np.testing.assert_allclose(law, pair.law(k + 1), atol=EXACT)
    return accepted
