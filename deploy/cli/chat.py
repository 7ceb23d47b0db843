"""`outrider chat`: a conversation, on a terminal or through a pipe.

Answers go to standard output and everything else to standard error. On a terminal an error or an
interrupt ends an answer and not the chat; on a pipe an error ends the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, Self

from outrider.errors import OutriderError
from outrider.request import ChatMessage, Prompt

from .command import Arguments, command, option
from .connection import Connection, connected, connection_options
from .generate import printer
from .options import REQUEST_KEYS, error_line, request_fields, request_options
from .output import progress

if TYPE_CHECKING:
    from outrider.client import Client, Completion

PROMPT: Final = "> "
CHUNK_BYTES: Final = 65_536
"""Of a read of standard input."""
COMMANDS: Final = {
    "/stats": "figures of the answers so far",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/exit": "end (so does the end of input)",
}
ESCAPE: Final = "//"
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
        with LineReader() as lines:
            if lines.interactive and not progress.quiet:
                _say(f"{serves.model} at {connection.address}; /help lists what else there is")
            talk = Chat(client, connection, arguments, fields, one_answer=lines.interactive)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, talk.interrupt)
            try:
                while (line := await talk.line_or_interrupt(lines.read())) is not None:
                    if not await talk.handle(line):
                        break
            finally:
                loop.remove_signal_handler(signal.SIGINT)
        if lines.interactive and line is None:
            print()  # Ctrl-D and Ctrl-C leave the cursor on the line of the prompt.
    return 128 + signal.SIGINT if talk.interrupted.is_set() else 0


class Chat:
    """One conversation with a coordinator. A question counts once it has been answered."""

    def __init__(
        self,
        client: Client,
        connection: Connection,
        arguments: Arguments,
        fields: dict[str, Any],
        *,
        one_answer: bool,
    ) -> None:
        """`one_answer`: an error or an interrupt ends an answer, instead of the chat."""
        self._client = client
        self._arguments = arguments
        self._fields = fields
        self._one_answer = one_answer
        self._begin_answer = printer(connection)
        self._turns: list[ChatMessage] = []
        self._answers: list[tuple[Completion, float]] = []
        """With their seconds; those before a reset, too."""
        self._num_broken_off = 0
        self._answering: asyncio.Task[None] | None = None
        self.interrupted = asyncio.Event()
        """Set by Ctrl-C where it ends the chat."""

    def interrupt(self) -> None:
        """Breaks an answer off, or ends the chat."""
        if self._answering is not None:
            self._answering.cancel()
        if self._answering is None or not self._one_answer:
            self.interrupted.set()

    async def line_or_interrupt(self, reading: Any) -> str | None:
        """The line that is read; None as at the end of input if an interrupt comes instead."""
        line = asyncio.ensure_future(reading)
        ended = asyncio.ensure_future(self.interrupted.wait())
        try:
            await asyncio.wait((line, ended), return_when=asyncio.FIRST_COMPLETED)
            found: str | None = line.result() if line.done() else None
            return found
        finally:
            line.cancel()
            ended.cancel()

    async def handle(self, line: str) -> bool:
        """Takes a command or a message; False = the chat is over."""
        words = line.strip()
        if not words:
            return True
        if words.startswith("/") and not words.startswith(ESCAPE):
            return self._run_command(words)
        question = words[1:] if words.startswith(ESCAPE) else line
        self._answering = asyncio.create_task(self._answer(question))
        try:
            await asyncio.wait((self._answering,))
            if not self._answering.cancelled():
                self._answering.result()
        except OutriderError as error:
            if not self._one_answer:
                raise
            print(flush=True)
            why = error_line(error, self._arguments)
            _say(f"error: {why} (the message is not part of the conversation)")
        finally:
            self._answering.cancel()  # It still runs where this task was cancelled itself.
            self._answering = None
        return True

    def _run_command(self, command: str) -> bool:
        if command == "/exit":
            return False
        if command == "/reset":
            self._turns.clear()
            _say("the conversation begins anew")
        elif command == "/stats":
            for text in self._figures():
                _say(text)
            _say(f"the conversation has {len(self._turns)} messages")
        else:
            if command != "/help":
                _say(f"{command}: there is no such command; a message that begins so takes //")
            for name, purpose in COMMANDS.items():
                _say(f"{name:8}{purpose}")
        return True

    async def _answer(self, question: str) -> None:
        from outrider.client import CompletionBuilder, GenerateRequest, Tokens

        request = GenerateRequest(self._prompt(question), **self._fields)
        builder = CompletionBuilder()
        show = self._begin_answer()
        start = time.perf_counter()
        try:
            async with aclosing(self._client.generate(request)) as events:
                async for event in events:
                    builder.add(event)
                    if isinstance(event, Tokens):
                        show(event)
            self._answers.append((builder.build(), time.perf_counter() - start))
            self._keep(question, builder.text)
            print(flush=True)
        except asyncio.CancelledError:
            self._num_broken_off += 1
            if builder.text:
                self._keep(question, builder.text)
            print(flush=True)
            _say("broken off")
            raise

    def _prompt(self, question: str) -> Prompt:
        system = self._arguments.system
        if self._arguments.raw:
            before = [] if system is None else [system]
            return "\n".join([*before, *(turn.content for turn in self._turns), question])
        first = [] if system is None else [ChatMessage("system", system)]
        return (*first, *self._turns, ChatMessage("user", question))

    def _keep(self, question: str, answer: str) -> None:
        self._turns += [ChatMessage("user", question), ChatMessage("assistant", answer)]

    def _figures(self) -> list[str]:
        broken = f" and {self._num_broken_off} broken off" if self._num_broken_off else ""
        if not self._answers:
            return [f"no answers{broken} yet" if not broken else f"no whole answers{broken}"]
        done = [completion for completion, _ in self._answers]
        seconds = sum(seconds for _, seconds in self._answers)
        tokens = sum(one.usage.completion_tokens for one in done)
        rounds = sum(one.metrics.num_rounds for one in done)
        proposed = sum(one.metrics.num_draft_tokens for one in done)
        accepted = sum(one.metrics.num_accepted_draft_tokens for one in done)
        share = f"{accepted / proposed:.0%}" if proposed else "none"
        counts = Counter(str(origin) for one in done for origin in one.origins)
        origins = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        last = done[-1]
        return [
            f"{len(done)} answers{broken}: {tokens} tokens ({origins})",
            f"{tokens / seconds if seconds else 0:.1f} tokens/s; {rounds} rounds, "
            f"{tokens / rounds if rounds else 0:.2f} tokens per round; "
            f"acceptance {share} of {proposed} draft tokens",
            f"last answer: {last.usage.prompt_tokens} prompt tokens, "
            f"{last.usage.completion_tokens} new, first after "
            f"{last.metrics.time_to_first_token_ms:.0f} ms, {last.metrics.num_rounds} rounds, "
            f"rule {last.rule}, seed {last.seed}, {last.finish_reason}",
        ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class LineReader:
    """Reads standard input line by line. On a terminal a line may be edited and recalled.

    A thread waits for it and is left behind when the program ends: nothing else can end a read of a
    terminal."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._buffer = b""
        self._terminal: list[Any] | None = None
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def __enter__(self) -> Self:
        if self.interactive:
            import readline  # noqa: F401 - gives `input` its editing
            import termios

            self._terminal = termios.tcgetattr(self._descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            # A line that was being edited has left the terminal without echo.
            import termios

            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._terminal)

    async def read(self) -> str | None:
        """The next line without its end; None after the last one."""
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str | None] = loop.create_future()

        def deliver(found: str | None, error: Exception | None) -> None:
            if line.cancelled():
                return
            if error is not None:
                line.set_exception(error)
            else:
                line.set_result(found)

        def work() -> None:
            found, error = None, None
            try:
                found = self._ask() if self.interactive else self._take()
            except (OSError, ValueError) as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # The loop has been closed meanwhile.
                loop.call_soon_threadsafe(deliver, found, error)

        threading.Thread(target=work, name="lines", daemon=True).start()
        return await line

    def _ask(self) -> str | None:
        try:
            return input(PROMPT)
        except EOFError:
            return None

    def _take(self) -> str | None:
        """Reads past Python's own buffer, whose lock the interpreter would wait for at its end."""
        while b"\n" not in self._buffer and (chunk := os.read(self._descriptor, CHUNK_BYTES)):
            self._buffer += chunk
        if not self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace").removesuffix("\r")
