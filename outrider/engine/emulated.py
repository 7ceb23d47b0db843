"""Emulated engines: a target and a draft with artificial distributions and stated step times.

After each prefix, the target's distribution is a Zipf law over `support` token ids. A keyed hash of
the last `order` tokens picks these ids. All other ids have probability zero. The draft has the same
ids. Its log q is log p + `deviation` * g, where g is a pseudo-random standard Gaussian for each id.

With `acceptance_rates`, the target gives each draft token a probability of either 1 or 0. Which of
these depends only on a pseudo-random number and the token's place in the round. So every rule
accepts at these rates, with any drafter and at any temperature. But the target's distribution then
depends on the draft tokens, so audits fail.

With `novel_share`, a pseudo-random share of the target's rows gives all probability to one id,
which depends only on the row's place in the text. After a round that ends with such an id, a
look-up finds no match. Draft tokens are accepted as often as without `novel_share`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from outrider.config.emulated_spec import SCHEME, EmulatedSpec
from outrider.errors import check
from outrider.interfaces.engine import ModelInfo, SequenceStep, check_steps
from outrider.kv_cache.block_pool import BlockPool
from outrider.limits import ENGINE_SEQUENCES_MAX, PAGE_SIZE

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NO_TOKEN = 2**32  # fills up a prefix of fewer than `order` tokens
_STRIDE = np.uint64(1_048_583)
"""The distance between ids of a support: a prime above `VOCAB_SIZE_MAX`, so that ids differ."""
_DRAFT_KEY = np.uint64(0x6472616674)
_ACCEPT_KEY = np.uint64(0x616363657074)
_NOVEL_KEY = np.uint64(0x6E6F76656C)
_Words = npt.NDArray[np.uint64]


class EmulatedEngine:
    """A target's logits are log p. A draft's logits are log q, not normalised. The logits of ids
    outside the support are -inf."""

    def __init__(
        self,
        spec: EmulatedSpec,
        role: Literal["target", "draft"],
        max_num_seqs: int = ENGINE_SEQUENCES_MAX,
    ) -> None:
        check(max_num_seqs > 0, "max_num_seqs must be positive")
        self._spec, self._role, self._max_num_seqs = spec, role, max_num_seqs
        self._pool = pool = BlockPool(spec.num_pages, PAGE_SIZE)
        self.can_hold, self.attach, self.fork = pool.can_hold, pool.attach, pool.fork
        self.keep, self.release, self.page_counts = pool.keep, pool.release, pool.counts
        self.tokens, self.length = pool.tokens, pool.length
        self.stated_seconds = 0.0
        self._rows = torch.full((0, spec.vocab_size), -math.inf)
        """A buffer for logits. All values are -inf, except those that the last step wrote."""
        self._written = torch.zeros((0, 1), dtype=torch.int64)
        """[n, columns]: the columns that the last step wrote in the first n rows of `_rows`."""
        reached = (1.0, *spec.acceptance_rates, 0.0)
        self._chances = np.array([b / a if a else 0.0 for a, b in pairwise(reached)])
        """The acceptance probability at each place in a round if earlier tokens are accepted."""
        self.info = ModelInfo(
            name=SCHEME,
            vocab_size=spec.vocab_size,
            max_model_len=min(spec.max_model_len, spec.num_pages * PAGE_SIZE),
            dtype="float32",
            eos_token_ids=() if spec.eos < 0 else (spec.eos,),
            weights_fingerprint=f"{spec.fingerprint}-{role}",
            tokenizer_fingerprint="",
        )

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        """See `Engine.forward`."""
        check_steps(steps, self.info, self._max_num_seqs, self.length)
        self._pool.append(steps)
        self._pool.written(steps)
        flat = [context for step in steps for context in self._contexts(step)]
        contexts = np.array(flat, dtype=np.uint64).reshape(-1, self._spec.order)
        self.stated_seconds += self._step_time(steps)
        rows = self._logits(contexts)
        if self._role == "target" and (self._spec.novel_share or self._spec.acceptance_rates):
            lengths = [(self.length(step.sequence_id), step.num_logits) for step in steps]
            places = np.concatenate([np.arange(end - num, end) for end, num in lengths])
            # Texts repeat contexts. With keys of contexts alone, they would repeat outcomes, too.
            keys = _mix(_context_keys(contexts, self._spec.seed) ^ _mix(places.astype(np.uint64)))
            self._renew(places, keys, rows)
            self._judge(steps, keys, rows)
        return list(torch.split(rows, [step.num_logits for step in steps]))

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[torch.Tensor]]:
        """See `Engine.launch`. Computes at once. The stated time is still to come."""
        logits = self.forward(steps)
        return lambda: logits

    def _contexts(self, step: SequenceStep) -> list[list[int]]:
        """Returns for each row of logits the last `order` tokens before the predicted token."""
        order = self._spec.order
        num_held = self.length(step.sequence_id) - len(step.token_ids)
        held = self.tokens(step.sequence_id).since(max(0, num_held - order), num_held)
        contexts = [[_NO_TOKEN] * (order - len(held)) + list(held)]
        for token_id in step.token_ids:
            contexts.append([*contexts[-1][1:], token_id])
        return contexts[len(contexts) - step.num_logits :]

    def _step_time(self, steps: Sequence[SequenceStep]) -> float:
        """In a draft's step, a sequence without rows of logits counts as one row."""
        spec = self._spec
        if self._role == "target":
            num_tokens = sum(len(step.token_ids) for step in steps)
            return spec.verify_ms * math.ceil(num_tokens / spec.verify_tokens) / 1e3
        num_rows = sum(max(1, step.num_logits) for step in steps)
        return spec.draft_ms * math.ceil(num_rows / spec.draft_branches) / 1e3

    def _logits(self, contexts: _Words) -> torch.Tensor:
        """Returns logits [n, V] for contexts [n, order]."""
        spec = self._spec
        keys = _context_keys(contexts, spec.seed)
        ids = torch.from_numpy(
            _support_ids(keys, spec.support, spec.num_plain_ids).astype(np.int64)
        )
        weights = -spec.exponent * np.log(np.arange(1, spec.support + 1, dtype=np.float64))
        values = weights - np.log(np.exp(weights).sum())
        values = np.broadcast_to(values, (len(keys), spec.support))
        if self._role == "draft":
            values = values + spec.deviation * _gaussians(keys, spec.support)
        # Resets only what the last step wrote, because resetting whole rows takes too long.
        self._rows[: len(self._written)].scatter_(1, self._written, -math.inf)
        if len(keys) > len(self._rows):
            self._rows = torch.full((len(keys), spec.vocab_size), -math.inf)
        self._written = ids
        logits = self._rows[: len(keys)]
        return logits.scatter_(1, ids, torch.from_numpy(values.astype(np.float32)))

    def _renew(self, places: npt.NDArray[np.int64], keys: _Words, logits: torch.Tensor) -> None:
        """Gives all probability to a new id in a share of the rows. `places` has the number of
        tokens before each row's context ends, less one; `keys` has a key for each row."""
        is_novel = _uniforms(_mix(keys ^ _NOVEL_KEY)) < self._spec.novel_share
        rows = torch.from_numpy(is_novel.nonzero()[0])
        ids = torch.from_numpy(places[is_novel] + self._spec.num_plain_ids)
        self._set(logits, rows, ids, torch.ones(len(rows), dtype=torch.bool))

    def _judge(self, steps: Sequence[SequenceStep], keys: _Words, logits: torch.Tensor) -> None:
        """Changes the logits so that each draft token has a probability of 1 or 0."""
        drafted: list[tuple[int, int, int]] = []
        """Each draft token, its place in the round, and the row of logits that predicts it."""
        start = 0
        for step in steps:
            num_drafted = max(0, step.num_logits - 1)
            newest = step.token_ids[len(step.token_ids) - num_drafted :]
            drafted += [(token_id, i, start + i) for i, token_id in enumerate(newest)]
            start += step.num_logits
        if not (drafted and self._spec.acceptance_rates):
            return
        tokens, places, rows = torch.tensor(drafted).T
        draws = _uniforms(_mix(keys[rows.numpy() + 1] ^ _ACCEPT_KEY))
        chances = self._chances[np.minimum(places.numpy(), len(self._chances) - 1)]
        accepted = torch.from_numpy(draws < chances)
        # A token that is certain anyway cannot be rejected, because no other could follow.
        self._set(logits, rows, tokens, accepted | (logits[rows, tokens] == 0.0))

    def _set(
        self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, certain: torch.Tensor
    ) -> None:
        """Gives each id the probability 1 in its row if it is `certain`, and otherwise 0."""
        emptied = rows[certain]
        logits[emptied[:, None], self._written[emptied]] = -math.inf
        logits[rows, ids] = torch.where(certain, 0.0, -math.inf)
        others = self._written[:, 0].clone()
        others[rows] = ids
        self._written = torch.cat([self._written, others[:, None]], dim=1)


def _mix(words: _Words) -> _Words:
    """SplitMix64's finaliser (Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _context_keys(contexts: _Words, seed: int) -> _Words:
    keys = np.full(len(contexts), seed, dtype=np.uint64)
    for column in contexts.T:
        keys = _mix(keys + (column + np.uint64(1)) * _GOLDEN)
    return keys


def _support_ids(keys: _Words, support: int, vocab_size: int) -> _Words:
    """Returns the distinct ids [n, support] of each of n keys, the likeliest id first."""
    ranks = np.arange(support, dtype=np.uint64)
    return (keys[:, None] % np.uint64(vocab_size) + ranks * _STRIDE) % np.uint64(vocab_size)


def _uniforms(words: _Words) -> npt.NDArray[np.float64]:
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _gaussians(keys: _Words, num: int) -> npt.NDArray[np.float64]:
    places = np.arange(1, num + 1, dtype=np.uint64) * _GOLDEN
    uniforms = _uniforms(_mix(_mix(keys ^ _DRAFT_KEY)[:, None] + places))
    gaussians: npt.NDArray[np.float64] = torch.special.ndtri(torch.from_numpy(uniforms)).numpy()
    return gaussians
