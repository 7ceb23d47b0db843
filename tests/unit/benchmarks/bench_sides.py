"""A side that decodes nothing: it takes what it is told to take, on a clock of its own; and a
process that is none."""

import asyncio
import importlib
import json
from collections.abc import Callable
from typing import Any, Self

from benchmarks.measurement import BenchClient, Completion, Decoding
from benchmarks.prompts import BenchPrompt

Script = Callable[[BenchPrompt, Decoding], tuple[int, float]]
"""Number of tokens and seconds of a completion."""


class ScriptedSide(BenchClient):
    """Records every call, and the most that ran at a time. A request over [t, t + seconds] ends
    before one that takes longer, whichever was asked first."""

    def __init__(self, script: Script, log: list[tuple[str, str]] | None = None) -> None:
        self.script = script
        self.calls: list[tuple[BenchPrompt, Decoding]] = []
        self.log = [] if log is None else log
        self.running = 0
        self.most_running = 0
        self.now = 0.0
        self.cancelled = 0

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        self.calls.append((prompt, decoding))
        self.log.append((prompt.text, "plain" if decoding.num_draft_tokens == 0 else "drafted"))
        num_tokens, seconds = self.script(prompt, decoding)
        started = self.now
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(round(seconds)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        self.now = max(self.now, started + seconds)
        drafted = 4 * num_tokens if decoding.num_draft_tokens else 0
        return Completion(
            token_ids=tuple(range(num_tokens)),
            started_s=started,
            seconds=seconds,
            num_rounds=num_tokens // 2 if decoding.num_draft_tokens else num_tokens,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=drafted // 4,
        )


class ProcessHere:
    """A `benchmarks.processes.Process` whose role is played in this process."""

    def __init__(self, role: str, name: str, setup: dict[str, Any], **_: object) -> None:
        module, _, function = role.partition(":")
        self._opened = getattr(importlib.import_module(module), function)(setup)

    async def __aenter__(self) -> Self:
        self._role = await self._opened.__aenter__()
        self.ready = self._role.ready
        self.address = self.ready.get("address")
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._opened.__aexit__(*error)

    async def ask(self, question: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            json.dumps(self._role.answer(json.loads(json.dumps(question))))
        )
        return found
