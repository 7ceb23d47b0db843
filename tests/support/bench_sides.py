"""Stand-ins of benchmarks: scripted sides, and roles of processes that run in this process."""

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from outrider.bench.measurement import BenchClient, Completion
from outrider.bench.speedup import Subject
from outrider.interfaces.request import GenerateRequest
from tests.support.models import byte_level_tokenizer, save_tiny_model
from tests.support.stack import running_stack

Script = Callable[[GenerateRequest], tuple[int, float]]
"""Returns the number of tokens and the seconds of a completion."""


class ScriptedSide(BenchClient):
    """Records its calls, for tests on a virtual clock."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[GenerateRequest] = []
        self.starts: list[float] = []
        self.running = self.most_running = 0

    @property
    def log(self) -> list[tuple[str, str]]:
        kinds = ("drafted" if one.num_draft_tokens else "plain" for one in self.calls)
        return [(str(one.prompt), kind) for one, kind in zip(self.calls, kinds, strict=True)]

    async def generate(self, request: GenerateRequest) -> Completion:
        self.calls.append(request)
        self.starts.append(started_s := asyncio.get_running_loop().time())
        num_tokens, seconds = self.script(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1
        drafted = 4 * num_tokens if request.num_draft_tokens else 0
        return Completion(
            token_ids=tuple(range(num_tokens)),
            started_s=started_s,
            seconds=seconds,
            num_rounds=num_tokens // 2 if request.num_draft_tokens else num_tokens,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=drafted // 4,
            chunk_s=(seconds,),
        )


def subject_of(side: BenchClient, **changes: Any) -> Subject:
    known: dict[str, Any] = {
        "client": side,
        "model": "demo",
        "draft_model": "ngram",
        "dtype": "bfloat16",
        "num_draft_tokens": 8,
        "target": None,
    }
    return Subject(**(known | changes))


class ProcessHere:
    """Replaces `outrider.bench.processes.Process`: plays the role in this process."""

    def __init__(self, role: str, name: str, setup: dict[str, Any], **_: object) -> None:
        module, _, function = role.partition(":")
        self._opened = getattr(importlib.import_module(module), function)(setup)

    async def __aenter__(self) -> Self:
        self.address = await self._opened.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._opened.__aexit__(*error)

    async def ask(self, question: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        return {"cpu_s": time.process_time()}


def tiny_pair(directory: Path) -> tuple[str, ...]:
    """Flags for a target and a draft with random weights, and one prompt."""
    tokenizer = byte_level_tokenizer()
    for seed in (1, 2):
        save_tiny_model(directory / str(seed), vocab_size=320, seed=seed, tokenizer=tokenizer)
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": "The quick brown fox", "category": "chat"}')
    return (
        "--model",
        str(directory / "1"),
        "--draft-model",
        str(directory / "2"),
        "--raw",
        "--prompts",
        str(prompts),
        "--target-num-threads",
        "1",
        "--device",
        "cpu",
    )


def pair_here(
    directory: Path, engine_of: Callable[[Any], Any], delays: list[float] | None = None
) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """Replaces `outrider.bench.processes.running_pair`: runs the services in this process, on the
    engines that `engine_of` makes of their configurations."""
    asked, places = [] if delays is None else delays, count()

    @asynccontextmanager
    async def coordinator(target: Any, draft: Any, look_ahead: int = 0) -> AsyncIterator[Any]:
        engines = engine_of(target), draft and engine_of(draft)
        place = directory / str(next(places))
        async with running_stack(*engines, place, look_ahead=look_ahead) as stack:
            yield stack.client, None

    @asynccontextmanager
    async def running_pair(
        target: Any, draft: Any, _: Any, delay_ms: float = 0.0
    ) -> AsyncIterator[Any]:
        asked.append(delay_ms)
        yield SimpleNamespace(coordinator=partial(coordinator, target, draft))

    return running_pair
