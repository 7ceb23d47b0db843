"""`outrider chat`: a conversation, on a terminal or through a pipe.

Answers go to standard output and everything else to standard error. On a terminal an error or an
interrupt ends an answer and not the chat; on a pipe an error ends the command.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError
from outrider.request import ChatMessage, Prompt

from .command import Arguments, command, option
from .generate import Printer, figures, receive
from .options import (
    REQUEST_KEYS,
    connected,
    connection_options,
    error_line,
    request_fields,
    request_options,
)
from .output import progress

if TYPE_CHECKING:
    from outrider.client import Client, Completion

COMMANDS = {
    "/stats": "figures of the answers so far",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/exit": "end (so does the end of input)",
}
ESCAPE = "//"
"""A line that begins so is a message that begins with one stroke."""


@command(
    "chat",
    option("--system", metavar="TEXT", help="a system message to begin with"),
    option("--raw", is_flag=True, help="go on with the plain text: no chat template"),
    *request_options(max_tokens=512),
    *connection_options(without=REQUEST_KEYS),
)
def chat(arguments: Arguments) -> int:
    """Talks until the end of input or `/exit`."""
    fields = request_fields(arguments)  # What is wrong shows before anything is started.
    return asyncio.run(_run(arguments, fields))


async def _run(arguments: Arguments, fields: dict[str, Any]) -> int:
    async with connected(arguments) as connection, connection.client() as client:
        serves = await client.describe()
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if on_terminal and not progress.quiet:
            _say(f"{serves.model} at {connection.address}; /help lists what else there is")
        talk = Chat(client, Printer(connection.tokenizer_directory), arguments, fields, on_terminal)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, talk.interrupt)
        try:
            with _restored_terminal(on_terminal):
                return await talk.run()
        finally:
            loop.remove_signal_handler(signal.SIGINT)


class Chat:
    """One conversation with a coordinator. A question counts once it has been answered."""

    def __init__(
        self,
        client: Client,
        printer: Printer,
        arguments: Arguments,
        fields: dict[str, Any],
        on_terminal: bool,
    ) -> None:
        self._client = client
        self._printer = printer
        self._arguments = arguments
        self._fields = fields
        self._on_terminal = on_terminal
        self._turns: list[ChatMessage] = []
        self._answers: list[Completion] = []
        """Those before a reset, too."""
        self._seconds = 0.0
        self._num_broken_off = 0
        self._waits_for: asyncio.Task[Any] | None = None
        """The line that is read, or the answer that comes."""

    def interrupt(self) -> None:
        """Breaks an answer off; where none comes, or not on a terminal, ends the chat."""
        if self._waits_for is not None:
            self._waits_for.cancel()

    async def run(self) -> int:
        """Until the end of input, `/exit` or an interrupt; returns the exit code."""
        while True:
            reading = await self._done(_read_line(self._on_terminal))
            line = None if reading.cancelled() else reading.result()
            if line is None:
                if self._on_terminal:
                    print()  # Ctrl-D and Ctrl-C leave the cursor on the line of the prompt.
                return 128 + signal.SIGINT if reading.cancelled() else 0
            words = line.strip()
            if words == "/exit":
                return 0
            if words.startswith("/") and not words.startswith(ESCAPE):
                self._run_command(words)
            elif words:
                question = words[1:] if words.startswith(ESCAPE) else line
                answering = await self._done(self._answer(question))
                if not answering.cancelled():
                    answering.result()  # Raises its error.
                elif not self._on_terminal:
                    return 128 + signal.SIGINT

    async def _done(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this work, once it is over or an interrupt has cancelled it."""
        self._waits_for = asyncio.create_task(work)
        try:
            await asyncio.wait((self._waits_for,))
        finally:
            self._waits_for.cancel()  # It still runs where this task was cancelled itself.
        return self._waits_for

    def _run_command(self, command: str) -> None:
        if command == "/reset":
            self._turns.clear()
            _say("the conversation begins anew")
        elif command == "/stats":
            broken = f" and {self._num_broken_off} broken off" if self._num_broken_off else ""
            if self._answers:
                said = figures(self._answers, self._seconds)
                num = len(self._answers)
                _say(f"{num} answer{'s' * (num > 1)}{broken}: {said}")
            else:
                _say(f"no whole answers{broken}")
            _say(f"the conversation has {len(self._turns)} messages")
        else:
            if command != "/help":
                _say(f"{command}: no such command; to send a message that starts with /, type //")
            for name, purpose in COMMANDS.items():
                _say(f"{name:8}{purpose}")

    async def _answer(self, question: str) -> None:
        from outrider.client import CompletionBuilder, GenerateRequest

        request = GenerateRequest(self._prompt(question), **self._fields)
        builder = CompletionBuilder()
        self._printer.begin()
        try:
            self._seconds += await receive(self._client, request, builder, self._printer.show)
            self._answers.append(builder.build())
            self._keep(question, builder.text)
            print(flush=True)
        except asyncio.CancelledError:
            self._num_broken_off += 1
            if builder.text:
                self._keep(question, builder.text)
            print(flush=True)
            _say("broken off")
            raise
        except OutriderError as error:
            if not self._on_terminal:
                raise
            print(flush=True)
            why = error_line(error, self._arguments)
            _say(f"error: {why} (the message is not part of the conversation)")

    def _prompt(self, question: str) -> Prompt:
        system = self._arguments.system
        if self._arguments.raw:
            before = [] if system is None else [system]
            return "\n".join([*before, *(turn.content for turn in self._turns), question])
        first = [] if system is None else [ChatMessage("system", system)]
        return (*first, *self._turns, ChatMessage("user", question))

    def _keep(self, question: str, answer: str) -> None:
        self._turns += [ChatMessage("user", question), ChatMessage("assistant", answer)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _restored_terminal(on_terminal: bool) -> Iterator[None]:
    """A line that was being edited leaves a terminal without echo."""
    if not on_terminal:
        yield
        return
    import readline  # noqa: F401 - gives `input` its editing
    import termios

    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


async def _read_line(on_terminal: bool) -> str | None:
    """The next line of standard input without its end; None after the last one. A thread waits for
    it and is left behind when the program ends: nothing else can end a read of a terminal."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def deliver(found: str | None) -> None:
        if not line.done():
            line.set_result(found)

    def work() -> None:
        found = None
        with suppress(EOFError, OSError, ValueError):
            found = input("> ") if on_terminal else _read_raw()
        with suppress(RuntimeError):  # The loop has been closed meanwhile.
            loop.call_soon_threadsafe(deliver, found)

    threading.Thread(target=work, name="lines", daemon=True).start()
    return await line


def _read_raw() -> str | None:
    """Past Python's buffer, whose lock the interpreter would wait for at its end."""
    with open(0, "rb", buffering=0, closefd=False) as file:
        line = file.readline()
    return line.decode("utf-8", "replace").rstrip("\r\n") if line else None
