"""Drafters in training: what belongs together in a chain, how one starts, what is stored."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors import safe_open

from draft_service.training import distilling, learners
from draft_service.training.distilling import distill
from draft_service.training.documents import HELD_OUT_EVERY, Document, Template
from draft_service.training.measuring import MeasuredAcceptance, measure
from draft_service.training.options import DistillOptions
from draft_service.training.teacher import Batch, Dataset, Target, TeacherCache
from outrider.config.deployment import TargetConfig
from outrider.models.eagle3 import load_eagle3
from outrider.models.loading import WEIGHTS_FILE, load_model
from outrider.models.student import load_student
from outrider.speculation.draft_sampling import quantise
from outrider.speculation.proposal import COUNT_TOTAL
from outrider.speculation.text_acceptance import acceptance_of_windows, conditional_acceptance
from tests.support.models import save_tiny_model, tiny_config, tiny_module

VOCAB: Final = 48
TOKEN_IDS: Final = np.array([token_id for token_id in range(VOCAB) if token_id % 6])
NUM_LAYERS: Final = 7
KINDS: Final = list(learners.LEARNERS)
WISHES: Final[dict[str, dict[str, Any]]] = {"student": {"layers": 1}, "eagle3": {}}
LOUD: Final = ("down_proj", "o_proj")


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny_module(tiny_config("llama", VOCAB, num_hidden_layers=NUM_LAYERS))


def new(module: Any, kind: str, seed: int = 0, **wishes: object) -> Any:
    options: Any = DistillOptions(out=Path(), kind=kind, seed=seed, **(WISHES[kind] | wishes))  # type: ignore[arg-type]
    learner = learners.LEARNERS[kind](options, module)
    learner.make(TOKEN_IDS)
    return learner


def loud(module: Any, kind: str) -> Any:
    """A model whose weights all have a visible effect."""
    learner = new(module, kind)
    for name, weight in learner.weights.items():
        if kind != "student" and name.split(".")[-2:][0] in LOUD:
            weight.data *= 1000
    return learner


@pytest.fixture(scope="module")
def dataset_of(
    module: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[learners.Learner], Dataset]:
    """Some of the documents are too short for the later draft tokens."""
    random = np.random.default_rng(0)
    ids = [random.integers(0, VOCAB, 5 + i % 9).astype(np.int32) for i in range(3 * HELD_OUT_EVERY)]
    documents = [
        Document(row, 1 + i % 3, 1 + i % 3 + 2 * (i % 2), (0.0, 1.0)[i % 2], i % HELD_OUT_EVERY < 4)
        for i, row in enumerate(ids)
    ]
    place = tmp_path_factory.mktemp("answers")

    def make(learner: learners.Learner) -> Dataset:
        cache = TeacherCache(place, documents, module, learner.taps)
        cache.fill(1e9, lambda part: None)
        return Dataset(cache, TOKEN_IDS)

    return make


def chains(module: Any, learner: Any, document: Document) -> Iterator[list[tuple[Any, int]]]:
    """The chains of one document by definition: the head's input and position for each token."""
    ids = torch.from_numpy(document.token_ids.astype(np.int64))
    first, length = document.first, len(ids)
    with torch.inference_mode():
        read = module(ids[None], output_hidden_states=True).hidden_states
        if learner.kind == "student":
            hidden = learner.module.base_model(ids[None]).last_hidden_state[0]
            yield from ([(hidden[at], at)] for at in range(first - 1, length - 1))
        else:
            taps = torch.cat([read[index] for index in (2, NUM_LAYERS // 2, NUM_LAYERS - 3)], -1)
            for newest in range(max(1, first - 1), length - 1):
                places = range(newest, min(newest + learners.NUM_DEPTHS, length - 1))
                features = learner.module.fuse(taps[:, :newest])
                behind = torch.nn.functional.pad(ids[None, 1:], (0, learners.NUM_DEPTHS))
                behind = behind[:, : newest + len(places) - 1]
                found = learner.module.unroll(features, behind, len(places))
                yield [
                    (learner.module.norm(hidden[0, -1]), at)
                    for hidden, at in zip(found, places, strict=True)
                ]


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_tokens_and_answers_of_a_chain_belong_together(
    module: Any, dataset_of: Callable[[learners.Learner], Dataset], kind: str
) -> None:
    learner = loud(module, kind)
    dataset = dataset_of(learner)
    indices = dataset.learned[:7]
    batch = dataset.batch(indices)
    expected: list[list[tuple[Any, Any, int]]] = [[] for _ in range(learners.NUM_DEPTHS)]
    for index in indices:
        document = dataset.cache.documents[index]
        ids = torch.from_numpy(document.token_ids.astype(np.int64))
        p = module(ids[None]).logits[0].softmax(1).detach()[:, TOKEN_IDS]
        for chain in chains(module, learner, document):
            for depth, (hidden, at) in enumerate(chain):
                [column, *_] = [*np.flatnonzero(int(ids[at + 1]) == TOKEN_IDS), -1]
                expected[depth].append((hidden, p[at], int(column)))
    depths = learner.draft(batch)
    assert len(depths) == sum(map(bool, expected))
    for (found, rows), wanted in zip(depths, expected, strict=False):
        hidden, p, written = zip(*wanted, strict=True)
        torch.testing.assert_close(found, torch.stack(hidden), atol=2e-2, rtol=2e-2)
        said = torch.zeros(len(rows), len(TOKEN_IDS))
        said.scatter_add_(1, batch.columns[rows], batch.mass[rows])
        torch.testing.assert_close(said, torch.stack(p), atol=1e-3, rtol=1e-2)
        assert batch.following[rows].tolist() == list(written)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_is_what_serving_would_find(
    module: Any, dataset_of: Callable[[learners.Learner], Dataset], kind: str
) -> None:
    """The definition is computed with q as it is sent, for chains whose first draft token belongs
    to an answer."""
    learner = loud(module, kind)
    dataset = dataset_of(learner)
    measured = measure(learner, dataset)
    hits: dict[float, list[bool]] = {0.0: [], 1.0: []}
    overlaps: dict[float, list[float]] = {0.0: [], 1.0: []}
    texts: list[list[list[float]]] = []
    for index in dataset.held_out:
        document = dataset.cache.documents[index]
        ids = torch.from_numpy(document.token_ids.astype(np.int64))
        p = module(ids[None]).logits[0].detach().double().softmax(1).numpy()
        ratios: list[list[float]] = [[] for _ in range(learners.NUM_DEPTHS)]
        for chain in chains(module, learner, document):
            if chain[0][1] + 1 < document.answer_first:
                continue
            for depth, (hidden, at) in enumerate(chain):
                logits = (hidden @ learner.head.t()).detach()
                wire = quantise(logits.double().softmax(0), 64)
                q = np.zeros(VOCAB)
                q[TOKEN_IDS[list(wire.token_ids)]] = np.array(wire.counts) / COUNT_TOTAL
                ratios[depth].append(min(1.0, q[ids[at + 1]] / p[at, ids[at + 1]]))
                if depth == 0:
                    likeliest = TOKEN_IDS[int(logits.argmax())] == p[at].argmax()
                    hits[document.temperature or 0.0].append(bool(likeliest))
                    overlaps[document.temperature or 0.0].append(np.minimum(p[at], q).sum())
        if document.temperature == 1.0:
            texts.append(ratios)
    assert measured.measured_tokens == sum(map(len, hits.values()))
    assert measured.greedy == pytest.approx(np.mean(hits[0.0]), abs=0.02)
    assert measured.sampled == pytest.approx(np.mean(overlaps[1.0]), abs=5e-3)
    expected = conditional_acceptance([firsts for firsts, *_ in texts])
    if kind == "eagle3":
        windows = [[np.array(part) for part in parts] for parts in texts]
        expected = acceptance_of_windows(windows, learners.NUM_DEPTHS)
    for ours, theirs in zip(measured.by_position, expected, strict=True):
        assert ours == (None if theirs is None else pytest.approx(theirs, abs=2e-2))


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_new_head_begins_with_the_targets_norm_and_embeddings(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_module(tiny_config(family, VOCAB, num_hidden_layers=NUM_LAYERS))
    norm = module.model.norm
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    monkeypatch.delattr(torch.nn.Embedding, "reset_parameters")  # No random embeddings are made.
    head = new(module, "eagle3").module
    assert head.embed_tokens.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    hidden = torch.randn(5, module.config.hidden_size)
    torch.testing.assert_close(4 * head.norm(hidden), norm(hidden), rtol=1e-3, atol=1e-3)


def test_a_new_student_is_the_target() -> None:
    """A student with all layers computes the same. Only the embeddings are shared, and they are not
    trained. No weight is random, and in half precision rotations keep float32."""
    module = tiny_module(tiny_config("llama", VOCAB), dtype=torch.bfloat16)
    random = torch.get_rng_state()
    learner = new(module, "student", layers=2)
    student = learner.module
    assert torch.equal(torch.get_rng_state(), random)
    ids = torch.randint(0, VOCAB, (2, 11))
    learners.use_plain_attention(module)
    assert torch.equal(student(ids).logits, module(ids).logits[..., TOKEN_IDS])
    assert student.get_input_embeddings().weight is module.get_input_embeddings().weight
    kept = {"model.embed_tokens.weight", "lm_head.weight"}
    assert learner.weights.keys() == {name for name, _ in student.named_parameters()} - kept
    assert not student.training
    one, own = (m.model.layers[0].mlp.up_proj.weight for m in (student, module))
    assert one is not own


def test_the_first_layers_the_last_and_two_that_copy_are_kept() -> None:
    assert learners.kept_layers(4, 30) == [0, 1, 2, 29]
    assert learners.kept_layers(1, 30) == [0]
    assert learners.kept_layers(3, 30, (16, 18)) == [0, 1, 29]
    assert learners.kept_layers(4, 30, (16, 18)) == [0, 16, 18, 29]
    assert learners.kept_layers(5, 30, (0, 29)) == [0, 1, 2, 3, 29]


def looking(*distances: int) -> Any:
    """A model in whose layers each token attends to the token at a distance. The texts of the probe
    are 64 tokens, twice, so at 63 tokens is the token after an earlier occurrence."""
    config = SimpleNamespace(_attn_implementation="sdpa")

    def read(input_ids: torch.Tensor, **_: Any) -> Any:
        assert config._attn_implementation == "eager"
        assert torch.equal(*input_ids.split(64, 1))
        weights = [torch.diag(torch.ones(128 - back), -back) for back in distances]
        return SimpleNamespace(attentions=[torch.stack([torch.eye(128), w])[None] for w in weights])

    return SimpleNamespace(
        config=config,
        base_model=read,
        get_input_embeddings=lambda: torch.nn.Embedding(1000, 1),
        set_attn_implementation=lambda name: setattr(config, "_attn_implementation", name),
    )


def test_layers_that_copy_are_found_behind_those_that_gather() -> None:
    model = looking(63, 1, 0, 63, 0)
    assert learners.copying_layers(model) == (1, 3)
    assert model.config._attn_implementation == "sdpa"
    assert learners.copying_layers(looking(63, 0, 1)) is None


def loaded(kind: str, out: Path, target: Target) -> tuple[Any, Any]:
    """The drafter's module and the tokens of its logits, as loaded for serving."""
    if kind == "student":
        found, info = load_student(out, target.directory, name="out", target="tiny")
        return found, info.logit_token_ids
    module: Any = load_model(target.directory)[0]
    found = load_eagle3(out, module, name="out", target_name="tiny")
    return found.module, found.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_is_what_was_measured_and_learns_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Logits are equal whether the drafter is loaded for serving or for further training, with the
    same layers and tokens. No other weight is trained."""
    directory = save_tiny_model(tmp_path / "target", eos_token_id=3, num_layers=NUM_LAYERS)
    target = Target(
        TargetConfig(model="tiny", directory=str(directory)), Template((0, 5), (3, 6)), None
    )
    seen: list[tuple[Batch, list[torch.Tensor]]] = []

    def logits(learner: Any, batch: Batch) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [depth.hidden @ learner.head.t() for depth in learner.draft(batch)]

    def watched(learner: Any, dataset: Dataset) -> MeasuredAcceptance:
        batch = dataset.batch(dataset.held_out)
        seen.append((batch, logits(learner, batch)))
        return measure(learner, dataset)

    monkeypatch.setattr(distilling, "measure", watched)
    options = DistillOptions(
        out=tmp_path / "out", kind=kind, draft_vocab=24, tokens=4000, steps=5, **WISHES[kind]
    )
    distill(options, target, tmp_path / "cache", lambda stage, part, detail: None)
    module, token_ids = loaded(kind, tmp_path / "out", target)
    assert len(token_ids) == 24
    [(batch, expected)] = seen
    start = tmp_path / "out"
    again = replace(options, start_from=str(start), layers=None, draft_vocab=None)
    learner: Any = learners.LEARNERS[kind](again, load_model(directory)[0])
    learner.load(start, target)
    with safe_open(start / WEIGHTS_FILE, "pt") as file:
        assert learner.weights.keys() <= set(file.keys())  # All are stored.
    for served in (False, True):
        if served:
            learner.module = module
        for ours, theirs in zip(logits(learner, batch), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 if kind == "student" else 0, rtol=0)
    assert all(weight.requires_grad for weight in learner.weights.values())
    ends = ("embed_tokens.weight", "lm_head.weight")
    assert not any(name.endswith(ends) for name in learner.weights)
