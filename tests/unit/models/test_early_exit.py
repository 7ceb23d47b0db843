"""What an exit head computes."""

from __future__ import annotations

import torch
from models import tiny_config, tiny_exit, tiny_module

HEAD_IDS = (1, 4, 5, 9, 20)


def test_what_it_makes_of_a_row_is_as_it_says() -> None:
    """The formula of its own page, weight by weight."""
    module = tiny_module(tiny_config("llama"))
    made = tiny_exit(module, HEAD_IDS).module
    made.scale.uniform_(0.5, 2.0)
    hidden = torch.randn(3, module.config.hidden_size)
    x = hidden / hidden.pow(2).mean(1, keepdim=True).add(1e-6).sqrt() * made.scale
    gate, up = made.gate_up.weight.chunk(2)
    gated = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    f = x + x @ made.mix.weight.T + gated @ made.down.weight.T
    expected = f @ module.lm_head.weight[list(HEAD_IDS)].T
    torch.testing.assert_close(made.logits(hidden), expected, rtol=1e-4, atol=1e-4)
