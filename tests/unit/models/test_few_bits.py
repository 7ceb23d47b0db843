"""Weights in 8 and 4 bits: integers and scales can be read back from the products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.few_bits import GROUP, integers_of, round_weights, rounded
from tests.support.models import tiny_config, tiny_module, twin

NUM_ROWS = 12
EVERY_BITS = pytest.mark.parametrize("bits", [8, 4])


def random_weight(width: int = 3 * GROUP) -> Tensor:
    return torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(width))


def with_outlier(weight: Tensor) -> Tensor:
    weight[1, 70], weight[2, 3], weight[2, 5] = 900.0, -7.0, 7.0
    return weight


def with_zeros(weight: Tensor) -> Tensor:
    weight[0] = 0.0
    weight[1, GROUP : 2 * GROUP] = -0.0
    return weight


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16().float(),
    "outlier": with_outlier,
    "zeros": with_zeros,
    "tiny": lambda weight: weight * 1e-30,
    "huge": lambda weight: weight * 1e36,
    "mixed": lambda weight: weight * torch.logspace(-25, 25, NUM_ROWS)[:, None],
    "positive": lambda weight: weight.abs(),
}


@EVERY_BITS
@pytest.mark.parametrize("kind", WEIGHTS)
def test_integers_and_scales_are_read_back(bits: int, kind: str) -> None:
    weight = WEIGHTS[kind](random_weight())
    made = rounded(weight, bits)
    product = made.product()
    found = integers_of(product)
    assert found.bits == made.bits == bits
    assert torch.equal(found.integers, made.integers)
    assert torch.equal(found.scales, made.scales)
    integers, scales = made.integers.double(), made.scales.double()
    assert torch.equal(product.double(), (integers * scales).flatten(1))
    # The largest integer of each group is used, and -8 is the only one of its magnitude.
    peaks = integers.amin(-1) if bits == 4 else integers.abs().amax(-1)
    is_zero = (weight.view(integers.shape) == 0).all(-1)
    assert torch.equal(peaks, (~is_zero).double() * (-8 if bits == 4 else 127))
    assert integers.max() <= (7 if bits == 4 else 127)
    assert (scales != 0).all()
    # +8 becomes 7 in 4 bits.
    gaps = (product - weight).double().view(integers.shape).abs()
    assert (gaps <= scales.abs() * (1.01 if bits == 4 else 0.51)).all()


@EVERY_BITS
@pytest.mark.parametrize("exponent", [-118, -130, -136, -142, -149])
def test_where_scales_have_few_bits_left_nothing_is_read_wrong(bits: int, exponent: int) -> None:
    """Such scales are subnormal numbers. A weight that cannot be read back stays in float32."""
    product = rounded(torch.ldexp(random_weight(), torch.tensor(exponent)), bits).product()
    found = integers_of(product)
    assert product.isfinite().all()
    assert found is None or torch.equal(found.product(), product)
    assert found is not None or exponent < -118


@EVERY_BITS
def test_a_weight_of_zeros_stays_one(bits: int) -> None:
    zeros = torch.zeros(NUM_ROWS, GROUP)
    product = rounded(zeros, bits).product()
    assert torch.equal(product, zeros)
    assert torch.equal(integers_of(product).product(), zeros)


@EVERY_BITS
@pytest.mark.parametrize("place", [(0, 0), (NUM_ROWS - 1, 3 * GROUP - 1)])
def test_other_weights_have_no_integers(bits: int, place: tuple[int, int]) -> None:
    """One changed value is enough, also outside of the rows that are tried first."""
    assert integers_of(random_weight()) is None
    assert integers_of(random_weight().bfloat16().float()) is None
    product = rounded(random_weight(), bits).product()
    product[place] = torch.nextafter(product[place], torch.tensor(9.0)) if product[place] else 1e-3
    assert integers_of(product) is None


def test_a_width_that_no_group_divides_has_8_bits() -> None:
    product = rounded(random_weight(GROUP + 8), 8).product()
    assert integers_of(product).bits == 8


@pytest.mark.parametrize("is_tied", [False, True])
@EVERY_BITS
def test_the_linear_layers_of_a_model_are_rounded(bits: int, is_tied: bool) -> None:
    """The LM head, and weights whose width no group divides, have at least 8 bits. Embeddings are
    rounded only with the LM head, and norms and biases never."""
    sizes = {"hidden_size": GROUP, "intermediate_size": GROUP + 16, "head_dim": 16}
    config = tiny_config("llama", tie_word_embeddings=is_tied, attention_bias=True, **sizes)
    module: Any = tiny_module(config)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    before = twin(module)
    round_weights(module, bits)
    for name, parameter in module.named_parameters():
        old = before.get_parameter(name)
        if "down_proj" in name or "lm_head" in name or ("embed" in name and is_tied):
            expected = rounded(old, 8).product()
        elif "proj.weight" in name:
            expected = rounded(old, bits).product()
        else:
            expected = old
        assert torch.equal(parameter, expected), name
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == is_tied
