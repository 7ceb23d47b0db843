"""Toy language-model pairs whose every law can be written down."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from verdict_laws import draft_rows

from outrider.speculation.draft_sampling import quantise
from outrider.speculation.proposal import COUNT_TOTAL
from outrider.speculation.verification import DraftRows


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

    def draft_rows(self, token_ids: torch.Tensor, states: torch.Tensor, drafter: int) -> DraftRows:
        """Proposals `token_ids` [B, K] drafted in `states` [B, K], as the scorer wants them."""
        mass = self.mass[drafter][states]
        support = torch.arange(self.mass.shape[2]).expand(mass.shape)
        return draft_rows(token_ids, support, mass)

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
        drafts = self.mass.shape[2]
        paths = list(itertools.product(range(drafts), repeat=num_tokens))
        tokens = torch.tensor(paths, dtype=torch.int64).view(len(paths), num_tokens)
        states = [torch.zeros(len(paths), dtype=torch.int64)]
        for i in range(num_tokens):
            states.append(self.step[states[-1], tokens[:, i]])
        return tokens, torch.stack(states, dim=1)


def make_pair(p: torch.Tensor, drafters: torch.Tensor, entries_max: int = 64) -> ToyPair:
    """A pair from `p` [S, V] and `drafters` [D, S, V], unnormalised, quantised as drafts are."""
    num_states, vocab_size = p.shape
    step = torch.empty(num_states, vocab_size, dtype=torch.int64)
    for state in range(num_states):
        last = (state - 1) % vocab_size
        for token_id in range(vocab_size):
            pair = 1 + vocab_size * (1 + last) + token_id
            step[state, token_id] = 1 + token_id if state == 0 else pair
    p = p / p.sum(dim=1, keepdim=True)
    q = drafters / drafters.sum(dim=2, keepdim=True)
    mass = torch.zeros_like(q)
    for row, out in zip(q.flatten(0, 1), mass.view(-1, vocab_size), strict=True):
        support = quantise(row, entries_max)
        out[list(support.token_ids)] = torch.tensor(support.counts, dtype=torch.float64)
    return ToyPair(p, q, mass / COUNT_TOTAL, step)


def random_pair(vocab_size: int, seed: int) -> ToyPair:
    """Small whole weights: zeros and ties everywhere, equal rows, one-hot and disjoint ones."""
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


def flat_pair(p: list[float], *drafters: list[float], entries_max: int = 64) -> ToyPair:
    """The same distributions at every position."""
    num_states = 1 + len(p) + len(p) ** 2
    target = torch.tensor(p, dtype=torch.float64).expand(num_states, -1)
    rows = torch.tensor(drafters, dtype=torch.float64)[:, None].expand(-1, num_states, -1)
    return make_pair(target, rows, entries_max)


def sampling_pair() -> ToyPair:
    """Vocabulary 3 for Monte Carlo: contexts matter, some tokens are impossible for one side, some
    rows are tied; drafter 0 is fair, drafter 1 bad and knows only the first two tokens."""
    random = np.random.default_rng(17)
    p = random.dirichlet([2.0, 2.0, 2.0], 13) + 0.05
    q = np.stack([random.dirichlet([1.5, 1.5, 1.5], 13) + 0.1, np.ones((13, 3))])
    p[2], p[7] = [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]
    q[0, 3], q[0, 5] = [0.0, 0.5, 0.5], [1.0, 1.0, 1.0]
    q[1, :, 0], q[1, :, 2] = 3.0, 0.0
    return make_pair(torch.from_numpy(p), torch.from_numpy(q))
