"""Lines of standard input for a program that runs an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

CHUNK_BYTES: Final = 65_536


class LineReader:
    """Reads standard input line by line, as a context manager.

    On a terminal a line may be edited and recalled, and is asked for by a prompt. A thread waits
    for it and is left behind when the program ends: nothing else can end a read of a terminal."""

    def __init__(self, prompt: str) -> None:
        """`prompt` is shown on a terminal only."""
        self._prompt = prompt
        self._descriptor = sys.stdin.fileno()
        self._buffer = b""
        self._ended = False
        self._terminal: list[Any] | None = None

    def __enter__(self) -> Self:
        if self.interactive:
            import readline  # noqa: F401 - gives `input` its editing
            import termios

            self._terminal = termios.tcgetattr(self._descriptor)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._terminal is not None:
            # A line that was being edited has left the terminal without echo.
            import termios

            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._terminal)

    @property
    def interactive(self) -> bool:
        """Whether a person sits at both ends."""
        return sys.stdin.isatty() and sys.stdout.isatty()

    async def read(self) -> str | None:
        """The next line without its end; None after the last one."""
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str | None] = loop.create_future()
        read = self._ask if self.interactive else self._take

        def work() -> None:
            found = _result_of(read)
            # Nobody waits any more where the loop has been closed meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver, found)

        def deliver(found: str | Exception | None) -> None:
            if line.cancelled():
                return
            if isinstance(found, Exception):
                line.set_exception(found)
            else:
                line.set_result(found)

        threading.Thread(target=work, name="lines", daemon=True).start()
        return await line

    def _ask(self) -> str | None:
        try:
            return input(self._prompt)
        except EOFError:
            return None

    def _take(self) -> str | None:
        """Reads past Python's own buffer, whose lock the interpreter would wait for at its end."""
        while b"\n" not in self._buffer and not self._ended:
            chunk = os.read(self._descriptor, CHUNK_BYTES)
            self._buffer += chunk
            self._ended = not chunk
        if not self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace").removesuffix("\r")


def _result_of(read: Callable[[], str | None]) -> str | Exception | None:
    """What was read, or why nothing was: for whoever waits on another thread."""
    try:
        return read()
    except (OSError, ValueError) as error:
        return error
