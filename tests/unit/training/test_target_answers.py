"""What the target is asked, and what is kept of its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_config, tiny_module

from draft_service.training import teacher
from draft_service.training.documents import Document
from draft_service.training.student import kept_layers, make_student
from draft_service.training.teacher import (
    Features,
    TeacherCache,
    check_head,
    covered_share,
    likeliest_tokens,
)
from outrider.errors import ConfigError, SettingError

VOCAB = 160
LENGTHS = (9, 3, 14, 2, 7, 7, 21, 5)
HELD_OUT = (2, 6)


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny_module(tiny_config("llama", VOCAB))


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    random = np.random.default_rng(0)
    ids = [random.integers(0, VOCAB, length).astype(np.int32) for length in LENGTHS]
    return [
        Document(row, 1 + number % 2, 2, 1.0, number in HELD_OUT) for number, row in enumerate(ids)
    ]


def student_of(module: Any, layers: list[int], token_ids: Any) -> Any:
    learner: Any = make_student(module, layers, token_ids).learner
    return learner.module


def test_answers_are_the_targets_distribution(
    module: Any, documents: list[Document], tmp_path: Path
) -> None:
    """Of every learned token, from the tokens before it alone: the likeliest in order, and the
    token that stands there; documents of other lengths beside it change nothing."""
    cache = TeacherCache(tmp_path, documents, VOCAB)
    cache.fill(module, 1e9, lambda part: None)
    assert cache.is_whole
    arrays = cache.arrays()
    for index, document in enumerate(documents):
        rows = cache.rows(index)
        ids = torch.from_numpy(document.token_ids.astype(np.int64))
        logprobs = module(ids[None]).logits[0, document.first - 1 : -1].log_softmax(1)
        top = logprobs.topk(64)
        assert arrays["ids"][rows].tolist() == top.indices.tolist()
        np.testing.assert_allclose(arrays["logprobs"][rows], top.values.numpy(), atol=0.02)
        written = logprobs.gather(1, ids[document.first :, None])[:, 0]
        np.testing.assert_allclose(arrays["written"][rows], written.numpy(), atol=0.02)


def test_features_are_what_the_head_reads(
    module: Any, documents: list[Document], tmp_path: Path
) -> None:
    """At the place before each learned token; so the head makes the answers of them."""
    cache = TeacherCache(tmp_path, documents, VOCAB, Features.of(module))
    cache.fill(module, 1e9, lambda part: None)
    arrays = cache.arrays()
    for index, document in enumerate(documents):
        ids = torch.from_numpy(document.token_ids.astype(np.int64))[None]
        expected = module.base_model(ids).last_hidden_state[0, document.first - 1 : -1]
        found = torch.tensor(arrays["features"][cache.rows(index)]).float()
        torch.testing.assert_close(found, expected.detach(), atol=2e-3, rtol=2e-3)
    said = module.get_output_embeddings()(torch.tensor(arrays["features"]).float())
    assert (said.argmax(1).numpy() == arrays["ids"][:, 0]).mean() > 0.95


@pytest.mark.parametrize("has_features", [False, True])
def test_a_kill_between_two_pools_costs_one(
    module: Any, documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    has_features: bool,
) -> None:  # fmt: skip
    """What is written and not yet said to be there is asked again, and stands there once."""
    monkeypatch.setattr(teacher, "_POOL", 3)
    features = Features.of(module) if has_features else None
    whole = TeacherCache(tmp_path / "whole", documents, VOCAB, features)
    whole.fill(module, 1e9, lambda part: None)
    assert ("features" in whole.arrays()) == has_features
    parts: list[float] = []

    def stop(part: float) -> None:
        parts.append(part)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TeacherCache(tmp_path / "cut", documents, VOCAB, features).fill(module, 1e9, stop)
    with (tmp_path / "cut" / "logprobs.bin").open("ab") as file:
        file.write(b"torn")
    again = TeacherCache(tmp_path / "cut", documents, VOCAB, features)
    assert again.num_documents == 3
    again.fill(module, 1e9, parts.append)
    for name, rows in whole.arrays().items():
        assert np.array_equal(rows, again.arrays()[name])
    assert parts == [3 / 8, 6 / 8, 1.0]


def test_time_that_is_over_ends_the_asking(
    module: Any, documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not before there is something to learn from; earlier runs' time counts."""
    monkeypatch.setattr(teacher, "_POOL", 3)
    assert len(TeacherCache(tmp_path, documents, VOCAB).arrays()["ids"]) == 0
    for _ in range(2):
        cache = TeacherCache(tmp_path, documents, VOCAB)
        cache.fill(module, 0.0, lambda part: None)
        assert cache.num_documents == 3
        assert cache.spent.seconds > 0


def test_the_head_is_for_the_tokens_with_most_of_the_mass(
    module: Any, documents: list[Document], tmp_path: Path
) -> None:
    """Over what is learned; the part that they have is that of all probability, at the places of
    the answers that are held out, of which a list of the likeliest says no more than it does."""
    cache = TeacherCache(tmp_path, documents, VOCAB)
    cache.fill(module, 1e9, lambda part: None)
    learned, expected = np.zeros(VOCAB), []
    for index, document in enumerate(documents):
        ids = torch.from_numpy(document.token_ids.astype(np.int64))
        p = module(ids[None]).logits[0].double().softmax(1)
        listed = torch.zeros_like(p).scatter_(1, p.topk(64).indices, p.topk(64).values).numpy()
        if index in HELD_OUT:
            expected += list(listed[document.answer_first - 1 : -1])
        else:
            learned += listed[document.first - 1 : -1].sum(0)
    chosen = likeliest_tokens([cache], 30, VOCAB)
    assert chosen.tolist() == sorted(np.argsort(-learned)[:30].tolist())
    assert covered_share([cache], chosen, VOCAB) == pytest.approx(
        np.array(expected)[:, chosen].sum(1).mean(), rel=1e-3
    )


def test_a_student_starts_as_the_target(module: Any) -> None:
    """With all its layers and tokens it computes the same; only the embeddings are shared, and
    they are not trained."""
    token_ids = np.array([0, 5, 9, 80, 159])
    student = student_of(module, [0, 1], token_ids)
    ids = torch.randint(0, VOCAB, (2, 11))
    torch.testing.assert_close(student(ids).logits, module(ids).logits[..., token_ids])
    shared = module.get_input_embeddings().weight
    assert student.get_input_embeddings().weight is shared
    trained = {name for name, values in student.named_parameters() if values.requires_grad}
    kept = {"model.embed_tokens.weight", "lm_head.weight"}
    assert trained == {name for name, _ in student.named_parameters()} - kept
    assert not student.training
    one = student_of(module, [1], token_ids)
    mine, theirs = one.model.layers[0].mlp.up_proj, module.model.layers[1].mlp.up_proj
    assert torch.equal(mine.weight, theirs.weight)
    assert mine.weight is not theirs.weight


def test_nothing_of_a_student_is_made_anew() -> None:
    """In half precision, too, in which the library rounds no rotation; and no random weights are
    made to be thrown away, of which embeddings and head would be the most."""
    module = tiny_module(tiny_config("llama", VOCAB), dtype=torch.bfloat16)
    random = torch.get_rng_state()
    student = student_of(module, [0, 1], np.arange(VOCAB))
    assert torch.equal(torch.get_rng_state(), random)
    theirs = {**module.state_dict(), **dict(module.named_buffers())}
    found = {**student.state_dict(), **dict(student.named_buffers())}
    assert found.keys() == theirs.keys()
    for name, values in found.items():
        assert values.dtype == theirs[name].dtype, name
        assert torch.equal(values, theirs[name]), name


def test_the_first_layers_the_last_and_two_that_copy_are_kept() -> None:
    assert kept_layers(4, 30) == [0, 1, 2, 29]
    assert kept_layers(1, 30) == [0]
    assert kept_layers(2, 2) == [0, 1]
    assert kept_layers(3, 30, (16, 18)) == [0, 1, 29]
    assert kept_layers(4, 30, (16, 18)) == [0, 16, 18, 29]
    assert kept_layers(5, 30, (16, 18)) == [0, 1, 16, 18, 29]
    assert kept_layers(5, 30, (0, 29)) == [0, 1, 2, 3, 29]
    with pytest.raises(SettingError, match="more than the target's 30") as bad:
        kept_layers(31, 30)
    assert bad.value.key == "layers"


def test_targets_whose_logits_are_more_than_the_heads_are_refused(module: Any) -> None:
    check_head(module)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM"):
        config = tiny_config("gemma2", VOCAB)
        config.final_logit_softcapping = 0.5
        check_head(tiny_module(config))
    with pytest.raises(ConfigError, match="no list of layers"):
        make_student(tiny_module(tiny_config("gpt2", VOCAB)), [0], np.array([1, 2]))
