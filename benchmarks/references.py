"""Sides of a measurement that are no services: a model in a process of its own.

A slow baseline is not a speed-up, so plain decoding through the services is held against the engine
alone and against the library's own `generate`, and speculative decoding against the library's own
ways to it (`reference_process`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from outrider.limits import DEADLINE_MS_MAX

from .answering import AnsweringProcess
from .measurement import Completion, Decoding, Side
from .prompts import BenchPrompt

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


PROMPT_LOOKUP_TOKENS: Final = 10
"""Tokens that the library's prompt lookup copies at most; it has no default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceDrafter:
    """The model that drafts for the deployment, once more."""

    directory: str
    """Where its files are."""
    name: str
    """What errors call it."""
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """What a reference loads: the target of the deployment, once more."""

    directory: str
    """Where its files are."""
    dtype: str
    device: str
    num_threads: int
    """In every step, as nothing runs beside it; plain `generate` has torch's default."""
    trust_remote_code: bool = False
    drafter: ReferenceDrafter | None = None
    """Of the side `ASSISTED`, which is not there without."""


class ReferenceProcess(AnsweringProcess):
    """One reference. An async context manager: entering loads the model."""

    def __init__(self, side: Side, model: ReferenceModel, *, raw: bool, advice: str = "") -> None:
        """`side` is `ENGINE` or one of the library's; `raw` leaves the model's chat template out;
        `advice` follows the news that it has ended."""
        super().__init__(
            "benchmarks.reference_process",
            f"the {side.value} reference",
            {"side": side.value, "raw": raw, **asdict(model)},
            advice=advice,
            environment=reference_environment(os.environ),
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a completion, once started."""
        return tuple(self.ready["eos_token_ids"])

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt; one at a time. Raises `Unavailable` where the process is gone
        and `ConfigError` where it refuses."""
        request = {
            "prompt": prompt.text,
            "max_tokens": decoding.max_tokens,
            "temperature": decoding.temperature,
            "rule": decoding.rule.value,
            "seed": decoding.seed,
        }
        return await decoded(self, request)


async def decoded(process: AnsweringProcess, request: Mapping[str, object]) -> Completion:
    """The completion that a process answers to `request`; raises as `ask` does."""
    started_s = time.perf_counter()
    answer = await process.ask(request, DEADLINE_MS_MAX / 1000)
    token_ids = tuple(answer["token_ids"])
    # The process's own time: what the pipe between adds is not the reference's.
    return Completion(
        token_ids=token_ids,
        started_s=started_s,
        seconds=float(answer["seconds"]),
        num_rounds=len(token_ids),
        num_draft_tokens=0,
        num_accepted_draft_tokens=0,
    )


def reference_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what others set to bound the threads of theirs."""
    return {key: value for key, value in environment.items() if key not in _THREAD_VARIABLES}
