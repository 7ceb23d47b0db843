"""A training run that is broken off: what it keeps; and the loss against its definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_config, tiny_module

from draft_service.training import training
from draft_service.training.documents import HELD_OUT_EVERY, Document
from draft_service.training.learners import Student
from draft_service.training.options import DistillOptions
from draft_service.training.teacher import Dataset, TeacherCache, TeacherRows
from draft_service.training.training import Trainer, overlap_loss

VOCAB = 48
TOKEN_IDS = np.arange(0, VOCAB, 3)
MINUTES = (None, 1e5)
STEPS = (60, 0.0)
"""Of which every third is saved."""
Budget = tuple[int | None, float]


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny_module(tiny_config("llama", VOCAB))


@pytest.fixture(scope="module")
def dataset(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    random = np.random.default_rng(0)
    rows = [random.integers(0, VOCAB, 12).astype(np.int32) for _ in range(2 * HELD_OUT_EVERY)]
    documents = [Document(row, 1, 1, None, i % HELD_OUT_EVERY == 0) for i, row in enumerate(rows)]
    cache = TeacherCache(tmp_path_factory.mktemp("answers"), documents, module)
    cache.fill(1e9, lambda part: None)
    return Dataset(cache, TOKEN_IDS)


@pytest.fixture
def trainer(
    module: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path, Budget], Trainer]:
    """Makes one, of small batches."""
    monkeypatch.setitem(training.BATCH_TOKENS, "cpu", 400)

    def make(place: Path, budget: Budget) -> Trainer:
        learner = Student(DistillOptions(out=place, layers=1), module)
        learner.make(TOKEN_IDS)
        return Trainer(learner, dataset, place, 0, *budget)

    return make


def test_steps_that_were_done_are_kept_with_their_time(
    trainer: Callable[[Path, Budget], Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after eight steps of a second, of a budget in time: only the beginning was saved."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def progress(part: float, point: Any) -> None:
        now[0] += 1.0
        if now[0] == 8.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, MINUTES).run(progress)
    again = trainer(tmp_path, MINUTES)
    assert (again.now.num_steps, again.spent.seconds) == (7, 8.0)
    assert again.part == pytest.approx(8.0 / MINUTES[1])


@pytest.mark.parametrize(("where", "num_kept"), [("in a step", 7), ("in an update", 6)])
def test_a_step_that_was_broken_off_is_done_again(
    trainer: Callable[[Path, Budget], Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    where: str, num_kept: int,
) -> None:  # fmt: skip
    """From the same batch on, to the same weights."""
    whole = trainer(tmp_path / "whole", STEPS)
    whole.run(lambda part, point: None)
    first = trainer(tmp_path / "broken", STEPS)

    def broken(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found = function(*arguments)
            if first.now.num_steps == 7:
                raise KeyboardInterrupt
            return found

        return call

    with monkeypatch.context() as patch:
        if where == "in a step":
            patch.setattr(training, "overlap_loss", broken(training.overlap_loss))
        else:
            patch.setattr(first._optimizer, "step", broken(first._optimizer.step))
        with pytest.raises(KeyboardInterrupt):
            first.run(lambda part, point: None)
    again = trainer(tmp_path / "broken", STEPS)
    assert again.now.num_steps == num_kept
    again.run(lambda part, point: None)
    for name, weight in whole.learner.weights.items():
        assert torch.equal(again.learner.weights[name], weight), name


ROWS, WIDTH, COLUMNS, LISTED = 7, 6, 20, 5


def teacher_rows() -> TeacherRows:
    """Of some rows a part of the mass is on tokens that the head has not, or is not listed."""
    generator = torch.Generator().manual_seed(2)
    columns = torch.stack(
        [torch.randperm(COLUMNS, generator=generator)[:LISTED] for _ in range(ROWS)]
    )
    mass = torch.rand(ROWS, LISTED, generator=generator)
    mass = mass / mass.sum(1, keepdim=True) * torch.linspace(0.5, 1.0, ROWS)[:, None]
    columns[2, 3], mass[2, 3] = 0, 0.0
    return TeacherRows(columns, mass)


def definition(
    hidden: torch.Tensor, head: torch.Tensor, teacher: TeacherRows, share: float
) -> torch.Tensor:
    q = (hidden @ head.t()).softmax(1)
    p = torch.zeros_like(q).scatter_add_(1, teacher.columns, teacher.mass)
    entropy = -(p * q.log()).sum(1)
    likelihood = -torch.minimum(p, q).sum(1).log()
    return ((1 - share) * entropy + share * likelihood).mean()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_loss_and_gradient_are_as_defined(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several blocks of rows."""
    monkeypatch.setitem(training.ROWS_OF_A_BLOCK, "cpu", 3)
    generator = torch.Generator().manual_seed(1)
    teacher = teacher_rows()
    found = []
    for function in (overlap_loss, definition):
        generator.manual_seed(1)
        hidden = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
        head = torch.randn(COLUMNS, WIDTH, generator=generator)
        loss = function(hidden, head, teacher, share)
        (3 * loss).backward()
        found.append((loss.detach(), hidden.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
