"""A process of ours that answers JSON lines, seen from both ends.

The first line says what the process is to be, and is answered when it is ready; after that one
answer follows each line, until its input ends. An answer with an `error` is a refusal.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from outrider.errors import ConfigError, Unavailable

START_TIMEOUT_S: Final = 900.0
"""What a process may take until it is ready; a model may have to be loaded."""
STOP_TIMEOUT_S: Final = 10.0
"""What it may take to end when told to, before it is killed."""
LINE_BYTES_MAX: Final = 2**26
"""Of one question or answer."""


class AnsweringProcess:
    """One process. An async context manager: entering starts it."""

    def __init__(
        self,
        module: str,
        name: str,
        setup: Mapping[str, object],
        *,
        advice: str = "",
        environment: Mapping[str, str] | None = None,
        python: Sequence[str] = (sys.executable, "-m"),
    ) -> None:
        """Runs `module`, called `name` in errors; `setup` is its first line. `advice` follows the
        news that it has ended. `environment` replaces this process's own; `python` is the
        interpreter, and what it is told before `module`."""
        self._command = (*python, module)
        self._name = name
        self._setup = setup
        self._advice = advice
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self.ready: dict[str, Any] = {}
        """Its answer to `setup`, once started."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            env=self._environment,
            start_new_session=True,  # an interrupt is for whoever measures; the input then ends
        )
        try:
            self.ready = await self.ask(self._setup, START_TIMEOUT_S)
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

    async def ask(self, question: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Its answer; one question at a time. Raises `Unavailable` where it is gone or takes longer
        than `timeout_s`, and `ConfigError` where it refuses."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise Unavailable(f"{self._name} has not been started")
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise Unavailable(f"{self._name} did not answer within {timeout_s:.0f} s") from None
        except (ConnectionError, ValueError) as error:
            raise Unavailable(f"{self._name} broke off: {error}") from error
        if not line.endswith(b"\n"):
            status = await process.wait()
            raise Unavailable(
                f"{self._name} {ending(status)}; what it said is on standard error{self._advice}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"{self._name}: {answer['error']}")
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
            pass  # It is killed below.
        finally:
            if process.returncode is None:
                process.kill()
        await process.wait()


class AnswerWriter:
    """The process's own end: has standard output for answers alone, and sends what libraries print
    to standard error. Make it before anything prints."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def write(self, answer: Mapping[str, object]) -> None:
        """Answers the line that was read last."""
        self._output.write(json.dumps(answer) + "\n")
        self._output.flush()


def ending(status: int) -> str:
    """How a process ended, by what waiting for it returned."""
    if status != -signal.SIGKILL:
        return f"ended with exit status {status}"
    return "was killed, as the system does where memory runs out"
