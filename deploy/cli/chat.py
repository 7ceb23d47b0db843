"""`outrider chat`: a conversation, on a terminal or through a pipe.

Answers go to standard output and everything else to standard error. On a terminal an error or an
interrupt ends an answer and not the chat; on a pipe an error ends the command.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from outrider.errors import OutriderError

from .connection import Connection, add_connection_flags, connected
from .conversation import Conversation, Figures
from .naming import spoken
from .progress import progress
from .request import OWN_FLAGS, add_request_flags, request_fields
from .stdin_lines import LineReader

if TYPE_CHECKING:
    from outrider.client import Client, Tokens

PROMPT: Final = "> "
COMMANDS: Final = {
    "/stats": "figures of the answers so far",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/exit": "end (so does the end of input)",
}
ESCAPE: Final = "//"
"""A line that begins so is a message that begins with one stroke."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How to begin, the requests' fields, and the deployment to ask."""
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--raw", action="store_true", help="go on with the plain text: no chat template"
    )
    add_request_flags(parser, max_tokens=512)
    add_connection_flags(parser, without=OWN_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Talks until the end of input or `/exit`."""
    fields = request_fields(arguments)  # What is wrong shows before anything is started.
    return asyncio.run(_run(arguments, fields))


async def _run(arguments: argparse.Namespace, fields: dict[str, Any]) -> int:
    async with connected(arguments) as connection, connection.client() as client:
        serves = await client.describe()
        with LineReader(PROMPT) as lines:
            if lines.interactive and not progress.quiet:
                _say(f"{serves.model} at {connection.address}; /help lists what else there is")
            chat = Chat(
                client,
                Conversation(arguments.system, raw=arguments.raw),
                fields,
                begin_answer=_shower(connection),
                explain=lambda error: spoken(error, arguments),
                forgiving=lines.interactive,
            )
            interrupts = _Interrupts(chat, one_answer=lines.interactive)
            try:
                while (line := await interrupts.may_end(lines.read())) is not None:
                    if not await chat.hear(line):
                        break
            finally:
                interrupts.ignore()
        if lines.interactive and line is None:
            print()  # Whoever pressed Ctrl-D or Ctrl-C is still on the line of the prompt.
    return interrupts.exit_code


class Chat:
    """One conversation with a coordinator."""

    def __init__(
        self,
        client: Client,
        conversation: Conversation,
        fields: dict[str, Any],
        *,
        begin_answer: Callable[[], Callable[[Tokens], None]],
        explain: Callable[[OutriderError], str],
        forgiving: bool,
    ) -> None:
        """`fields` are those of every request. `begin_answer` gives what shows the tokens of one
        answer, `explain` an error's line. `forgiving`: an error is told and the chat goes on,
        instead of being raised."""
        self._client = client
        self._conversation = conversation
        self._fields = fields
        self._begin_answer = begin_answer
        self._explain = explain
        self._forgiving = forgiving
        self._figures = Figures()
        self._answering: asyncio.Task[None] | None = None

    def interrupt(self) -> bool:
        """Breaks the answer off that is being given; False where there is none."""
        if self._answering is None:
            return False
        self._answering.cancel()
        return True

    async def hear(self, line: str) -> bool:
        """Takes a line: a command or a message. False = the chat is over. Raises what the
        coordinator refuses a request with, unless it is forgiving."""
        words = line.strip()
        if not words:
            return True
        if words.startswith("/") and not words.startswith(ESCAPE):
            return self._obey(words)
        question = words[1:] if words.startswith(ESCAPE) else line
        self._answering = asyncio.create_task(self._answer(question))
        try:
            await asyncio.wait((self._answering,))
            if not self._answering.cancelled():
                self._answering.result()
        except OutriderError as error:
            if not self._forgiving:
                raise
            print(flush=True)
            _say(f"error: {self._explain(error)} (the message is not part of the conversation)")
        finally:
            # Still running where this task was cancelled itself.
            self._answering.cancel()
            self._answering = None
        return True

    def _obey(self, command: str) -> bool:
        if command == "/exit":
            return False
        if command == "/reset":
            self._conversation.reset()
            _say("the conversation begins anew")
        elif command == "/stats":
            for text in self._figures.lines():
                _say(text)
            _say(f"the conversation has {len(self._conversation)} messages")
        else:
            if command != "/help":
                _say(f"{command}: there is no such command; a message that begins so takes //")
            for name, purpose in COMMANDS.items():
                _say(f"{name:8}{purpose}")
        return True

    async def _answer(self, question: str) -> None:
        from outrider.client import CompletionBuilder, GenerateRequest, Tokens

        request = GenerateRequest(self._conversation.prompt(question), **self._fields)
        builder = CompletionBuilder()
        show = self._begin_answer()
        start = time.perf_counter()
        try:
            async with aclosing(self._client.generate(request)) as events:
                async for event in events:
                    builder.add(event)
                    if isinstance(event, Tokens):
                        show(event)
            completion = builder.build()
        except asyncio.CancelledError:
            self._figures.add_broken_off()
            if builder.text:
                self._conversation.add(question, builder.text)
            print(flush=True)
            _say("broken off")
            raise
        self._figures.add(completion, time.perf_counter() - start)
        self._conversation.add(question, completion.text)
        print(flush=True)


class _Interrupts:
    """What Ctrl-C does: it breaks an answer off, and ends the chat where there is none or where
    nobody could go on with it."""

    def __init__(self, chat: Chat, *, one_answer: bool) -> None:
        """`one_answer`: the chat goes on after it was interrupted in an answer."""
        self._chat = chat
        self._one_answer = one_answer
        self._end = asyncio.Event()
        self.exit_code = 0
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._received)

    def ignore(self) -> None:
        """From here on an interrupt is what it is elsewhere."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def may_end(self, reading: Any) -> str | None:
        """The line that is read; None as at the end of input if an interrupt comes instead."""
        line = asyncio.ensure_future(reading)
        ended = asyncio.ensure_future(self._end.wait())
        try:
            await asyncio.wait((line, ended), return_when=asyncio.FIRST_COMPLETED)
            found: str | None = line.result() if line.done() else None
            return found
        finally:
            line.cancel()
            ended.cancel()

    def _received(self) -> None:
        if not (self._chat.interrupt() and self._one_answer):
            self.exit_code = 128 + signal.SIGINT
            self._end.set()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shower(connection: Connection) -> Callable[[], Callable[[Tokens], None]]:
    """What begins an answer: its text in the colours of the tokens' origins on a terminal, plain
    text else."""
    if not sys.stdout.isatty():
        return lambda: lambda event: print(event.text_delta, end="", flush=True)
    from rich.console import Console

    from .colored_text import OriginPainter, TokenLengths

    console, lengths = Console(), TokenLengths(connection.tokenizer_directory)
    if not progress.quiet:
        Console(stderr=True).print(OriginPainter(console, lengths).legend())

    def begin() -> Callable[[Tokens], None]:
        lengths.begin()
        return OriginPainter(console, lengths).show

    return begin
