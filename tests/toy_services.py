"""Services on toy engines, with text."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from models import byte_level_tokenizer
from stack import Stack, running_stack
from toy_engine import ToyEngine

from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.tokenizer import TokenizerText

VOCAB = 320
"""Of toy models with text."""


def toy_text() -> TokenizerText:
    """A byte of text a token, or a few."""
    return TokenizerText(byte_level_tokenizer(VOCAB), "toy")


def toy_stack(directory: Path, **options: Any) -> AbstractAsyncContextManager[Stack]:
    """With text, and a draft that is its target's equal."""
    target, draft = (ToyEngine(VOCAB, salt=1, max_model_len=256) for _ in range(2))
    return running_stack(target, draft, directory, text=toy_text(), **options)


def slow_stack(directory: Path, **options: Any) -> AbstractAsyncContextManager[Stack]:
    """With a target that takes 20 ms a step, so that a request lasts as long as a test wants."""
    spec = EmulatedSpec(
        vocab_size=VOCAB, support=8, max_model_len=8192, verify_ms=20.0, draft_ms=1.0
    )
    target, draft = EmulatedEngine(spec, "target"), EmulatedEngine(spec, "draft")
    return running_stack(target, draft, directory, text=toy_text(), **options)
