"""An engine's steps against the library's own forward pass, by turns in one process.

the target            on whichever faster modules it gets
a random GPT-NeoX     on the generic path: its linear layers are packed and its attention is on
                      pages, as any model's; all else is the library's
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from outrider.engine.interface import Engine

CACHED_TOKENS: Final = 256
NEW_TOKENS: Final = 5
ROWS_SESSIONS: Final = 16
"""Sessions of the steps whose rows are compared."""
REPETITIONS: Final = 50
WARM_UP: Final = 5
GENERIC_SHAPE: Final = {
    "vocab_size": 50_304,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3_072,
    "max_position_embeddings": 2_048,
}
"""Of Pythia 160M. A step reads 124 million weights; one of the demo target reads 135."""


def step_times(engine: Engine, module: Any, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """The figures of a model that the engine has and, as `module`, the library. `prompts` has one
    of `CACHED_TOKENS` for each of `ROWS_SESSIONS`."""
    verify, forward = _against_the_library(engine, module, prompts[0])
    return {
        "verify_step_ms": verify,
        "transformers_forward_ms": forward,
        "rows_80_over_16": _rows_80_over_16(engine, prompts),
    }


def generic_step_times(
    device: torch.device, *, deterministic: bool = False, shape: Mapping[str, int] = GENERIC_SHAPE
) -> dict[str, float]:
    """The same of a random GPT-NeoX in bfloat16, which is made here; `shape` is for its
    configuration."""
    module, engine = _generic_model(device, deterministic, shape)
    verify, forward = _against_the_library(engine, module, [0] * CACHED_TOKENS)
    return {"generic_verify_step_ms": verify, "generic_transformers_forward_ms": forward}


def _generic_model(
    device: torch.device, deterministic: bool, shape: Mapping[str, int]
) -> tuple[Any, Engine]:
    """A module that the library has, and an engine with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    from outrider.engine.interface import ModelInfo
    from outrider.engine.paged_engine import PagedEngine
    from outrider.models.module_replacement import speed_up

    config = GPTNeoXConfig(**shape)
    module = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    module = module.requires_grad_(False).to(device).eval()
    own = copy.deepcopy(module)
    speed_up(own)
    length = config.max_position_embeddings
    info = ModelInfo("a random GPT-NeoX", config.vocab_size, length, "bfloat16", (), "", "")
    return module, PagedEngine(own, info, max_num_seqs=1, deterministic=deterministic)


def _against_the_library(engine: Engine, module: Any, prompt: Sequence[int]) -> tuple[float, float]:
    """Medians, ms, of `NEW_TOKENS` after `CACHED_TOKENS` of one session: of the engine's step, and
    of the library's forward pass on a cache of its own."""
    import torch
    from transformers import DynamicCache

    from outrider.engine.interface import SequenceStep

    cached, new = tuple(prompt[:CACHED_TOKENS]), tuple(prompt[:NEW_TOKENS])
    cache = DynamicCache(config=module.config)
    new_ids = torch.tensor([new], device=module.device)

    def step() -> None:
        engine.forward([SequenceStep("step", new, NEW_TOKENS)])

    def library() -> None:
        module(input_ids=new_ids, past_key_values=cache, use_cache=True)

    def undo() -> None:
        new_slots = cache.get_seq_length() - CACHED_TOKENS
        if new_slots:
            cache.crop(-new_slots)
        engine.keep("step", CACHED_TOKENS)

    with torch.inference_mode():
        engine.forward([SequenceStep("step", cached, 0)])
        ids = torch.tensor([cached], device=module.device)
        module(input_ids=ids, past_key_values=cache, use_cache=True)
        verify, forward = alternately([step, library], undo)
    engine.release("step")
    return verify, forward


def _rows_80_over_16(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """A step of all sessions with `NEW_TOKENS` each over one with a token each."""
    from outrider.engine.interface import SequenceStep

    names = [f"rows-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.forward([SequenceStep(name, tuple(prompt[:CACHED_TOKENS]), 0)])

    def step(num_rows: int) -> Callable[[], None]:
        new = tuple(prompts[0][:num_rows])
        steps = [SequenceStep(name, new, num_rows) for name in names]

        def run() -> None:
            engine.forward(steps)

        return run

    def undo() -> None:
        for name in names:
            engine.keep(name, CACHED_TOKENS)

    many, few = alternately([step(NEW_TOKENS), step(1)], undo)
    for name in names:
        engine.release(name)
    return many / few


def alternately(works: Sequence[Callable[[], None]], undo: Callable[[], None]) -> list[float]:
    """The median of each, ms; they take turns, and what each has done is undone."""
    times: list[list[float]] = [[] for _ in works]
    for index in range(-WARM_UP, REPETITIONS):
        for work, own in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            seconds = time.perf_counter() - started
            undo()
            if index >= 0:
                own.append(seconds * 1e3)
    return [median(own) for own in times]
