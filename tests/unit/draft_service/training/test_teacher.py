"""What the target is asked, which of its answers are kept, and the batches made of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.training import teacher
from draft_service.training.documents import Document
from draft_service.training.teacher import Dataset, TeacherCache, check_head
from outrider.errors import ConfigError
from tests.support.models import tiny_config, tiny_module

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


def test_answers_are_the_targets_distribution(
    module: Any, documents: list[Document], tmp_path: Path
) -> None:
    """Each learned token has the likeliest tokens in order and the text's token; each token has
    what a tapped layer read. Other documents in the batch change nothing."""
    cache = TeacherCache(tmp_path, documents, module, (1,))
    cache.fill(1e9, lambda part: None)
    names = ("ids", "logprobs", "written", "features")
    assert sorted(map(id, cache.known)) == sorted(map(id, documents))
    for index, document in enumerate(cache.documents):
        found = {name: cache.answers(name, [index])[0] for name in names}
        ids = torch.from_numpy(document.token_ids.astype(np.int64))
        logprobs = module(ids[None]).logits[0, document.first - 1 : -1].log_softmax(1)
        top = logprobs.topk(64)
        assert found["ids"].tolist() == top.indices.tolist()
        np.testing.assert_allclose(found["logprobs"], top.values.numpy(), atol=0.02)
        written = logprobs.gather(1, ids[document.first :, None])[:, 0]
        np.testing.assert_allclose(found["written"], written.numpy(), atol=0.02)
        hidden = module(ids[None], output_hidden_states=True).hidden_states[1][0]
        features = torch.tensor(found["features"]).view(torch.bfloat16)
        torch.testing.assert_close(features.float(), hidden.detach(), atol=1e-2, rtol=1e-2)


def test_progress_is_told_before_each_pass(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Document(np.zeros(8, np.int32), 1, 1, None) for _ in range(80)]
    monkeypatch.setitem(teacher._TOKENS_OF_A_PASS, "cpu", 8 * 16)
    heard: list[float] = []
    TeacherCache(tmp_path, documents, module).fill(0.0, heard.append)
    assert heard == [0.0, 0.2, 0.4, 0.6]


def test_the_head_is_for_the_tokens_with_most_of_the_mass(
    module: Any, documents: list[Document], tmp_path: Path
) -> None:
    cache = TeacherCache(tmp_path, documents, module)
    cache.fill(1e9, lambda part: None)
    learned = np.zeros(VOCAB)
    for document in (one for i, one in enumerate(documents) if i not in HELD_OUT):
        ids = torch.from_numpy(document.token_ids.astype(np.int64))
        p = module(ids[None]).logits[0].double().softmax(1)
        listed = torch.zeros_like(p).scatter_(1, p.topk(64).indices, p.topk(64).values).numpy()
        learned += listed[document.first - 1 : -1].sum(0)
    assert cache.likeliest_tokens(30).tolist() == sorted(np.argsort(-learned)[:30].tolist())


def test_an_epoch_is_every_learned_document_once(module: Any, tmp_path: Path) -> None:
    documents = [
        Document(np.zeros(6 + i % 9, np.int32), 1, 1, None, i % 32 == 0) for i in range(96)
    ]
    cache = TeacherCache(tmp_path, documents, module)
    cache.fill(1e9, lambda part: None)
    dataset = Dataset(cache, np.arange(VOCAB))
    batches = dataset.epoch(1, 0, 60)
    indices = sorted(index for batch in batches for index in batch)
    assert indices == [i for i, one in enumerate(cache.documents) if not one.is_held_out]
    assert len(dataset.held_out) == 3
    for batch in batches:
        assert max(len(cache.documents[i].token_ids) for i in batch) * len(batch) <= 60
    assert dataset.epoch(1, 0, 60) == batches
    assert dataset.epoch(1, 1, 60) != batches
    assert dataset.epoch(2, 0, 60) != batches


def test_targets_whose_logits_are_more_than_the_heads_are_refused(module: Any) -> None:
    check_head(module)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM"):
        check_head(tiny_module(tiny_config("gemma2", VOCAB, final_logit_softcapping=0.5)))
