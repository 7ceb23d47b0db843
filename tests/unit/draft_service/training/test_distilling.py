"""`outrider distill` from nothing on a tiny random target: it gets better, and a run that is killed
at any stage ends as one that was not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from models import save_tiny_model
from safetensors.torch import load_file

from draft_service.training import distilling, teacher, training
from draft_service.training.distilling import Distilled, distill
from draft_service.training.documents import Template
from draft_service.training.options import DistillOptions
from draft_service.training.teacher import Target
from draft_service.training.training import (
    Point,
    batch_tokens,
    learning_rate,
    likelihood_share,
)
from outrider.errors import ConfigError, SettingError
from outrider.limits import PAGE_SIZE
from outrider.models.student import load_drafter

WISHES: Final = {"layers": 1, "draft_vocab": 24, "tokens": 2500, "steps": 30, "seed": 3}
OPTIONS = DistillOptions(out=Path(), **WISHES)  # type: ignore[arg-type]
TEMPLATE = Template((0, 5), (3, 6))
Report = Callable[[str, float, Point | None], None]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several of each."""
    torch.set_num_threads(1)
    monkeypatch.setitem(training.BATCH_TOKENS, "cpu", 512)
    monkeypatch.setattr(teacher, "_DOCUMENTS_OF_A_FILE", 32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = save_tiny_model(tmp_path_factory.mktemp("target"), eos_token_id=3)
    return Target("tiny", path, TEMPLATE, None)


def silent(stage: str, part: float, point: Point | None) -> None:
    """Hears nothing."""


def run(target: Target, place: Path, report: Report = silent, **changes: object) -> Distilled:
    options = replace(OPTIONS, **({"out": place / "out"} | changes))  # type: ignore[arg-type]
    return distill(options, target, place / "cache", report)


def weights(place: Path) -> dict[str, torch.Tensor]:
    return load_file(place / "out" / "model.safetensors")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def whole_run(target: Target, place: Path, **changes: object) -> list[Point]:
    """What a run that nobody kills measures."""
    torch.set_num_threads(1)
    points: list[Point] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training.BATCH_TOKENS, "cpu", 512)
        patch.setattr(teacher, "_DOCUMENTS_OF_A_FILE", 32)
        run(
            target, place, lambda stage, part, point: points.extend([point] if point else []),
            **changes,
        )  # fmt: skip
    return points


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Point]]:
    """A student's run that nobody killed, and what it measured."""
    place = tmp_path_factory.mktemp("whole")
    return place, whole_run(target, place)


def test_acceptance_grows(whole: tuple[Path, list[Point]]) -> None:
    points = whole[1]
    assert points[-1].sampled > points[0].sampled + 0.03
    assert points[-1].greedy >= points[0].greedy
    assert points[-1].step == OPTIONS.steps


def test_what_comes_out_is_a_drafter_with_its_card(
    target: Target, whole: tuple[Path, list[Point]]
) -> None:
    out = whole[0] / "out"
    module, info = load_drafter(out, target.directory, name="out", target="tiny")
    assert len(info.logit_token_ids) == OPTIONS.draft_vocab
    assert module(torch.tensor([[0, 5, 1]])).logits.shape == (1, 3, OPTIONS.draft_vocab)
    card = (out / "README.md").read_text()
    for words in ("30 steps", "Seed 3;", "target, 0.7", "| step | tokens |", "| draft token | 1 |"):
        assert words in card, words
    [(trained, passes)] = re.findall(r"over ([\d,]+) tokens.*\n.* from ([\d.]+) times", card)
    [there] = re.findall(r"\| the target, for this \| [\d,]+ \| ([\d,]+) \| \d+ \|", card)
    assert 0 < float(passes) == pytest.approx(number(trained) / number(there), abs=0.01)
    assert sorted(path.name for path in out.parent.iterdir()) == ["cache", "out"]


@pytest.mark.parametrize(("stage", "part"), [("writing", 0.5), ("reading", 0.4), ("training", 0.6)])
def test_a_run_that_is_killed_ends_as_one_that_was_not(
    target: Target, whole: tuple[Path, list[Point]], tmp_path: Path, stage: str, part: float
) -> None:  # fmt: skip
    """Bit for bit, on one machine: the same text, answers and steps."""

    def kill(now: str, done: float, point: Point | None) -> None:
        if now == stage and done >= part:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path, kill)
    assert not (tmp_path / "out").exists()
    heard: list[tuple[str, float]] = []
    run(target, tmp_path, lambda now, done, point: heard.append((now, done)))
    first = {now: next(done for name, done in heard if name == now) for now, _ in heard}
    assert first[stage] > part / 2  # It did not begin anew.
    expected = weights(whole[0])
    for name, values in weights(tmp_path).items():
        assert torch.equal(values, expected[name]), name


def test_another_dtype_and_other_learned_tokens_find_nothing_of_the_former(
    target: Target, tmp_path: Path
) -> None:
    """Neither text, nor answers, nor a student: what they hold would be another's."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = [
        {"prompt": [1, 2, 9 + i % 9], "answer": [i % 30] * 9, "temperature": 1} for i in range(40)
    ]
    (corpus / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def folders(**changes: object) -> dict[str, set[str]]:
        run(replace(target, **changes), tmp_path, steps=1, tokens=100, corpus=corpus)  # type: ignore[arg-type]
        names = [path.name for path in tmp_path.glob("cache/distillation/*/*-*")]
        kinds = {name.partition("-")[0] for name in names}
        return {kind: {name for name in names if name.startswith(kind)} for kind in kinds}

    first = folders()
    assert {kind: len(names) for kind, names in first.items()} == {
        "written": 1, "answers": 1, "student": 1,
    }  # fmt: skip
    assert folders(dtype="float32") == first  # Which this target has.
    other = folders(dtype="bfloat16")
    assert {kind: len(names) for kind, names in other.items()} == {
        "written": 2, "answers": 2, "student": 2,
    }  # fmt: skip


def test_two_runs_for_one_target_do_not_mix(target: Target, tmp_path: Path) -> None:
    """The second is refused at every stage of the first, which it leaves as it is."""
    stages: set[str] = set()

    def meanwhile(stage: str, part: float, point: Point | None) -> None:
        if stage not in stages:
            stages.add(stage)
            with pytest.raises(ConfigError, match="another `outrider distill` of this target"):
                run(target, tmp_path, out=tmp_path / "second", steps=2)

    run(target, tmp_path, meanwhile, steps=2)
    assert stages == {"writing", "reading", "training", "measuring"}
    run(target, tmp_path, out=tmp_path / "second", steps=2)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_tokens_that_are_too_few_are_said_to_be(target: Target, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="too few") as bad:
        run(target, tmp_path, tokens=20)
    assert bad.value.key == "tokens"


def test_prompts_to_measure_with_are_not_learned_from(
    target: Target, whole: tuple[Path, list[Point]], tmp_path: Path
) -> None:
    """Each is answered at both temperatures; the drafter is the same as without them."""
    shutil.copytree(whole[0] / "cache", tmp_path / "cache")
    prompts = ((0, 5, 9, 3, 6), (0, 5, 11, 12, 3, 6), (0, 5, 13, 3, 6))
    found = run(target, tmp_path, measure=prompts).of_prompts
    assert found is not None
    assert [rates.temperature for rates in found.by_temperature] == [0.0, 1.0]
    [file] = (tmp_path / "cache").glob("distillation/*/measured-*/conversations.jsonl")
    answered = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(tuple(a["prompt"]) for a in answered) == sorted(2 * prompts)
    assert found.num_tokens == sum(len(a["answer"]) for a in answered)
    assert all(0 < len(a["answer"]) <= 128 for a in answered)
    assert "answers to 3 prompts" in (tmp_path / "out" / "README.md").read_text()
    expected = weights(whole[0])
    for name, values in weights(tmp_path).items():
        assert torch.equal(values, expected[name]), name


def test_a_drafter_learns_on(
    target: Target, whole: tuple[Path, list[Point]], tmp_path: Path
) -> None:
    """From where it stood, with the head that it has; what was there before is left as it is."""
    out, points = whole[0] / "out", []
    before = weights(whole[0])
    shutil.copytree(whole[0] / "cache", tmp_path / "cache")

    def report(stage: str, part: float, point: Point | None) -> None:
        points.extend([point] if point else [])

    changes = {"layers": None, "draft_vocab": None, "measure": ((0, 5, 9, 3, 6),)}
    run(target, tmp_path, report, start_from=out, start_name="of-mine", **changes)
    assert points[0].sampled == pytest.approx(whole[1][-1].sampled, abs=0.02)
    assert points[-1].sampled > points[0].sampled
    card, first = ((p / "out" / "README.md").read_text() for p in (tmp_path, whole[0]))
    for words, are_of_both in (
        ("begun\n  as the drafter `of-mine`.", False),
        ("What the drafter `of-mine` had learned from before is not listed.", False),
        ("About one text in 32 is held out", True),
    ):
        assert words in card, words
        assert (words in first) == are_of_both
    after = weights(tmp_path)
    assert torch.equal(after["draft_token_ids"], before["draft_token_ids"])
    assert any(not torch.equal(values, before[name]) for name, values in after.items())
    for name, values in weights(whole[0]).items():
        assert torch.equal(values, before[name]), name


def test_a_drafter_of_another_kind_is_not_started_from(
    target: Target, whole: tuple[Path, list[Point]], tmp_path: Path
) -> None:
    wishes = {"start_from": whole[0] / "out", "layers": None, "draft_vocab": None}
    with pytest.raises(SettingError, match="is of the kind `student`, and is named") as bad:
        run(target, tmp_path, kind="medusa", **wishes)
    assert bad.value.key == "start_from"


def test_rate_and_loss_follow_the_budget() -> None:
    rates = [learning_rate(part / 100, 576, False) for part in range(101)]
    assert rates[0] == rates[100] == 0.0
    assert rates[4] == max(rates) == pytest.approx(1.5e-3)
    assert learning_rate(0.04, 1152, False) == pytest.approx(rates[4] / 2)
    assert learning_rate(0.04, 576, True) == pytest.approx(rates[4] / 2)
    sizes = [batch_tokens(part / 20, 4096) for part in range(21)]
    assert sizes == [1024] * 10 + [2048] * 6 + [4096] * 5
    shares = [likelihood_share(part / 20, False) for part in range(21)]
    assert shares[:6] == [0.0] * 6
    assert shares == sorted(shares)
    assert shares[10:] == [0.9] * 11
    assert likelihood_share(0.0, True) == 0.9


SHORT: Final = {"tokens": 1500, "steps": 1}
ASKED: Final = (0, 5, 9, 3, 6)
OTHER: Final = (0, 5, 8, 3, 6)


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
        run(target, tmp_path, **SHORT, prompts=(ASKED,), measure=(OTHER, ASKED))
    assert bad.value.key == "measure"
    corpus = corpus_of(tmp_path, ASKED)
    with pytest.raises(SettingError, match=r"number 2 is also the prompt of a conv.* --corpus"):
        run(target, tmp_path, **SHORT, corpus=corpus, measure=(OTHER, ASKED))
    assert not list(tmp_path.glob("cache/distillation/*/*-*"))
    assert run(target, tmp_path, **SHORT, prompts=(ASKED,), measure=(OTHER,)).of_prompts is not None


def test_what_the_target_asks_itself_is_held_out_where_it_is_measured_with(
    target: Target, tmp_path: Path
) -> None:
    """By chance it begins conversations as a prompt does."""
    card = tmp_path / "out" / "README.md"

    def counts() -> tuple[int, int]:
        [row] = [line for line in card.read_text().splitlines() if line.startswith("| the target,")]
        cells = row.replace(",", "").split("|")
        return int(cells[2]), int(cells[4])

    run(target, tmp_path, **SHORT)
    learned, held_out = counts()
    [folder] = folders(tmp_path, "written")
    lines = (folder / "conversations.jsonl").read_text().splitlines()
    written = [tuple(record["prompt"]) for record in map(json.loads, lines)]
    run(target, tmp_path, **SHORT, measure=tuple(sorted(set(written))[:20]))
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
        run(target, tmp_path, **SHORT, measure=(ASKED, (1,) * length))
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
        run(target, tmp_path, **SHORT, measure=((1,) * 60,))
    assert bad.value.key == "measure"
    assert not folders(tmp_path, "written")
