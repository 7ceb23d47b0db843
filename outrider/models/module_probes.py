"""Probes that compare a module with its replacement by calling both.

The names and shapes of a module's parts suggest a replacement, but only a call shows whether the
module also clamps, adds an offset or rotates in another way. A probe calls both with a few random
rows of different magnitudes. Large rows show a clamp, and small rows show an epsilon. A probe
leaves out the last layer of a block, which the replacement shares, because it may wait for other
ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
"""A module that cannot take a probe raises these errors."""
_SIZES = (1e-3, 1.0, 1.0, 1e2)
_ROUNDINGS = 64
_ROUNDINGS_SHORT = 8  # for dtypes under 32 bits, whose sums are computed in 32 bits
"""The largest allowed difference of two results, as a multiple of the machine epsilon times the
row's largest value."""
_PROBE = "outrider_probe"


def probe_rows(width: int, like: Tensor) -> Tensor:
    """Returns the same random rows [1, 4, width] for the same arguments, with magnitudes `_SIZES`,
    in the dtype and on the device of `like`."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(1, len(_SIZES), width, generator=generator, dtype=torch.float64)
    return (rows * torch.tensor(_SIZES, dtype=torch.float64)[:, None]).to(like)


def agree(one: Tensor, other: Tensor) -> bool:
    """Whether two results [..., D] of one probe are equal up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    info = torch.finfo(one.dtype)
    roundings = _ROUNDINGS_SHORT if info.bits < 32 else _ROUNDINGS
    one, other = one.double(), other.double()
    largest = one.abs().amax(-1, keepdim=True)
    return bool(((one - other).abs() <= roundings * info.eps * largest).all())


def same_rows(
    original: nn.Module, replacement: nn.Module, width: int, like: Tensor, last: str = ""
) -> bool:
    """Whether two modules map a probe [1, 4, width] to the same rows, if the layer `last` is left
    out of both modules."""
    rows = probe_rows(width, like)
    replaced = {last: nn.Identity()} if last else {}
    try:
        with _replaced(original, **replaced), _replaced(replacement, **replaced):
            return agree(original(rows), replacement(rows))
    except PROBE_ERRORS:
        return False


def same_wiring(layer: nn.Module, replacement: Callable[[Any], nn.Module]) -> bool:
    """Whether a layer and its replacement connect their blocks in the same way. With simple
    functions as blocks, both must return the same output and pass the same arguments to
    attention."""
    called: list[dict[str, Any]] = []

    def attend(hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        called.append(given)
        return hidden_states * 3 + 1, None

    blocks = {
        name: _Stub(lambda rows, name=name: rows * len(name) + 1)
        for name, child in layer.named_children()
        if child is not layer.self_attn
    }
    given = {
        "attention_mask": 1, "position_ids": 2, "past_key_values": 3, "use_cache": False,
        "position_embeddings": (4, 5), "more": 6,
    }  # fmt: skip
    rows = torch.arange(4.0, dtype=torch.float64).view(1, 2, 2)
    try:
        with _replaced(layer, self_attn=_Stub(attend), **blocks):
            outputs = [each(rows, **given) for each in (layer, replacement(layer))]
            return torch.equal(*outputs) and called[0] == called[1]
    except PROBE_ERRORS:
        return False


class _Stub(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def call_attention(
    block: Any, width: int, like: Tensor, rotated: int
) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
    """Runs a probe [1, 4, width] through an attention `block`, up to the layer `o_proj`. The first
    `rotated` elements of each head get a rotary angle. Returns the query, key and value of the
    attention function with the input of `o_proj`, and the options that the block itself passes to
    the attention function. Returns None if the block cannot be called like Llama's."""
    rows, angles = probe_rows(width, like), probe_rows(rotated, like)
    calls: list[Any] = []
    mask, given = object(), {"position_ids": angles[..., 0].long(), "calls": calls}
    try:
        # Copies deeply, because setting the attention also changes nested configurations.
        config = deepcopy(block.config)
        config._attn_implementation = _PROBE
        with _replaced(block, config=config, o_proj=nn.Identity()):
            output, _ = block(
                hidden_states=rows,
                position_embeddings=(angles.cos(), angles.sin()),
                attention_mask=mask,
                **given,
            )
        [(states, got_mask, options)] = calls
    except PROBE_ERRORS:
        return None
    if got_mask is not mask or any(options.pop(name, None) is not given[name] for name in given):
        return None
    return (*states, output), options


def _note(
    block: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    options["calls"].append(((query, key, value), attention_mask, options))
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register(_PROBE, _note)


@contextmanager
def _replaced(block: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(block, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(block, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(block, name, value)
