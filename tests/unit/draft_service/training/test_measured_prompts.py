"""Prompts that a drafter is to be measured with: which are refused, what it takes to answer them,
and what is said of that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from models import save_tiny_model

from draft_service.training import distilling
from draft_service.training.distilling import Distilled, distill
from draft_service.training.documents import Template
from draft_service.training.options import DistillOptions
from draft_service.training.teacher import Target
from draft_service.training.training import Point
from outrider.errors import SettingError
from outrider.limits import PAGE_SIZE

OPTIONS: Final = DistillOptions(out=Path(), layers=1, draft_vocab=24, tokens=1500, steps=1, seed=3)
TEMPLATE: Final = Template((0, 5), (3, 6))
ASKED: Final = (0, 5, 9, 3, 6)
OTHER: Final = (0, 5, 8, 3, 6)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    path = save_tiny_model(tmp_path_factory.mktemp("target"), eos_token_id=3)
    return Target("tiny", path, TEMPLATE, None)


class Heard:
    """What a run reports."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, float]] = []

    def __call__(self, stage: str, part: float, point: Point | None) -> None:
        self.parts.append((stage, part))


def run(target: Target, place: Path, heard: Heard | None = None, **changes: Any) -> Distilled:
    options = replace(OPTIONS, out=place / "out", **changes)
    return distill(options, target, place / "cache", heard or Heard())


def folders(place: Path, kind: str) -> list[Path]:
    return sorted(place.glob(f"cache/distillation/*/{kind}-*"))


def corpus_of(place: Path, prompt: Sequence[int], number: int = 40) -> Path:
    """Conversations, one of which begins with this prompt."""
    (place / "corpus").mkdir()
    prompts = [[1, 2, index % 24, index // 24] for index in range(number)] + [list(prompt)]
    lines = [{"prompt": ids, "answer": [7] * 9, "temperature": 1} for ids in prompts]
    (place / "corpus" / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place / "corpus"


def test_what_is_learned_from_is_not_measured_with(target: Target, tmp_path: Path) -> None:
    """It is refused before anything is run."""
    with pytest.raises(SettingError, match=r"number 2 is also number 1 of --prompts") as bad:
        run(target, tmp_path, prompts=(ASKED,), measure=(OTHER, ASKED))
    assert bad.value.key == "measure"
    corpus = corpus_of(tmp_path, ASKED)
    with pytest.raises(SettingError, match=r"number 2 is also the prompt of a conv.* --corpus"):
        run(target, tmp_path, corpus=corpus, measure=(OTHER, ASKED))
    assert not list(tmp_path.glob("cache/distillation/*/*-*"))
    assert run(target, tmp_path, prompts=(ASKED,), measure=(OTHER,)).of_prompts is not None


def test_what_the_target_asks_itself_is_held_out_where_it_is_measured_with(
    target: Target, tmp_path: Path
) -> None:
    """By chance it begins conversations as a prompt does."""
    card = tmp_path / "out" / "README.md"

    def counts() -> tuple[int, int]:
        [row] = [line for line in card.read_text().splitlines() if line.startswith("| the target,")]
        cells = row.replace(",", "").split("|")
        return int(cells[2]), int(cells[4])

    run(target, tmp_path)
    learned, held_out = counts()
    [folder] = folders(tmp_path, "written")
    lines = (folder / "conversations.jsonl").read_text().splitlines()
    written = [tuple(record["prompt"]) for record in map(json.loads, lines)]
    run(target, tmp_path, measure=tuple(sorted(set(written))[:20]))
    assert counts() != (learned, held_out)
    assert sum(counts()) == learned + held_out
    assert folders(tmp_path, "written") == [folder]
    assert len(folders(tmp_path, "student")) == 2  # One of the former is not gone on with.


@pytest.mark.parametrize(("length", "allowed"), [(9, 8), (128, 127)])
def test_long_prompts_are_refused_before_anything_is_run(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, allowed: int
) -> None:
    """By the limit of their own, or by the model's length."""
    if length < 128:
        monkeypatch.setattr(distilling, "MEASURED_PROMPT_TOKENS_MAX", allowed)
    said = f"number 2 has {length} tokens; 1 to {allowed} are allowed"
    with pytest.raises(SettingError, match=said) as bad:
        run(target, tmp_path, measure=(ASKED, (1,) * length))
    assert bad.value.key == "measure"
    assert not list(tmp_path.glob("cache/distillation/*/*-*"))


def pages(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """So many for the target that writes."""
    page_bytes = 2 * 2 * 2 * 8 * 4 * PAGE_SIZE  # layers, keys and values, heads, width, float32
    monkeypatch.setattr(distilling, "memory_budget", lambda *given: num * page_bytes)


def test_prompts_that_do_not_fit_the_pages_are_refused_first(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages hold fewer tokens than the model takes: of a prompt of 60 tokens and its answer."""
    pages(monkeypatch, 4)
    with pytest.raises(SettingError, match=r"have up to 128 tokens; the memory .* takes 64") as bad:
        run(target, tmp_path, measure=((1,) * 60,))
    assert bad.value.key == "measure"
    assert not folders(tmp_path, "written")
