"""A head that says, after a model's first layers, what comes next: the model drafts for itself.

    h  what the model's layer N puts out at a token, [R, D]
    x = h / rms(h) * w
    f = x + M x + down (silu(gate x) * up x)
    logits of the token behind it = H f

w [D], M [D, D], gate and up [M', D], down [D, M'] are trained; H [N', D] has the rows of the
model's own head for a part of its vocabulary. With w as in the model's last norm and all else zero
it is that norm and that head, on what was not meant for them. Layers that draft for those behind
them: LayerSkip (arXiv 2404.16710), which trains them for it, and Kangaroo (2404.18911), which
leaves them as they are and trains what reads them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

_EPS: Final = 1e-6
"""Under the root of the mean square."""


class ExitHead(nn.Module):
    """Of width D and inner width M', with a head [N', D] that is the model's own."""

    def __init__(self, inner: int, head: nn.Parameter) -> None:
        """The weights, but for the head's, are without values."""
        super().__init__()
        rows, width = head.shape
        with torch.device("meta"):
            self.scale = nn.Parameter(torch.empty(width))
            self.mix = nn.Linear(width, width, bias=False)
            self.gate_up = nn.Linear(width, 2 * inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)
            self.head = nn.Linear(width, rows, bias=False)
        self.to(head.dtype)
        self.head.weight = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """f [..., D] of h [..., D]."""
        x = nn.functional.rms_norm(hidden, hidden.shape[-1:], self.scale, eps=_EPS)
        gate, up = self.gate_up(x).chunk(2, -1)
        changed: torch.Tensor = self.mix(x) + self.down(nn.functional.silu(gate) * up)
        return x + changed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, N'], float32, of h [R, D]."""
        logits: torch.Tensor = self.head(self(hidden))
        return logits.float()
