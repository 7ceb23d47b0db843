"""The loss and its gradient, compared with their definition as differentiated by the library."""

import pytest
import torch
from torch import Tensor

from draft_service.training.teacher import ROWS_OF_A_BLOCK
from draft_service.training.training import overlap_loss

ROWS, WIDTH, COLUMNS, LISTED = 7, 6, 20, 5


def teacher_rows() -> tuple[Tensor, Tensor]:
    """Columns and mass. Some rows have mass on tokens that are not listed or not in the head."""
    generator = torch.Generator().manual_seed(2)
    columns = torch.stack(
        [torch.randperm(COLUMNS, generator=generator)[:LISTED] for _ in range(ROWS)]
    )
    mass = torch.rand(ROWS, LISTED, generator=generator)
    mass = mass / mass.sum(1, keepdim=True) * torch.linspace(0.5, 1.0, ROWS)[:, None]
    columns[2, 3], mass[2, 3] = 0, 0.0
    return columns, mass


def definition(hidden: Tensor, head: Tensor, columns: Tensor, mass: Tensor, share: float) -> Tensor:
    q = (hidden @ head.t()).softmax(1)
    p = torch.zeros_like(q).scatter_add_(1, columns, mass)
    entropy = -(p * q.log()).sum(1)
    likelihood = -torch.minimum(p, q).sum(1).log()
    return ((1 - share) * entropy + share * likelihood).mean()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_loss_and_gradient_are_as_defined(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS_OF_A_BLOCK, "cpu", 3)
    generator = torch.Generator().manual_seed(1)
    teacher = teacher_rows()
    found = []
    for function in (overlap_loss, definition):
        generator.manual_seed(1)
        hidden = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
        head = torch.randn(COLUMNS, WIDTH, generator=generator)
        loss = function(hidden, head, *teacher, share)
        (3 * loss).backward()
        found.append((loss.detach(), hidden.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
