"""Drafters with a part of the vocabulary as assistants of the library's own generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import save_tiny_drafter, save_tiny_model, tiny_config, tiny_module
from transformers import AutoModelForCausalLM

from benchmarks.assistants import WidenedHead, load_assistant, widened
from benchmarks.reference_process import LibraryDecoder
from outrider.errors import ConfigError, InvariantError
from outrider.models.loading import load_model
from outrider.models.student import load_drafter

VOCAB_SIZE = 32
TOKEN_IDS = (1, 4, 5, 9, 20, 21, 31)
OTHERS = [token_id for token_id in range(VOCAB_SIZE) if token_id not in TOKEN_IDS]
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (7,), tuple(range(20)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_drafter(tmp_path_factory.mktemp("drafter"), target, TOKEN_IDS)


def assistant_of(target: Path, drafter: Path) -> torch.nn.Module:
    setup = {
        "directory": str(target), "device": "cpu", "trust_remote_code": False,
        "drafter": {"directory": str(drafter), "name": "drafter", "dtype": "auto"},
    }  # fmt: skip
    return load_assistant(setup, load_model(target)[1])


def request(temperature: float = 0.0, seed: int = 0) -> dict[str, object]:
    rule = "token" if temperature else "greedy"
    return {"max_tokens": 24, "temperature": temperature, "rule": rule, "seed": seed}


def test_its_distribution_is_the_drafter_s_and_zero_elsewhere(target: Path, drafter: Path) -> None:
    """Exactly the drafter's logits, and a probability of exactly zero for what has no row."""
    narrow, _ = load_drafter(drafter, target, name="drafter", target="target")
    ids = torch.tensor([PROMPTS[0]])
    expected, found = narrow(ids).logits, assistant_of(target, drafter)(ids).logits
    assert found.shape == (1, len(PROMPTS[0]), VOCAB_SIZE)
    assert torch.equal(found[..., list(TOKEN_IDS)], expected)
    shares = found.softmax(-1)
    assert (shares[..., OTHERS] == 0).all()
    torch.testing.assert_close(shares[..., list(TOKEN_IDS)], expected.softmax(-1))


def test_assisted_generation_writes_what_plain_generation_does(target: Path, drafter: Path) -> None:
    """At temperature 0 and in float32; the drafter, random as it is, proposes wrong tokens too."""
    torch.set_num_threads(1)
    module = AutoModelForCausalLM.from_pretrained(target)
    assistant = assistant_of(target, drafter)
    calls: list[int] = []
    assistant.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    plain = LibraryDecoder(module, ())
    assisted = LibraryDecoder(module, (), assistant_model=assistant)
    lookup = LibraryDecoder(module, (), prompt_lookup_num_tokens=10)
    for prompt in PROMPTS:
        expected = plain.decode(prompt, request())
        calls.clear()
        assert assisted.decode(prompt, request()) == expected
        assert calls, "the assistant was not asked"
        assert lookup.decode(prompt, request()) == expected


def test_assisted_sampling_comes_from_the_target_s_whole_vocabulary(
    target: Path, drafter: Path
) -> None:
    """Infinite logits make no probability NaN, and what the drafter cannot write is written too.
    Seeds are fixed, so it cannot fail by chance."""
    torch.set_num_threads(1)
    module = AutoModelForCausalLM.from_pretrained(target)
    decoder = LibraryDecoder(module, (), assistant_model=assistant_of(target, drafter))
    texts = [decoder.decode(PROMPTS[0], request(1.0, seed)) for seed in range(4)]
    assert all(len(text) == 24 for text in texts)
    assert {token for text in texts for token in text} & set(OTHERS)


def test_a_model_with_the_target_s_vocabulary_stays_as_it_is(target: Path, tmp_path: Path) -> None:
    draft = save_tiny_model(tmp_path, vocab_size=VOCAB_SIZE, seed=3)
    head = assistant_of(target, draft).get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)


def test_a_model_without_the_target_s_padding_is_widened(target: Path, tmp_path: Path) -> None:
    """Which the library refuses otherwise. Texts with the last four tokens, which no tokenizer has,
    are left out."""
    torch.set_num_threads(1)
    draft = save_tiny_model(tmp_path, vocab_size=VOCAB_SIZE - 4, seed=3)
    module = AutoModelForCausalLM.from_pretrained(target)
    plain = LibraryDecoder(module, ())
    assisted = LibraryDecoder(module, (), assistant_model=assistant_of(target, draft))
    compared = 0
    for token_id in range(VOCAB_SIZE - 4):
        expected = plain.decode((token_id,), request())
        if max(expected) < VOCAB_SIZE - 4:
            assert assisted.decode((token_id,), request()) == expected
            compared += 1
    assert compared


def test_a_wider_model_than_the_target_is_refused_by_name() -> None:
    module = tiny_module(tiny_config("llama", VOCAB_SIZE + 1))
    with pytest.raises(ConfigError, match="wide has logits for 33 tokens, the target for 32"):
        widened(module, range(VOCAB_SIZE + 1), VOCAB_SIZE, "wide")


def test_a_head_with_tokens_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(InvariantError, match="target's"):
        WidenedHead(torch.nn.Linear(4, 2), (1, 8), 8)
