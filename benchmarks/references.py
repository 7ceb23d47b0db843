"""Sides of a measurement that are no services: a model in a process of its own.

A slow baseline is not a speed-up, so plain decoding through the services is held against the engine
alone and against the library's own `generate`. The process reads requests from its standard input,
one JSON object a line, and answers each on its standard output (`reference_process`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final, Self

from outrider.errors import ConfigError, Unavailable
from outrider.limits import DEADLINE_MS_MAX

from .measurement import Completion, Decoding, Side
from .prompts import BenchPrompt

START_TIMEOUT_S: Final = 900.0
"""What a reference may take to load its model."""
STOP_TIMEOUT_S: Final = 10.0
"""What it may take to end when told to, before it is killed."""
LINE_BYTES_MAX: Final = 2**24
"""Of one request or answer."""
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """What a reference loads: the target of the deployment, once more."""

    directory: str
    """Where its files are."""
    dtype: str
    device: str
    num_threads: int
    """Of the target's steps; the engine alone gets as many. 0 = torch's default, which `generate`
    always has."""
    trust_remote_code: bool = False


class ReferenceProcess:
    """One reference. An async context manager: entering loads the model."""

    def __init__(self, side: Side, model: ReferenceModel, *, raw: bool) -> None:
        """`side` is `ENGINE` or `TRANSFORMERS`; `raw` leaves the model's chat template out."""
        self._side = side
        self._setup = {"side": side.value, "raw": raw, **asdict(model)}
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.reference_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            env=reference_environment(os.environ),
            start_new_session=True,  # an interrupt is for whoever measures; the input then ends
        )
        try:
            await self._ask(self._setup, START_TIMEOUT_S)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt plainly; one at a time. Raises `Unavailable` where the process is gone
        and `ConfigError` where it refuses."""
        started_s = time.perf_counter()
        request = {
            "prompt": prompt.text,
            "max_tokens": decoding.max_tokens,
            "temperature": decoding.temperature,
            "rule": decoding.rule.value,
            "seed": decoding.seed,
        }
        answer = await self._ask(request, DEADLINE_MS_MAX / 1000)
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

    async def _ask(self, request: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise Unavailable(f"the {self._side.value} reference has not been started")
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise Unavailable(
                f"the {self._side.value} reference did not answer within {timeout_s:.0f} s"
            ) from None
        except (ConnectionError, ValueError) as error:
            raise Unavailable(f"the {self._side.value} reference broke off: {error}") from error
        if not line.endswith(b"\n"):
            raise Unavailable(
                f"the {self._side.value} reference ended; its standard error says why "
                "(--no-reference measures without it)"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"the {self._side.value} reference: {answer['error']}")
        return answer

    async def _stop(self) -> None:
        """Ends the process: it stops at the end of its input, and is killed if it does not."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def reference_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what others set to bound the threads of theirs."""
    return {key: value for key, value in environment.items() if key not in _THREAD_VARIABLES}
