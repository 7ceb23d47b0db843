"""Processes that `bench overhead` starts: JSON lines in, one answer to each.

The first line says what the process is to be, and is answered when it listens; it ends with its
input. `overhead_roles` is what runs there.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from outrider.errors import ConfigError, Unavailable

START_TIMEOUT_S: Final = 900.0
"""What a process may take until it listens; a model may have to be loaded."""
ANSWER_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0
"""What it may take to end when told to, before it is killed."""
LINE_BYTES_MAX: Final = 2**26
"""Of one answer."""


class RoleProcess:
    """One process. An async context manager: entering starts it."""

    def __init__(self, role: str, setup: Mapping[str, object]) -> None:
        """`role` and `setup` are what `overhead_roles` knows."""
        self._role = role
        self._setup = {"role": role, **setup}
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""
        """HOST:PORT of its gRPC server, once started."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.overhead_roles",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            start_new_session=True,  # an interrupt is for whoever measures; the input then ends
        )
        try:
            answer = await self._ask(self._setup, START_TIMEOUT_S)
            self.address = str(answer["address"])
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

    async def ask(self, question: str) -> dict[str, Any]:
        """Its answer. Raises `Unavailable` where it is gone, `ConfigError` where it refuses."""
        return await self._ask({"question": question}, ANSWER_TIMEOUT_S)

    async def _ask(self, line: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise Unavailable(f"the {self._role} process has not been started")
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(line).encode() + b"\n")
                await process.stdin.drain()
                data = await process.stdout.readline()
        except TimeoutError:
            raise Unavailable(
                f"the {self._role} process did not answer within {timeout_s:.0f} s"
            ) from None
        except (ConnectionError, ValueError) as error:
            raise Unavailable(f"the {self._role} process broke off: {error}") from error
        if not data.endswith(b"\n"):
            raise Unavailable(f"the {self._role} process ended; its standard error says why")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise ConfigError(f"the {self._role} process: {answer['error']}")
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
