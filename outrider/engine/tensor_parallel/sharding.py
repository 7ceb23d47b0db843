"""Puts in a model's place what one rank runs of it: plain modules on plain tensors.

A block of a decoder works on the heads and the columns that its weights have, so between the two
ends of a block nothing changes; only its ends speak to the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from outrider.engine.tensor_parallel.plan import (
    COLWISE,
    COLWISE_GATHERED,
    ROWWISE_SPLIT,
    Plan,
    sharded_linears,
)
from outrider.errors import check


class Ranks(Protocol):
    """The ranks that run a model together; rank 0 is the leader. Every rank calls the same, in the
    same order."""

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def wait_for_all(self) -> None:
        """Returns once every rank has called it. They load for as long as their machines take,
        while all other calls wait for a step's time at most."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `tensor`, which it may overwrite; bit-equal on all ranks."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor` [..., w], side by side: [..., size * w]."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """As `all_gather`, on the leader; None on the others."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """Of a stored tensor that is `width` wide along `dim`, what one rank holds: the places from
    `start` to `stop`, followed by zeros up to `size` places."""

    dim: int
    width: int
    start: int
    stop: int
    size: int

    @classmethod
    def of(cls, width: int, ranks: Ranks, dim: int) -> Share:
        """The share of a rank; only the last ones have fewer places than they are wide."""
        size = -(-width // ranks.size)
        start = min(width, ranks.rank * size)
        return cls(dim, width, start, min(width, start + size), size)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a stored tensor, or a rank's share of it, belongs."""

    owner: nn.Module
    attribute: str
    share: Share | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found: torch.Tensor = getattr(self.owner, self.attribute)
        return found


class RowwiseLinear(nn.Module):
    """A linear layer of which each rank has some columns; the products are summed."""

    def __init__(self, linear: nn.Linear, ranks: Ranks, splits_input: bool) -> None:
        super().__init__()
        share = Share.of(linear.in_features, ranks, dim=1)
        self.local = _empty_linear(share.size, linear.out_features, linear, bias=False)
        self.bias = linear.bias
        self._ranks = ranks
        self._cut = slice(share.start, share.stop) if splits_input else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in / size], or [..., in] where the input is cut here, to [..., out]."""
        mine = hidden if self._cut is None else hidden[..., self._cut]
        product = self._ranks.all_reduce(self.local(mine))
        return product if self.bias is None else product + self.bias


class GatheredLinear(nn.Module):
    """A linear layer of which each rank has some rows; every rank gets all of the outputs."""

    def __init__(self, local: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.local = local
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return self._ranks.all_gather(self.local(hidden))


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank has some rows. A token's row is one rank's; the others add
    zeros, so that the sum is exact."""

    def __init__(self, embedding: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self._share = Share.of(embedding.num_embeddings, ranks, dim=0)
        self._ranks = ranks
        # The instance stays, for what its class may do besides: Gemma's scales its rows.
        embedding.weight = _empty(self._share.size, embedding.embedding_dim, like=embedding.weight)
        embedding.num_embeddings, embedding.padding_idx = self._share.size, None
        self.local = embedding

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., width]."""
        index = token_ids - self._share.start
        elsewhere = (token_ids < self._share.start) | (token_ids >= self._share.stop)
        rows = self.local(index.masked_fill(elsewhere, 0))
        return self._ranks.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class VocabularyHead(nn.Module):
    """A head of which each rank has some rows. The leader gets the logits; the others get none of
    them, [..., 0], because nobody asks them."""

    def __init__(self, local: nn.Linear, vocab_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.local = local
        self._vocab_size = vocab_size
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., vocab_size] on the leader."""
        mine = self.local(hidden)
        logits = self._ranks.gather(mine)
        return mine[..., :0] if logits is None else logits[..., : self._vocab_size]


def least(ranks: Ranks, number: int, device: torch.device) -> int:
    """The least of every rank's number; the ranks exchange them on `device`."""
    return int(ranks.all_gather(torch.tensor([number], device=device)).min())


def shard(module: Any, plan: Plan, ranks: Ranks) -> dict[str, Slot]:
    """Replaces what the plan shares out by this rank's share, still without values (on the meta
    device). Returns for every stored name of the whole model where it belongs; two names of one
    tensor (a tied head) lead to one."""
    slots = _whole(module)
    for path, linear in sharded_linears(module, plan):
        style = plan.style(path)
        if style in (COLWISE, COLWISE_GATHERED):
            local = _colwise(path, linear, ranks, slots)
            replacement: nn.Module = local if style == COLWISE else GatheredLinear(local, ranks)
        else:
            rowwise = RowwiseLinear(linear, ranks, splits_input=style == ROWWISE_SPLIT)
            share = Share.of(linear.in_features, ranks, dim=1)
            slots[f"{path}.weight"] = Slot(rowwise.local, "weight", share)
            if linear.bias is not None:
                slots[f"{path}.bias"] = Slot(rowwise, "bias")
            replacement = rowwise
        _replace(module, path, replacement)
    _shard_vocabulary(module, ranks, slots)
    return slots


def _shard_vocabulary(module: Any, ranks: Ranks, slots: dict[str, Slot]) -> None:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    paths = {found: path for path, found in module.named_modules()}
    check(isinstance(embedding, nn.Embedding), "a model whose embedding is none")
    check(isinstance(head, nn.Linear), "a model whose head is no linear layer")
    tied = embedding.weight is head.weight
    vocab_size = head.out_features
    local_head = _colwise(paths[head], head, ranks, slots)
    _replace(module, paths[head], VocabularyHead(local_head, vocab_size, ranks))
    share = Share.of(embedding.num_embeddings, ranks, dim=0)
    _replace(module, paths[embedding], VocabularyEmbedding(embedding, ranks))
    slots[f"{paths[embedding]}.weight"] = Slot(embedding, "weight", share)
    if tied:
        local_head.weight = embedding.weight


def _whole(module: nn.Module) -> dict[str, Slot]:
    """A slot for every stored name of a model that nothing has been taken from."""
    found = {}
    for name in module.state_dict(keep_vars=True):
        path, _, attribute = name.rpartition(".")
        found[name] = Slot(module.get_submodule(path), attribute)
    return found


def _colwise(path: str, linear: nn.Linear, ranks: Ranks, slots: dict[str, Slot]) -> nn.Linear:
    share = Share.of(linear.out_features, ranks, dim=0)
    local = _empty_linear(linear.in_features, share.size, linear, bias=linear.bias is not None)
    slots[f"{path}.weight"] = Slot(local, "weight", share)
    if linear.bias is not None:
        slots[f"{path}.bias"] = Slot(local, "bias", share)
    return local


def _empty_linear(width_in: int, width_out: int, like: nn.Linear, bias: bool) -> nn.Linear:
    dtype = like.weight.dtype
    return nn.Linear(width_in, width_out, bias=bias, device="meta", dtype=dtype)


def _empty(*shape: int, like: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"), requires_grad=False)


def _replace(module: nn.Module, path: str, replacement: nn.Module) -> None:
    parent, _, attribute = path.rpartition(".")
    setattr(module.get_submodule(parent), attribute, replacement)
