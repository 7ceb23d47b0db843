"""What runs in the processes of `bench engine` (see `engine.EngineProcess`).

service   a target replica: the actor itself, without Ray
engine    the same engine without a service, and the library's module beside it
library   the library's own ways to generate, with its default threads
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from outrider.config import TargetConfig
from outrider.hosting import available_cores, build_engine, use_threads

from .roles import Role, play

if TYPE_CHECKING:
    from outrider.engine.interface import Engine

CACHED_TOKENS: Final = 256
NEW_TOKENS: Final = 5
ROWS_SESSIONS: Final = 16
"""Sessions of the steps whose rows are compared."""
REPETITIONS: Final = 50
WARM_UP: Final = 5
_GRACE_S: Final = 1.0


@asynccontextmanager
async def _service(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    from target_service.actor import TargetActor

    actor = TargetActor()
    address = await actor.start(TargetConfig(**setup["config"]), log_directory="")
    try:
        yield Role({"address": address}, lambda _: {})
    finally:
        await actor.stop(_GRACE_S)


@asynccontextmanager
async def _engine(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    config = TargetConfig(**setup["config"])
    num_threads = config.num_threads or available_cores()
    use_threads(num_threads)
    # Stated, they are those of every step: nothing runs beside it.
    engine = build_engine(replace(config, num_threads=num_threads), "target", num_threads)
    module = _library_module(config, num_threads)

    def answer(question: dict[str, Any]) -> dict[str, object]:
        if question["measure"] == "decode":
            return {"seconds": _decode(engine, question["prompts"], question["num_tokens"])}
        return _step_times(engine, module, question["prompts"])

    yield Role({}, answer)


@asynccontextmanager
async def _library(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    from transformers import GenerationConfig

    module = _library_module(TargetConfig(**setup["config"]), None)
    module.generation_config.eos_token_id = None  # Nothing ends a text before its time.

    def answer(question: dict[str, Any]) -> dict[str, object]:
        prompts, num_tokens = question["prompts"], question["num_tokens"]
        config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        generate = {"generate": _one_by_one, "generate_batch": _in_a_batch}[question["measure"]]
        started = time.perf_counter()
        num_generated = generate(module, config, prompts)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "num_tokens": num_generated}

    yield Role({}, answer)


def _library_module(config: TargetConfig, num_threads: int | None) -> Any:
    from outrider.engine.loading import load_model

    module, _ = load_model(
        Path(config.directory),
        name=config.model,
        dtype=config.dtype,
        device=config.device,
        num_threads=num_threads,
        trust_remote_code=config.trust_remote_code,
    )
    return module


def _one_by_one(module: Any, config: Any, prompts: Sequence[Sequence[int]]) -> int:
    import torch

    num_tokens = 0
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=module.device)
            output = module.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
            num_tokens += output.shape[1] - len(prompt)
    return num_tokens


def _in_a_batch(module: Any, config: Any, prompts: Sequence[Sequence[int]]) -> int:
    """Its manager stays, so that what it does once is done before anything is measured."""
    outputs = module.generate_batch(
        [*prompts], generation_config=config, persistent_manager=True, progress_bar=False
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def _decode(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Seconds in which every prompt is continued by its likeliest `num_tokens`, all in step."""
    import torch

    from outrider.engine.interface import SequenceStep

    names = [f"decode-{index}" for index in range(len(prompts))]
    started = time.perf_counter()
    try:
        rows = []
        for name, prompt in zip(names, prompts, strict=True):
            rows += engine.forward([SequenceStep(name, tuple(prompt), num_logits=1)])
        for _ in range(num_tokens - 1):
            token_ids = torch.cat(rows).argmax(dim=1).tolist()
            rows = engine.forward(
                [
                    SequenceStep(name, (token_id,), num_logits=1)
                    for name, token_id in zip(names, token_ids, strict=True)
                ]
            )
        torch.cat(rows).argmax(dim=1).tolist()
        return time.perf_counter() - started
    finally:
        for name in names:
            engine.release(name)


def _step_times(engine: Engine, module: Any, prompts: Sequence[Sequence[int]]) -> dict[str, object]:
    """Medians, ms; what is compared takes turns. `prompts` has one for each session."""
    import torch
    from transformers import DynamicCache

    from outrider.engine.interface import SequenceStep

    names = [f"step-{index}" for index in range(ROWS_SESSIONS)]
    for name, prompt in zip(names, prompts, strict=True):
        engine.forward([SequenceStep(name, tuple(prompt[:CACHED_TOKENS]), num_logits=0)])
    new = tuple(prompts[0][:NEW_TOKENS])
    cache = DynamicCache(config=module.config)
    ids = torch.tensor([prompts[0][:CACHED_TOKENS]], device=module.device)
    new_ids = torch.tensor([new], device=module.device)

    def step(num_sessions: int, num_rows: int) -> Callable[[], None]:
        steps = [SequenceStep(name, new[:num_rows], num_rows) for name in names[:num_sessions]]

        def run() -> None:
            engine.forward(steps)

        return run

    def library() -> None:
        module(input_ids=new_ids, past_key_values=cache, use_cache=True)

    def undo() -> None:
        new_slots = cache.get_seq_length() - CACHED_TOKENS
        if new_slots:
            cache.crop(-new_slots)
        for name in names:
            engine.keep(name, CACHED_TOKENS)

    with torch.inference_mode():
        module(input_ids=ids, past_key_values=cache, use_cache=True)
        verify, forward = _alternately([step(1, NEW_TOKENS), library], undo)
        many, few = _alternately([step(ROWS_SESSIONS, NEW_TOKENS), step(ROWS_SESSIONS, 1)], undo)
    for name in names:
        engine.release(name)
    return {
        "verify_step_ms": verify,
        "transformers_forward_ms": forward,
        "rows_80_over_16": many / few,
    }


def _alternately(works: Sequence[Callable[[], None]], undo: Callable[[], None]) -> list[float]:
    """The median of each, ms."""
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


ROLES: Final = {"service": _service, "engine": _engine, "library": _library}
"""What a process can be."""


if __name__ == "__main__":
    play(ROLES)
