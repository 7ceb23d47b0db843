"""A head that reads features as it learns: which token, feature and answer belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from models import save_tiny_model, tiny_config, tiny_module

from draft_service.training import distilling
from draft_service.training.dataset import Batch, Dataset
from draft_service.training.distilling import distill
from draft_service.training.documents import HELD_OUT_EVERY, Document, Template
from draft_service.training.heads import NUM_DEPTHS, Eagle, make_new_eagle
from draft_service.training.measuring import Measured, measure
from draft_service.training.options import DistillOptions
from draft_service.training.recipes import recipe_for
from draft_service.training.teacher import Features, Target, TeacherCache
from outrider.errors import SettingError
from outrider.models.eagle import load_eagle

VOCAB: Final = 48
TOKEN_IDS: Final = np.array([token_id for token_id in range(VOCAB) if token_id % 6])


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny_module(tiny_config("llama", VOCAB))


@pytest.fixture(scope="module")
def dataset(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Of documents some of which are too short for the later draft tokens."""
    random = np.random.default_rng(0)
    ids = [random.integers(0, VOCAB, 5 + i % 9).astype(np.int32) for i in range(3 * HELD_OUT_EVERY)]
    documents = [
        Document(row, 1 + i % 3, 1 + i % 3, (0.0, 1.0)[i % 2], i % HELD_OUT_EVERY < 4)
        for i, row in enumerate(ids)
    ]
    features = Features.of(module)
    cache = TeacherCache(tmp_path_factory.mktemp("answers"), documents, VOCAB, features)
    cache.fill(module, 1e9, lambda part: None)
    return Dataset([cache], TOKEN_IDS, VOCAB, torch.device("cpu"))


def loud(module: Any, seed: int = 0) -> Eagle:
    """A head that changes much of what it is given, by all that it sees."""
    eagle: Any = make_new_eagle(module, TOKEN_IDS, seed).learner
    for name, weight in eagle.weights.items():
        if "attend" not in name and "gate" not in name:
            weight.data *= 1000
    return eagle  # type: ignore[no-any-return]


def test_features_tokens_and_answers_of_a_chain_belong_together(
    module: Any, dataset: Dataset
) -> None:
    """Each document by itself: its pairs begin with its first learned token, and each draft token
    is scored against what the target says of the place that it would stand at."""
    eagle, places = loud(module), dataset.learned[:7]
    batch = dataset.batch(places)
    depths = eagle.draft(batch)
    assert len(depths) == NUM_DEPTHS
    hidden: list[list[torch.Tensor]] = [[] for _ in depths]
    answers: list[list[Any]] = [[] for _ in depths]
    for place in places:
        document = place.document
        ids = torch.from_numpy(document.token_ids.astype(np.int64))[None]
        with torch.inference_mode():
            features = module.base_model(input_ids=ids).last_hidden_state
            p = module(ids).logits[0].double().softmax(1)
        first, num = document.first, document.num_learned
        behind = torch.nn.functional.pad(ids[:, first:], (0, NUM_DEPTHS))
        own = features[:, first - 1 : first - 1 + num]
        for depth, guessed in enumerate(
            eagle.module.unroll(own, behind[:, : num + NUM_DEPTHS - 1], NUM_DEPTHS)
        ):
            for start in range(num - 1 - depth):
                hidden[depth].append(guessed[0, start])
                answers[depth].append(p[first + start + depth, TOKEN_IDS].float())
    for number, depth in enumerate(depths):
        expected = torch.stack(hidden[number])
        torch.testing.assert_close(depth.hidden, expected, atol=2e-2, rtol=2e-2)
        teacher = batch.teacher.at(depth.rows)
        found = torch.zeros(len(expected), len(TOKEN_IDS))
        found.scatter_add_(1, teacher.columns, teacher.mass)
        torch.testing.assert_close(found, torch.stack(answers[number]), atol=1e-3, rtol=1e-2)


def test_a_new_head_passes_on_what_it_is_given_and_depends_on_the_seed(
    module: Any, dataset: Dataset
) -> None:
    batch = dataset.batch(dataset.learned[:7])
    first, same, other = (make_new_eagle(module, TOKEN_IDS, seed).learner for seed in (1, 1, 2))
    assert batch.features is not None
    for number, depth in enumerate(first.draft(batch), start=1):
        given = batch.features[depth.rows - number].float()
        torch.testing.assert_close(depth.hidden, given, atol=1e-1, rtol=0.0)
    for name, weight in first.weights.items():
        assert torch.equal(weight, same.weights[name])
        assert not torch.equal(weight, other.weights[name])
    assert len(first.weights) == 5  # Neither embeddings nor head.


def test_it_has_neither_layers_nor_heads_to_choose(tmp_path: Path) -> None:
    for name in ("layers", "heads"):
        with pytest.raises(SettingError, match=f"{name}: a drafter of the kind `eagle` has none"):
            DistillOptions(out=tmp_path, kind="eagle", **{name: 2})


def test_what_is_stored_is_what_was_measured_and_learns_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logit for logit, once it is loaded as it is for serving."""
    torch.set_num_threads(1)
    directory = save_tiny_model(tmp_path / "target", eos_token_id=3)
    target = Target("tiny", directory, Template((0, 5), (3, 6)), None)
    seen: list[tuple[Batch, list[torch.Tensor]]] = []

    def logits(learner: Eagle, batch: Batch) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [depth.hidden @ learner.head.t() for depth in learner.draft(batch)]

    def watched(learner: Any, dataset: Dataset, places: Any) -> Measured:
        batch = dataset.batch(places)
        seen.append((batch, logits(learner, batch)))
        return measure(learner, dataset, places)

    monkeypatch.setattr(distilling, "measure", watched)
    options = DistillOptions(
        out=tmp_path / "out", kind="eagle", draft_vocab=24, tokens=2500, steps=5
    )
    distill(options, target, tmp_path / "cache", lambda stage, part, point: None)
    loaded, _ = load_eagle(tmp_path / "out", directory, name="out", target="tiny")
    assert len(loaded.token_ids) == 24
    [(batch, expected)] = seen
    assert len(expected) == NUM_DEPTHS
    for ours, theirs in zip(logits(Eagle(loaded.module), batch), expected, strict=True):
        assert torch.equal(ours, theirs)
    again = DistillOptions(out=tmp_path / "more", kind="eagle", start_from=tmp_path / "out")
    drafter = recipe_for(again, target, target.load()[0]).drafter
    assert drafter is not None
    for name, weight in drafter.learner.weights.items():
        assert torch.equal(weight, dict(loaded.module.named_parameters())[name])
