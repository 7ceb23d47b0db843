"""Reduces a model to one rank's share of its weights, in plain tensors (not `DTensor`).

A rank has only some attention heads and some MLP units of each decoder layer. The code of the layer
works with any number of heads and units. Ranks exchange tensors only in some linear layers, in the
embedding, and in the LM head."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError, SettingError, check
from outrider.interfaces.engine import ModelInfo
from outrider.models import loading
from outrider.models.sources import check_weights

COLWISE = "colwise"
ROWWISE = "rowwise"
COLWISE_GATHERED = "colwise_gather_output"
ROWWISE_SPLIT = "rowwise_split_input"
_BY_COLUMNS = {ROWWISE, ROWWISE_SPLIT}
_SHARED = {COLWISE, COLWISE_GATHERED, *_BY_COLUMNS}
_WITHOUT_EFFECT = {"replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles to ignore. One concerns gradients, the other the embedding, which is always divided."""
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_ATTENTION = re.compile(r"(^|\.)(self_)?(attn|attention)\.")
_log = logging.getLogger(__name__)


def plan_for(module: Any, size: int, name: str, key: str) -> dict[str, str]:
    """Finds the linear layers to divide among `size` ranks. Returns {path of a layer: its style}.
    The styles are from transformers' plan for the model. Raises `SettingError` about the setting
    `key` if there is no plan, if it has an unknown style, or if ranks would get unequal shares."""
    styles: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    what = f"model {name} ({type(module).__name__})"
    if not {COLWISE, COLWISE_GATHERED}.intersection(styles.values()):
        raise SettingError(key, f"{what} has no plan for tensor parallelism; use 1")
    unknown = sorted(set(styles.values()) - _SHARED - _WITHOUT_EFFECT)
    if unknown:
        reason = f"its plan has the unknown style {unknown[0]}"
        raise SettingError(key, f"{what} cannot be divided among ranks: {reason}; use 1")
    head = module.get_output_embeddings()
    plan = {
        path: style
        for path, submodule in module.named_modules()
        if isinstance(submodule, nn.Linear) and submodule is not head
        if (style := styles.get(_LAYER_NUMBER.sub(".*", path), "")) in _SHARED
    }
    widths = dict(_widths(module, plan))
    greatest = math.gcd(*widths.values())
    if greatest % size:
        allowed = [n for n in range(1, greatest + 1) if greatest % n == 0]
        wrong = next(f"{width} {what}" for what, width in widths.items() if width % size)
        raise SettingError(
            key,
            f"{size} does not divide the {wrong} of model {name}; "
            f"{', '.join(map(str, allowed))} {'does' if len(allowed) == 1 else 'do'}",
        )
    return plan


def _widths(module: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yields the name and the value of each width that the number of ranks must divide."""
    config = module.config.get_text_config()
    if any(style == COLWISE and _ATTENTION.search(path) for path, style in plan.items()):
        for attribute, what in (
            ("num_attention_heads", "attention heads"),
            ("num_key_value_heads", "key-value heads"),
        ):
            counts = getattr(config, attribute, None)
            # In some models the number of heads varies by layer.
            for heads in {counts} if isinstance(counts, int) else sorted(set(counts or ())):
                yield what, heads
    for path, style in plan.items():
        linear, columns = module.get_submodule(path), style in _BY_COLUMNS
        width = linear.in_features if columns else linear.out_features
        yield f"{'inputs' if columns else 'outputs'} of {path.rpartition('.')[2]}", width


class Ranks(Protocol):
    """The ranks that run a model together. Rank 0 is the leader. All ranks make the same calls in
    the same order. A call raises `Unavailable` if a rank is gone or does not answer in time."""

    rank: int
    size: int

    def wait_for_all(self) -> None:
        """Returns once every rank has called this method. Has the time limit for loading. All other
        methods have the time limit for a step."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the tensors of all ranks, bit-equal on all ranks. May overwrite
        `tensor`."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors [..., w] of all ranks, concatenated to [..., size * w]."""

    def gather(self, tensor: Tensor) -> Tensor | None:
        """Like `all_gather`, but returns None on all ranks but the leader."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a stored tensor: the places from `start` to `stop` along `dim`, padded
    with zeros to `size` places."""

    dim: int
    start: int
    stop: int
    size: int

    @classmethod
    def of(cls, width: int, ranks: Ranks, dim: int) -> Share:
        size = -(-width // ranks.size)
        start = min(width, ranks.rank * size)
        return cls(dim, start, min(width, start + size), size)


class ExchangingLinear(nn.Module):
    """A linear layer whose weight is divided among ranks, by rows or by columns."""

    def __init__(
        self,
        local: nn.Linear,
        exchange: Callable[[Tensor], Tensor],
        cut: slice | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """`exchange` computes the output from the outputs of all ranks. Then `bias` is added. `cut`
        selects this rank's columns of the input. None = the input has only these columns."""
        super().__init__()
        self.local, self.bias = local, bias
        self._exchange, self._cut = exchange, cut

    def forward(self, hidden: Tensor) -> Tensor:
        mine = hidden if self._cut is None else hidden[..., self._cut]
        output = self._exchange(self.local(mine))
        return output if self.bias is None else output + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are divided among ranks. Sums the outputs of all ranks. The sum is
    exact, because a rank that lacks a token's row adds zeros."""

    def __init__(self, embedding: nn.Embedding, share: Share, ranks: Ranks) -> None:
        super().__init__()
        self._share, self._ranks = share, ranks
        # Keeps the instance, because its class may do more than a look-up: Gemma scales the rows.
        embedding.num_embeddings, embedding.padding_idx = share.size, None
        self.local = embedding

    def forward(self, token_ids: Tensor) -> Tensor:
        index = token_ids - self._share.start
        elsewhere = (token_ids < self._share.start) | (token_ids >= self._share.stop)
        rows = self.local(index.masked_fill(elsewhere, 0))
        return self._ranks.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


def least(ranks: Ranks, number: int, device: torch.device) -> int:
    """Returns the least `number` of all ranks. The ranks exchange their numbers on `device`."""
    return int(ranks.all_gather(torch.tensor([number], device=device)).min())


def of_leader(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Returns the leader's `tensor`. All ranks must pass a tensor of the same shape and dtype."""
    return ranks.all_gather(tensor)[..., : tensor.shape[-1]]


def _shares(module: Any, plan: Mapping[str, str], ranks: Ranks) -> dict[str, Share]:
    """Returns this rank's shares of the parameters that are divided among ranks, by their names."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    check(isinstance(embedding, nn.Embedding), "the model's embedding is no nn.Embedding")
    check(isinstance(head, nn.Linear), "the model's head is no linear layer")
    columns = {f"{path}.weight" for path, style in plan.items() if style in _BY_COLUMNS}
    whole = {f"{path}.bias" for path, style in plan.items() if style in _BY_COLUMNS}
    owners = {layer for path, layer in module.named_modules() if path in plan} | {embedding, head}
    shares = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if _owner(module, name)[0] in owners and name not in whole:
            dim = int(name in columns)
            shares[name] = Share.of(parameter.shape[dim], ranks, dim)
    return shares


def _join_ranks(
    module: Any, plan: Mapping[str, str], shares: Mapping[str, Share], ranks: Ranks
) -> None:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    paths = {submodule: path for path, submodule in module.named_modules()}
    vocab_size = head.out_features
    for path, style in plan.items():
        linear = module.get_submodule(path)
        linear.out_features, linear.in_features = linear.weight.shape
        if style == COLWISE_GATHERED:
            module.set_submodule(path, ExchangingLinear(linear, ranks.all_gather))
        elif style in _BY_COLUMNS:
            share = shares[f"{path}.weight"]
            cut = slice(share.start, share.stop) if style == ROWWISE_SPLIT else None
            bias, linear.bias = linear.bias, None
            module.set_submodule(path, ExchangingLinear(linear, ranks.all_reduce, cut, bias))
    head.out_features = len(head.weight)

    def gather_logits(mine: Tensor) -> Tensor:
        """Returns the logits [..., vocab_size] on the leader, and [..., 0] on other ranks."""
        logits = ranks.gather(mine)
        return mine[..., :0] if logits is None else logits[..., :vocab_size]

    module.set_submodule(paths[head], ExchangingLinear(head, gather_logits))
    share = shares[f"{paths[embedding]}.weight"]
    module.set_submodule(paths[embedding], VocabularyEmbedding(embedding, share, ranks))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def load_shard(
    path: Path, ranks: Ranks, *, key: str, **options: Unpack[loading.LoadOptions]
) -> tuple[nn.Module, ModelInfo]:
    """Loads this rank's share of the model in `path`, in evaluation mode on the rank's device. Also
    returns a description of the whole model. Raises `ConfigError`. Errors about the number of ranks
    name the setting `key`."""
    name = options.get("name", str(path))
    check_weights(path, name)
    where = loading.use_device(**options)
    module = loading.empty_model(path, **options)
    plan = plan_for(module, ranks.size, name, key)
    info = loading.describe(module, path, **options)
    _log.info("loading share %d of %d of %s on %s", ranks.rank + 1, ranks.size, name, where)
    shares = _shares(module, plan, ranks)
    with loading.refusing(f"model {name}:"):
        _fill(module, shares, path, name)
    _join_ranks(module, plan, shares, ranks)
    return module.requires_grad_(False).to(where).eval(), info


def check_shares(
    path: Path, size: int, *, key: str, name: str, trust_remote_code: bool = False
) -> None:
    """Raises `ConfigError` about the setting `key` if the model in `path` cannot be divided among
    `size` ranks. Reads only the model's configuration."""
    module = loading.empty_model(
        path, name=name, dtype="float32", trust_remote_code=trust_remote_code
    )
    plan_for(module, size, name, key)


def _fill(module: Any, shares: Mapping[str, Share], path: Path, name: str) -> None:
    tensors = module.state_dict(keep_vars=True)
    shared: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        shared.setdefault(id(tensor), []).append(key)
    with loading.open_weights(path) as files:
        named = loading.stored_names(module, tensors, files)
        for keys in shared.values():
            tensor = tensors[keys[0]]
            stored = next((named[key] for key in keys if key in named), None)
            if stored is None:
                if tensor.is_meta:
                    raise ConfigError(f"model {name}: its files lack the weights {keys[0]}")
                continue  # The tensor is a buffer that the model makes itself.
            values = _read(files[stored], stored, tensor, shares.get(keys[0]))
            if values is None:
                raise ConfigError(f"model {name}: weights {stored} do not fit its configuration")
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, requires_grad=False)
            for key in keys:
                setattr(*_owner(module, key), values)


def _read(file: Any, stored: str, tensor: Tensor, share: Share | None) -> Tensor | None:
    """Reads this rank's `share` of a stored tensor (None = all of it), in the dtype of `tensor`.
    Returns None if the stored tensor has another shape than `tensor`."""
    view = file.get_slice(stored)
    if view.get_shape() != [*tensor.shape]:
        return None
    if share is None:
        values: Tensor = file.get_tensor(stored)
    else:
        place = [slice(None)] * tensor.dim()
        place[share.dim] = slice(share.start, share.stop)
        values = view[tuple(place)]
        if missing := share.size - (share.stop - share.start):
            padding = [0, 0] * (tensor.dim() - 1 - share.dim) + [0, missing]
            values = nn.functional.pad(values, padding)
    return values.to(tensor.dtype).contiguous()
