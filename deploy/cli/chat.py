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
from collections.abc import Callable
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from outrider.errors import OutriderError
from outrider.request import ChatMessage, Prompt

from .command import Arguments, command, option
from .connection import connected, connection_options
from .generate import printer
from .options import REQUEST_KEYS, request_fields, request_options, spoken
from .output import progress

if TYPE_CHECKING:
    from outrider.client import Client, Completion, Tokens

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
        with LineReader(PROMPT) as lines:
            if lines.interactive and not progress.quiet:
                _say(f"{serves.model} at {connection.address}; /help lists what else there is")
            talk = Chat(
                client,
                Conversation(arguments.system, raw=arguments.raw),
                fields,
                begin_answer=printer(connection),
                explain=lambda error: spoken(error, arguments),
                forgiving=lines.interactive,
            )
            interrupts = _Interrupts(talk, one_answer=lines.interactive)
            try:
                while (line := await interrupts.may_end(lines.read())) is not None:
                    if not await talk.hear(line):
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


class Conversation:
    """The turns so far. A question counts only once it has been answered."""

    def __init__(self, system: str | None, *, raw: bool) -> None:
        """`raw`: without the model's template; a prompt is then all text so far."""
        self._system = system
        self._raw = raw
        self._turns: list[ChatMessage] = []

    def __len__(self) -> int:
        """Messages of both sides."""
        return len(self._turns)

    def prompt(self, question: str) -> Prompt:
        """What to ask for the next answer."""
        if self._raw:
            before = [] if self._system is None else [self._system]
            return "\n".join([*before, *(turn.content for turn in self._turns), question])
        system = [] if self._system is None else [ChatMessage("system", self._system)]
        return (*system, *self._turns, ChatMessage("user", question))

    def add(self, question: str, answer: str) -> None:
        """Keeps a question with its answer, or as much of that as came."""
        self._turns += [ChatMessage("user", question), ChatMessage("assistant", answer)]

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._turns.clear()


class Figures:
    """Sums over the answers of a chat, those before a reset too."""

    def __init__(self) -> None:
        self._num_answers = 0
        self._num_broken_off = 0
        self._num_tokens = 0
        self._num_rounds = 0
        self._num_proposed = 0
        self._num_accepted = 0
        self._seconds = 0.0
        self._origins: Counter[str] = Counter()
        self._last: Completion | None = None

    def add(self, completion: Completion, seconds: float) -> None:
        """Counts an answer that took so long, from the request to its last event."""
        self._num_answers += 1
        self._num_tokens += completion.usage.completion_tokens
        self._num_rounds += completion.metrics.num_rounds
        self._num_proposed += completion.metrics.num_draft_tokens
        self._num_accepted += completion.metrics.num_accepted_draft_tokens
        self._seconds += seconds
        self._origins.update(str(origin) for origin in completion.origins)
        self._last = completion

    def add_broken_off(self) -> None:
        """Counts an answer that was interrupted, whose figures never came."""
        self._num_broken_off += 1

    def lines(self) -> list[str]:
        """For people to read."""
        broken = f" and {self._num_broken_off} broken off" if self._num_broken_off else ""
        if self._last is None:
            return [f"no answers{broken} yet" if not broken else f"no whole answers{broken}"]
        last = self._last
        rounds = self._num_rounds
        rate = self._num_tokens / self._seconds if self._seconds else 0.0
        share = f"{self._num_accepted / self._num_proposed:.0%}" if self._num_proposed else "none"
        origins = ", ".join(f"{count} {name}" for name, count in sorted(self._origins.items()))
        return [
            f"{self._num_answers} answers{broken}: {self._num_tokens} tokens ({origins})",
            f"{rate:.1f} tokens/s; {rounds} rounds, "
            f"{self._num_tokens / rounds if rounds else 0:.2f} tokens per round; "
            f"acceptance {share} of {self._num_proposed} draft tokens",
            f"last answer: {last.usage.prompt_tokens} prompt tokens, "
            f"{last.usage.completion_tokens} new, first after "
            f"{last.metrics.time_to_first_token_ms:.0f} ms, {last.metrics.num_rounds} rounds, "
            f"rule {last.rule}, seed {last.seed}, {last.finish_reason}",
        ]


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
