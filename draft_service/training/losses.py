"""The loss of a drafter against the target's likeliest tokens, and its gradient, in one pass.

With p the target's probability of each listed token and q the drafter's over its whole head, per
row:

    cross-entropy   -sum_v p(v) log q(v)
    likelihood      -log A,  A = sum_v min(p(v), q(v))      the chance that a draft is accepted

(LK losses, arXiv 2602.23881: the gradient of -log A is that of total variation, divided by A, so
that rows where the drafter is far off are not left behind.) What p lists is the few dozen likeliest
tokens; what it leaves out is taken as 0.

The gradient of either by the logits is s * q(v), with one number s a row, less something at the
listed tokens alone: so there is one softmax over the head, done in place, and no other pass over
it. Logits of many rows at once would not fit a cache; they are made block by block and never kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

ROWS_OF_A_BLOCK: Final = {"cpu": 256, "cuda": 8192}
"""Rows of logits that are made at once."""
_LEAST_OVERLAP: Final = 1e-3
"""A below it counts as this in the gradient of -log A."""


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """What the target says at R places."""

    columns: torch.Tensor
    """[R, M]: of the head, for each listed token; any where `mass` is 0."""
    mass: torch.Tensor
    """[R, M], float32: p of each; 0 for a token that the head has no row for."""

    def at(self, rows: torch.Tensor) -> TeacherRows:
        """Of these [C]."""
        return TeacherRows(self.columns[rows], self.mass[rows])


def overlap_loss(
    hidden: torch.Tensor, head: torch.Tensor, teacher: TeacherRows, likelihood_share: float
) -> torch.Tensor:
    """The mean loss over R rows, to be differentiated by `hidden` alone. `hidden` [R, D] and `head`
    [N, D] of one dtype; cross-entropy and likelihood are mixed by `likelihood_share`."""
    arguments = (hidden, head, teacher, likelihood_share)
    loss: torch.Tensor = _OverlapLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


class _OverlapLoss(torch.autograd.Function):
    """Makes the gradient on the way forward, where the logits are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        teacher: TeacherRows,
        share: float,
    ) -> torch.Tensor:
        num_rows = len(hidden)
        size = ROWS_OF_A_BLOCK["cpu" if hidden.device.type == "cpu" else "cuda"]
        by_hidden = torch.empty_like(hidden)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, num_rows, size):
            rows = slice(start, min(start + size, num_rows))
            q = (hidden[rows] @ head.t()).float()
            part = TeacherRows(teacher.columns[rows], teacher.mass[rows])
            total += _differentiate(q, part, share)
            torch.mm(q.div_(num_rows).to(hidden.dtype), head, out=by_hidden[rows])
        ctx.save_for_backward(by_hidden)
        return total / num_rows

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [by_hidden] = ctx.saved_tensors
        return by_hidden * slopes[0].to(by_hidden), None, None, None


def _differentiate(logits: torch.Tensor, teacher: TeacherRows, share: float) -> torch.Tensor:
    """The loss, summed over all rows of `logits` [R, N], float32, which become its gradient."""
    top = logits.amax(dim=1, keepdim=True)
    weights = logits.sub_(top).exp_()
    total = weights.sum(dim=1, keepdim=True)
    p, columns = teacher.mass, teacher.columns
    listed = weights.gather(1, columns) / total
    overlaps = torch.minimum(p, listed).sum(dim=1, keepdim=True)
    entropy = -(p * listed.clamp(min=torch.finfo(torch.float32).tiny).log()).sum(dim=1)
    likelihood = overlaps.clamp(min=_LEAST_OVERLAP)
    loss = (1 - share) * entropy - share * likelihood.log()[:, 0]
    short = torch.where(listed < p, listed, 0.0) / likelihood
    scale = (1 - share) * p.sum(dim=1, keepdim=True) + share * short.sum(dim=1, keepdim=True)
    weights.mul_(scale / total)
    weights.scatter_add_(1, columns, -((1 - share) * p + share * short))
    return loss.sum()
