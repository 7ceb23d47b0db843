"""Weights of linear layers in 8 or 4 bits.

`round_weights` rounds a model's weights to integers times a scale, and leaves the products in the
weights. So every engine, and a head on the target, runs the same rounded model. An engine that
multiplies integers gets them back with `integers_of`: scales have `_SCALE_BITS` significant bits,
so the products are exact in float32, and rounding them again yields the same integers and scales.

    8 bits   one scale for each row: max |w| / 127
    4 bits   one scale for each 64 weights of a row: w / -8, where w has the largest magnitude. This
             is the formula of Q4_0 in llama.cpp, which uses all 16 integers"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

GROUP = 64
_SCALE_BITS = 11
_SAMPLE_ROWS = 4


class IntegerWeight(NamedTuple):
    """A weight [out, in], equal to integers * scales."""

    bits: int
    integers: Tensor  # [out, groups, in / groups], int8
    scales: Tensor  # [out, groups, 1], float32

    def product(self) -> Tensor:
        return (self.integers * self.scales).flatten(1)


def rounded(weight: Tensor, bits: int) -> IntegerWeight:
    """Rounds a weight [out, in] in float32. With 4 bits, `in` must be a multiple of `GROUP`."""
    size = GROUP if bits == 4 else weight.shape[1]
    groups = weight.view(len(weight), -1, size)
    peaks = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    exact, exponents = torch.frexp(peaks / -8 if bits == 4 else peaks.abs() / 127)
    scales = torch.ldexp((exact * 2**_SCALE_BITS).round() / 2**_SCALE_BITS, exponents)
    scales = torch.where(scales == 0, 1.0, scales)
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    integers = (groups / scales).round_().clamp_(low, high).to(torch.int8)
    return IntegerWeight(bits, integers, scales)


def integers_of(weight: Tensor) -> IntegerWeight | None:
    """Returns what `rounded` has made of a weight. Returns None for another weight."""
    for bits in (4, 8):
        if bits == 4 and weight.shape[1] % GROUP:
            continue
        for rows in (weight[:_SAMPLE_ROWS], weight):
            found = rounded(rows, bits)
            if not torch.equal(found.product(), rows):
                break
        else:
            return found
    return None


@torch.no_grad()
def round_weights(module: Any, bits: int) -> None:
    """Rounds the weights of a causal language model's linear layers, in place. The LM head, and
    weights that no group of 64 divides, get at least 8 bits. An embedding is rounded only if the
    LM head shares its weight."""
    head = module.get_output_embeddings()
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            weight = linear.weight
            few = bits if linear is not head and weight.shape[1] % GROUP == 0 else 8
            weight.copy_(rounded(weight.detach(), few).product())
