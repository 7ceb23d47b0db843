"""Steps through a model's first layers: their output, and that they leave nothing behind."""

from typing import Any

import pytest
import torch
from models import tiny_config, tiny_exit, tiny_module, twin
from paged_engines import shorten_pages
from pages import check_pages

from outrider.engine.interface import ModelInfo, SequenceStep, ShallowEngine
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError, InvariantError

VOCAB = 32
HEAD_IDS = (1, 4, 5, 9, 20)
ROUNDING = 1e-6
"""Some families norm in float32, whatever the model's dtype."""
PAGE = 4
TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
INFO = ModelInfo("tiny", VOCAB, 128, "float64", (), "", "")


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pages(monkeypatch, PAGE)


def built(
    family: str = "llama", num_layers: int = 1, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, PagedEngine]:
    """The module once more, and an engine."""
    config = tiny_config(family, VOCAB)
    config.num_hidden_layers = 3
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, "full_attention"][:3]
    module = tiny_module(config, dtype=dtype)
    original, made = twin(module), tiny_exit(module, HEAD_IDS, num_layers)
    return original, PagedEngine(module, INFO, exit_head=made, **options)


def hidden(module: Any, tokens: tuple[int, ...], layer: int) -> torch.Tensor:
    """[T, D], by the library."""
    states: Any = module(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    found: torch.Tensor = states[layer][0]
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_they_put_out_what_the_library_says(
    family: str, deterministic: bool, num_layers: int
) -> None:
    module, engine = built(family, num_layers, deterministic=deterministic)
    assert isinstance(engine, ShallowEngine)
    engine.forward([SequenceStep("first", TEXT, 0)])
    assert engine.attach("a", (*TEXT, 7)) == 2 * PAGE
    engine.forward([SequenceStep("a", TEXT[2 * PAGE :], 1), SequenceStep("b", (7, 7), 1)])
    texts = {"a": TEXT, "b": (7, 7)}
    for token in (8, 2, 11):
        texts = {name: (*text, token) for name, text in texts.items()}
        found = engine.forward_shallow([SequenceStep(name, (token,), 1) for name in texts])
        for text, rows in zip(texts.values(), found, strict=True):
            expected = hidden(module, text, num_layers)[-1:]
            assert (rows - expected).abs().max() < ROUNDING
    engine.keep("a", len(TEXT))
    [rows] = engine.forward_shallow([SequenceStep("a", (8, 2, 11), 2)])
    expected = hidden(module, texts["a"], num_layers)[-2:]
    assert (rows - expected).abs().max() < ROUNDING


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_is_left_of_them(dtype: torch.dtype) -> None:
    answers, pages = [], []
    for drafts in (False, True):
        _, engine = built(dtype=dtype)
        engine.forward([SequenceStep("a", TEXT, 1), SequenceStep("b", TEXT[:3], 1)])
        before = engine.page_counts()
        if drafts:
            for token in (8, 2, 11, 4, 6, 3):
                engine.forward_shallow(
                    [SequenceStep("a", (token,), 1), SequenceStep("b", (token, 1), 1)]
                )
            assert engine.length("a") == len(TEXT) + 6
            assert engine.page_counts().num_free < before.num_free
            check_pages(engine)
            engine.keep("a", len(TEXT))
            engine.keep("b", 3)
        assert engine.page_counts() == before
        check_pages(engine)
        answers += engine.forward([SequenceStep("a", (9, 2), 2), SequenceStep("b", (6,), 1)])
        pages.append(engine.page_counts())
    assert pages[0] == pages[1]
    for plain, after in zip(answers[:2], answers[2:], strict=True):
        assert torch.equal(plain, after)


@pytest.mark.parametrize("ending", ["keep", "release", "evict", "more", "cut"])
def test_their_pages_are_never_shared(ending: str) -> None:
    """However the sequence goes on, no more is found as a prefix than what was run whole."""
    _, engine = built(kv_cache_memory_bytes=12 * _PAGE_BYTES)
    assert engine.page_counts().num_pages == 12
    engine.forward([SequenceStep("a", TEXT, 1)])
    drafted = (8, 2, 11, 4, 6, 3, 9, 10)
    engine.forward_shallow([SequenceStep("a", drafted, 1)])
    match ending:
        case "keep":
            engine.keep("a", len(TEXT))
        case "release":
            engine.release("a")
        case "evict":
            engine.release("a")
            engine.forward([SequenceStep("b", (7,) * 11 * PAGE, 1)])
        case "more":
            engine.forward_shallow([SequenceStep("a", (1, 2, 3), 1)])
        case "cut":
            engine.keep("a", len(TEXT) + 3)
            engine.release("a")
    assert engine.find((*TEXT, *drafted, 1)).length <= 2 * PAGE
    check_pages(engine)


def test_a_whole_step_behind_them_is_refused() -> None:
    """It would attend to slots that were not written in deeper layers."""
    _, engine = built()
    engine.forward([SequenceStep("a", TEXT, 1)])
    engine.forward_shallow([SequenceStep("a", (8,), 1)])
    with pytest.raises(InvariantError, match="its last slots are shallow"):
        engine.forward([SequenceStep("a", (3,), 1)])
    with pytest.raises(InvariantError, match="cannot be forked"):
        engine.fork("a", "branch")
    check_pages(engine)
    engine.keep("a", len(TEXT))
    engine.forward([SequenceStep("a", (3,), 1)])


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_model_that_cannot_be_cut_so_is_refused(family: str) -> None:
    module = tiny_module(tiny_config(family, VOCAB), dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"model tiny: a GPT\w+ has no (list of layers|norm)"):
        PagedEngine(module, INFO, exit_head=tiny_exit(module, HEAD_IDS))


_PAGE_BYTES = 3 * 2 * 2 * 8 * 8 * PAGE
"""Layers, keys and values, heads, width, float64."""
