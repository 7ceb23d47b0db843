"""Draft heads as they learn: which token, feature and answer belong together, what a step of the
training counts, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from models import save_tiny_model, tiny_config, tiny_module

from draft_service.training import distilling, training
from draft_service.training.dataset import Batch, Dataset, Example
from draft_service.training.distilling import distill
from draft_service.training.documents import HELD_OUT_EVERY, Document, Template
from draft_service.training.heads import Heads, make_new_heads
from draft_service.training.measuring import Measured, measure
from draft_service.training.options import DistillOptions
from draft_service.training.recipes import recipe_for
from draft_service.training.teacher import Features, Target, TeacherCache
from draft_service.training.training import Budget, Trainer
from outrider.models.medusa import load_heads
from outrider.speculation.draft_sampling import quantise
from outrider.speculation.proposal import COUNT_TOTAL

VOCAB: Final = 48
TOKEN_IDS: Final = np.array([token_id for token_id in range(VOCAB) if token_id % 6])
NUM_HEADS: Final = 3


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny_module(tiny_config("llama", VOCAB))


@pytest.fixture(scope="module")
def dataset(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Of documents some of which are too short for the later heads."""
    random = np.random.default_rng(0)
    ids = [random.integers(0, VOCAB, 5 + i % 9).astype(np.int32) for i in range(3 * HELD_OUT_EVERY)]
    documents = [
        Document(row, 1 + i % 3, 1 + i % 3 + 2 * (i % 2), (0.0, 1.0)[i % 2], i % HELD_OUT_EVERY < 4)
        for i, row in enumerate(ids)
    ]
    features = Features.of(module)
    cache = TeacherCache(tmp_path_factory.mktemp("answers"), documents, VOCAB, features)
    cache.fill(module, 1e9, lambda part: None)
    return Dataset([cache], TOKEN_IDS, VOCAB, torch.device("cpu"))


def loud_heads(module: Any, seed: int = 0) -> Heads:
    """Heads that change much of what they are given, by the token that they see."""
    heads: Any = make_new_heads(module, NUM_HEADS, TOKEN_IDS, seed).learner
    for name, weight in heads.weights.items():
        if "down" in name:
            weight.data *= 1000
    return heads  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Drafted:
    """What the definition says of one draft token of a chain."""

    hidden: torch.Tensor
    p: np.ndarray[Any, Any]
    """The target's, [V]."""
    written: int


def chains(module: Any, heads: Heads, place: Example) -> list[list[Drafted]]:
    """Of one document, chain by chain, from the target's module itself."""
    document = place.document
    ids = torch.from_numpy(document.token_ids.astype(np.int64))
    with torch.inference_mode():
        features = module.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        p = module(ids[None]).logits[0].double().softmax(1).numpy()
        found = []
        for newest in range(document.first, len(ids) - 1):
            f, chain = features[newest - 1], []
            for depth in range(min(NUM_HEADS, len(ids) - 1 - newest)):
                embedded = heads.module.embeddings[ids[newest + depth]]
                f = heads.module.heads[depth](f, embedded)
                at = newest + depth
                chain.append(Drafted(f, p[at], int(ids[at + 1])))
            found.append(chain)
    return found


def columns_of(token_id: int) -> int:
    """Of the head; -1 where it has none."""
    return TOKEN_IDS.tolist().index(token_id) if token_id in TOKEN_IDS else -1


def test_features_tokens_and_answers_of_a_chain_belong_together(
    module: Any, dataset: Dataset
) -> None:
    """Against the definition: f_0 from before the newest token, each head the token behind it, each
    scored against what the target says of the place that its token would stand at."""
    heads = loud_heads(module)
    places = dataset.learned[:7]
    batch = dataset.batch(places)
    depths = heads.draft(batch)
    assert len(depths) == NUM_HEADS
    for number, depth in enumerate(depths):
        expected = [
            chain[number]
            for place in places
            for chain in chains(module, heads, place)
            if number < len(chain)
        ]
        hidden = torch.stack([drafted.hidden for drafted in expected])
        torch.testing.assert_close(depth.hidden, hidden, atol=2e-2, rtol=2e-2)
        teacher = batch.teacher.at(depth.rows)
        p = torch.zeros(len(expected), len(TOKEN_IDS)).scatter_add_(
            1, teacher.columns, teacher.mass
        )
        wanted = torch.tensor(np.stack([drafted.p[TOKEN_IDS] for drafted in expected])).float()
        torch.testing.assert_close(p, wanted, atol=1e-3, rtol=1e-2)
        written = [columns_of(drafted.written) for drafted in expected]
        assert batch.following[depth.rows].tolist() == written


def test_what_is_measured_of_heads_is_what_serving_would_find(
    module: Any, dataset: Dataset
) -> None:
    """With q as it goes on the wire; chains count whose first draft token is the answer's."""
    heads = loud_heads(module)
    measured = measure(heads, dataset, dataset.held_out)
    hits: dict[float, list[bool]] = {0.0: [], 1.0: []}
    overlaps: dict[float, list[float]] = {0.0: [], 1.0: []}
    reached, accepted = np.zeros(NUM_HEADS), np.zeros(NUM_HEADS)
    for place in dataset.held_out:
        document = place.document
        assert document.temperature is not None
        for newest, chain in enumerate(chains(module, heads, place), start=document.first):
            if newest + 1 < document.answer_first:
                continue
            product = 1.0
            for number, drafted in enumerate(chain):
                logits = (drafted.hidden @ heads.head.t()).detach()
                wire = quantise(logits.double().softmax(0), 64)
                q = np.zeros(VOCAB)
                q[TOKEN_IDS[list(wire.token_ids)]] = np.array(wire.counts) / COUNT_TOTAL
                if number == 0:
                    likeliest = TOKEN_IDS[logits.argmax()] == drafted.p.argmax()
                    hits[document.temperature].append(bool(likeliest))
                    overlaps[document.temperature].append(np.minimum(drafted.p, q).sum())
                if document.temperature == 1.0:
                    reached[number] += product
                    product *= min(1.0, q[drafted.written] / drafted.p[drafted.written])
                    accepted[number] += product
    assert {rates.temperature: rates.num_tokens for rates in measured.by_temperature} == {
        temperature: len(found) for temperature, found in hits.items()
    }
    assert measured.greedy == pytest.approx(np.mean(hits[0.0]), abs=0.02)
    assert measured.sampled == pytest.approx(np.mean(overlaps[1.0]), abs=5e-3)
    assert measured.by_position == pytest.approx(tuple(accepted / reached), abs=2e-2)


def test_new_heads_pass_on_what_they_are_given_and_depend_on_the_seed(
    module: Any, dataset: Dataset
) -> None:
    batch = dataset.batch(dataset.learned[:7])
    first, same, other = (
        make_new_heads(module, NUM_HEADS, TOKEN_IDS, seed).learner for seed in (1, 1, 2)
    )
    assert batch.features is not None
    for number, depth in enumerate(first.draft(batch), start=1):
        given = batch.features[depth.rows - number].float()
        torch.testing.assert_close(depth.hidden, given, atol=1e-2, rtol=0.0)
    for name, weight in first.weights.items():
        assert torch.equal(weight, same.weights[name])
        assert not torch.equal(weight, other.weights[name])
    assert len(first.weights) == 2 * NUM_HEADS  # Neither embeddings nor head.
    bound = (2 * first.head.shape[1]) ** -0.5
    gates = first.weights["heads.0.gate_up.weight"]
    assert 0.9 * bound < float(gates.detach().abs().max()) <= bound


def test_later_draft_tokens_count_less(
    module: Any, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each 0.8 of the one before it, of a whole of 1."""
    losses = iter([1.0, 10.0, 100.0])

    def loss(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        return hidden.sum() * 0 + next(losses)

    monkeypatch.setattr(training, "overlap_loss", loss)
    trainer = Trainer(loud_heads(module), dataset, tmp_path, 0, Budget(1, 0.0), is_trained=False)
    trainer.run(lambda part, point: None)
    expected = (1.0 + 0.8 * 10.0 + 0.64 * 100.0) / (1 + 0.8 + 0.64)
    assert trainer.points[-1].loss == pytest.approx(expected)


def test_a_document_without_a_chain_is_not_learned_from(module: Any) -> None:
    """Of one learned token heads draft nothing; a student drafts that one."""
    documents = [Document(np.zeros(length, np.int32), 3, 3, 1.0) for length in (4, 5, 4, 9)]
    target = Target("tiny", Path(), Template((), ()), None)
    found = {}
    for kind in ("student", "medusa"):
        options = DistillOptions(out=Path(), kind=kind, layers=1 if kind == "student" else None)
        found[kind] = recipe_for(options, target, module).long_enough(documents)
    assert found == {"student": documents, "medusa": [documents[1], documents[3]]}


def test_what_is_stored_is_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logit for logit, once they are loaded as they are for serving."""
    torch.set_num_threads(1)
    directory = save_tiny_model(tmp_path / "target", eos_token_id=3)
    target = Target("tiny", directory, Template((0, 5), (3, 6)), None)
    seen: list[tuple[Batch, list[torch.Tensor]]] = []

    def logits(learner: Heads, batch: Batch) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [depth.hidden @ learner.head.t() for depth in learner.draft(batch)]

    def watched(learner: Any, dataset: Dataset, places: Any) -> Measured:
        batch = dataset.batch(places)
        seen.append((batch, logits(learner, batch)))
        return measure(learner, dataset, places)

    monkeypatch.setattr(distilling, "measure", watched)
    options = DistillOptions(
        out=tmp_path / "out", kind="medusa", heads=2, draft_vocab=24, tokens=2500, steps=5
    )
    distill(options, target, tmp_path / "cache", lambda stage, part, point: None)
    module, _ = target.load()
    loaded = load_heads(
        tmp_path / "out", module, name="out", target_directory=directory, target_name="tiny"
    )
    assert len(loaded.token_ids) == 24
    [(batch, expected)] = seen
    assert len(expected) == 2
    for ours, theirs in zip(logits(Heads(loaded.module), batch), expected, strict=True):
        assert torch.equal(ours, theirs)
