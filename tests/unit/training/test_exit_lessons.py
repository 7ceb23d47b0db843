"""An exit head as it learns: what it reads, what it is scored against, and what comes out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from models import save_tiny_model, tiny_config, tiny_module
from safetensors.torch import load_file

from draft_service.training import distilling, training
from draft_service.training.dataset import Batch, Dataset
from draft_service.training.distilling import Distilled, distill
from draft_service.training.documents import HELD_OUT_EVERY, Document, Template
from draft_service.training.heads import Exit, layers_before_exit, make_new_exit
from draft_service.training.measuring import Measured, measure
from draft_service.training.options import DistillOptions
from draft_service.training.recipes import recipe_for
from draft_service.training.teacher import Features, Target, TeacherCache
from draft_service.training.training import Point
from outrider.errors import SettingError
from outrider.models.early_exit import load_exit

VOCAB: Final = 48
TOKEN_IDS: Final = np.array([token_id for token_id in range(VOCAB) if token_id % 6])
WISHES: Final = {
    "kind": "early-exit", "layers": 1, "draft_vocab": 24, "tokens": 2500, "steps": 60, "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def module() -> Any:
    config = tiny_config("llama", VOCAB)
    config.num_hidden_layers = 3
    return tiny_module(config)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    path = save_tiny_model(tmp_path_factory.mktemp("target"), eos_token_id=3)
    return Target("tiny", path, Template((0, 5), (3, 6)), None)


def run(target: Target, place: Path, **changes: object) -> tuple[Distilled, list[Point]]:
    points: list[Point] = []
    options = DistillOptions(out=place / "out", **(WISHES | changes))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training.BATCH_TOKENS, "cpu", 512)
        found = distill(
            options, target, place / "cache",
            lambda stage, part, point: points.extend([point] if point else []),
        )  # fmt: skip
    return found, points


@pytest.fixture(scope="module")
def made(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Point]]:
    place = tmp_path_factory.mktemp("exit")
    return place, run(target, place)[1]


@pytest.mark.parametrize("layer", [1, 2])
def test_it_reads_what_a_layer_puts_out_and_answers_for_the_token_behind(
    module: Any, tmp_path: Path, layer: int
) -> None:
    """By the library's own hidden states; the target is as it was afterwards."""
    random = np.random.default_rng(0)
    documents = [
        Document(random.integers(0, VOCAB, 5 + i).astype(np.int32), 1 + i % 3, 2, 1.0, i > 4)
        for i in range(8)
    ]
    layers = list(module.model.layers)
    cache = TeacherCache(tmp_path, documents, VOCAB, Features.of(module, layer))
    cache.fill(module, 1e9, lambda part: None)
    assert list(module.model.layers) == layers
    dataset = Dataset([cache], TOKEN_IDS, VOCAB, torch.device("cpu"))
    batch = dataset.batch(dataset.learned)
    learner: Any = make_new_exit(module, layer, TOKEN_IDS, 0).learner
    torch.nn.init.normal_(learner.module.down.weight, std=0.3)
    [depth] = learner.draft(batch)
    hidden, p = [], []
    for place in dataset.learned:
        document = place.document
        ids = torch.from_numpy(document.token_ids.astype(np.int64))[None]
        with torch.inference_mode():
            said = module(ids, output_hidden_states=True)
        hidden.append(said.hidden_states[layer][0, document.first - 1 : -1])
        p.append(said.logits[0, document.first - 1 : -1].softmax(1))
    with torch.no_grad():
        expected = learner.module(torch.cat(hidden))
    torch.testing.assert_close(depth.hidden, expected, atol=2e-2, rtol=2e-2)
    teacher = batch.teacher.at(depth.rows)
    found = torch.zeros(len(expected), len(TOKEN_IDS)).scatter_add_(
        1, teacher.columns, teacher.mass
    )
    torch.testing.assert_close(found, torch.cat(p)[:, TOKEN_IDS], atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_new_one_is_the_targets_own_norm_and_head(family: str) -> None:
    """Whichever way the norm's weight is stored; but less sure."""
    module = tiny_module(tiny_config(family, VOCAB))
    norm = module.model.norm
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    one, same, other = (make_new_exit(module, 1, TOKEN_IDS, seed).learner for seed in (1, 1, 2))
    hidden = torch.randn(5, module.config.hidden_size)
    expected = module.lm_head(norm(hidden))[:, TOKEN_IDS]
    found = 4 * one.module.logits(hidden)  # type: ignore[attr-defined]
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    gates = "gate_up.weight"
    assert torch.equal(one.weights[gates], same.weights[gates])
    assert not torch.equal(one.weights[gates], other.weights[gates])
    assert sorted(one.weights) == ["down.weight", gates, "mix.weight", "scale"]  # No head.


def test_a_fifth_of_the_layers_stands_before_it() -> None:
    config = tiny_config("llama", VOCAB)
    config.num_hidden_layers = 9
    module = tiny_module(config)
    assert layers_before_exit(module, None) == 2
    assert layers_before_exit(module, 8) == 8
    with pytest.raises(SettingError, match="behind 9 of its 9 layers; 1 to 8 are") as bad:
        layers_before_exit(module, 9)
    assert bad.value.key == "layers"


def test_a_target_without_a_list_of_layers_is_refused(target: Target) -> None:
    module = tiny_module(tiny_config("gpt2", VOCAB))
    options = DistillOptions(out=Path(), kind="early-exit")
    with pytest.raises(SettingError, match="kind: a GPT2LMHeadModel has no"):
        recipe_for(options, target, module)


def test_it_learns_and_comes_with_its_card(target: Target, made: tuple[Path, list[Point]]) -> None:
    place, points = made
    assert points[-1].sampled > points[0].sampled + 0.03
    card = (place / "out" / "README.md").read_text()
    for words in (
        "`outrider serve tiny --draft-model early-exit:DIR`", "Of the kind `early-exit`",
        "in a head behind the target's layer 1, begun\n  as the target's own norm and head there",
        "60 steps", "| draft token | 1 | 2 |",
    ):  # fmt: skip
        assert words in card, words


def test_it_learns_on(target: Target, made: tuple[Path, list[Point]], tmp_path: Path) -> None:
    """Behind the layers, and with the tokens, that it has."""
    shutil.copytree(made[0] / "cache", tmp_path / "cache")
    changes = {"layers": None, "draft_vocab": None, "start_name": "of-mine"}
    _, points = run(target, tmp_path, start_from=made[0] / "out", **changes)
    assert points[0].sampled == pytest.approx(made[1][-1].sampled, abs=0.02)
    before, after = (
        load_file(place / "out" / "model.safetensors") for place in (made[0], tmp_path)
    )
    assert before.keys() == after.keys()
    for name in ("draft_token_ids", "num_layers"):
        assert torch.equal(after[name], before[name])
    assert not torch.equal(after["down.weight"], before["down.weight"])
    assert "as the drafter `of-mine`." in (tmp_path / "out" / "README.md").read_text()


def test_what_a_layer_put_out_is_not_taken_for_what_the_head_read(
    target: Target, made: tuple[Path, list[Point]], tmp_path: Path
) -> None:
    """The text is the same; what is kept beside the answers is not."""
    shutil.copytree(made[0] / "cache", tmp_path / "cache")
    run(target, tmp_path, kind="medusa", layers=None, steps=1)
    assert len([*tmp_path.rglob("features.bin")]) == 2


def test_what_is_stored_is_what_was_measured(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logit for logit, once it is loaded as it is for serving."""
    seen: list[tuple[Batch, torch.Tensor]] = []

    def logits(learner: Exit, batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            [depth] = learner.draft(batch)
            return depth.hidden @ learner.head.t()

    def watched(learner: Any, dataset: Dataset, places: Any) -> Measured:
        batch = dataset.batch(places)
        seen.append((batch, logits(learner, batch)))
        return measure(learner, dataset, places)

    monkeypatch.setattr(distilling, "measure", watched)
    run(target, tmp_path, steps=5, tokens=40 * HELD_OUT_EVERY)
    loaded = load_exit(
        tmp_path / "out", target.load()[0], name="out", target_directory=target.directory,
        target_name="tiny",
    )  # fmt: skip
    assert (len(loaded.token_ids), loaded.num_layers) == (24, 1)
    [(batch, expected)] = seen
    assert torch.equal(logits(Exit(loaded.module, 1), batch), expected)
