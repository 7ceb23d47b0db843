"""A training run that is broken off: what it keeps, and how much time it says that took."""

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
from draft_service.training.teacher import Dataset, TeacherCache
from draft_service.training.training import Trainer

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass where a test lets them, instead of the time."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def stopping(clock: list[float], num_steps: int) -> Callable[[float, Any], None]:
    """Ctrl-C after so many steps, each of which takes a second."""
    done: list[float] = []

    def progress(part: float, point: Any) -> None:
        done.append(part)
        clock[0] += 1.0
        if len(done) == num_steps:
            raise KeyboardInterrupt

    return progress


def test_steps_that_were_done_are_kept_with_their_time(
    trainer: Callable[[Path, Budget], Trainer], clock: list[float], tmp_path: Path
) -> None:
    """Of a budget in time, of which nothing but the beginning is saved on the way."""
    first = trainer(tmp_path, MINUTES)
    with pytest.raises(KeyboardInterrupt):
        first.run(stopping(clock, 8))
    assert first.now.num_steps == 7
    again = trainer(tmp_path, MINUTES)
    assert (again.now.num_steps, again.spent.seconds) == (7, 8.0)
    assert again.part == pytest.approx(8.0 / MINUTES[1])
    with pytest.raises(KeyboardInterrupt):
        again.run(stopping(clock, 3))
    last = trainer(tmp_path, MINUTES)
    assert (last.now.num_steps, last.spent.seconds) == (10, 11.0)


def test_time_whose_steps_are_lost_does_not_count(
    trainer: Callable[[Path, Budget], Trainer], clock: list[float], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run that cannot save any more goes on from the last checkpoint and from its time."""
    monkeypatch.setattr(training, "_CHECKPOINT_S", 2.5)
    first = trainer(tmp_path, MINUTES)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space")

    def progress(part: float, point: Any) -> None:
        clock[0] += 1.0
        if first.now.num_steps == 7:
            monkeypatch.setattr(training, "save_file", fail)
            raise RuntimeError("stop")

    with pytest.raises(OSError, match="no space"):
        first.run(progress)
    again = trainer(tmp_path, MINUTES)
    assert (again.now.num_steps, again.spent.seconds) == (6, 6.0)


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
