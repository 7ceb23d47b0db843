"""What runs in the processes of `bench engine` (see `engine.EngineProcess`).

service   a target replica: the actor itself, without Ray
engine    the same engine without a service, and the library's module beside it; for one
          measurement another model in both
library   the library's own ways to generate, with its default threads
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.config import TargetConfig
from outrider.replica.process_setup import available_cores, build_engine, use_threads

from .engine_steps import generic_step_times, step_times
from .roles import Role, play
from .service_roles import target_role

if TYPE_CHECKING:
    from outrider.engine.interface import Engine

_MEMORY_PART: Final = 0.2
"""Of the machine's memory, for the keys and values of the library's continuous batching."""


@asynccontextmanager
async def _engine(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    config = TargetConfig(**setup["config"])
    num_threads = config.num_threads or available_cores()
    use_threads(num_threads)
    # Stated, they are those of every step: nothing runs beside it.
    engine = build_engine(replace(config, num_threads=num_threads), "target", num_threads)
    module = _library_module(config, num_threads)

    def answer(question: dict[str, Any]) -> Mapping[str, object]:
        if question["measure"] == "decode":
            return {"seconds": _decode(engine, question["prompts"], question["num_tokens"])}
        if question["measure"] == "steps":
            return step_times(engine, module, question["prompts"])
        return generic_step_times(module.device, deterministic=config.deterministic)

    yield Role({"dtype": engine.info.dtype}, answer)


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
    from outrider.models.loading import load_model

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
    """Its manager stays, so that what it does once is done before anything is measured; of the
    memory it gets less than by default, which others need beside it."""
    from transformers import ContinuousBatchingConfig

    outputs = module.generate_batch(
        [*prompts],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=_MEMORY_PART),
        persistent_manager=True,
        progress_bar=False,
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


ROLES: Final = {"service": target_role, "engine": _engine, "library": _library}
"""What a process can be."""


if __name__ == "__main__":
    play(ROLES)
