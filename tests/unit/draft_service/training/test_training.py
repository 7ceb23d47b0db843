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


def test_steps_that_were_done_are_kept_now_and_then_with_their_time(
    trainer: Callable[[Path, Budget], Trainer], clock: list[float], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a budget in time, which counts on."""
    monkeypatch.setattr(training, "_CHECKPOINT_S", 2.5)
    first = trainer(tmp_path, MINUTES)
    with pytest.raises(KeyboardInterrupt):
        first.run(stopping(clock, 8))
    assert first.now.num_steps == 7
    again = trainer(tmp_path, MINUTES)
    assert (again.now.num_steps, again.spent.seconds) == (6, 8.0)
    assert again.part == pytest.approx(8.0 / MINUTES[1])


def test_a_run_that_was_broken_off_ends_as_one_that_was_not(
    trainer: Callable[[Path, Budget], Trainer], tmp_path: Path
) -> None:
    """From the last step that was kept on, to the same weights."""
    whole = trainer(tmp_path / "whole", STEPS)
    whole.run(lambda part, point: None)
    first = trainer(tmp_path / "broken", STEPS)

    def stop(part: float, point: Any) -> None:
        if first.now.num_steps == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(stop)
    again = trainer(tmp_path / "broken", STEPS)
    assert again.now.num_steps == 6
    again.run(lambda part, point: None)
    for name, weight in whole.learner.weights.items():
        assert torch.equal(again.learner.weights[name], weight), name
