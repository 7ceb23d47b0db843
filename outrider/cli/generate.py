"""`outrider generate PROMPT` streams one completion. `outrider chat` holds a conversation. Answers
go to standard output, everything else to standard error."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.errors import BadRequest, ConfigError, OutriderError
from outrider.interfaces.request import ChatMessage, GenerateRequest, Prompt, Tokens
from outrider.speculation.accept_reject import Origin

from . import options
from .command import Arguments, Option, argument, command, exclusive, json_option
from .output import progress, show

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from outrider.client import Client, Completion, CompletionBuilder

STYLES = {
    Origin.ACCEPTED: "green",
    Origin.CORRECTION: "bold red",
    Origin.BONUS: "bold cyan",
    Origin.STORED: "dim",
}


def _token_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is wrong; it must be whole numbers separated by commas")
    return tuple(int(part) for part in parts)


@command(
    "generate",
    argument(
        "prompt",
        "the text to continue, or - for standard input (without its last line feed)",
        required=False,
    ),
    Option(
        "--token-ids",
        type=_token_ids,
        metavar="ID,ID,...",
        help="token ids to continue, instead of PROMPT",
    ),
    Option("--chat", is_flag=True, help="apply the chat template; PROMPT is the user's message"),
    Option("--system", metavar="TEXT", help="system message; needs --chat"),
    json_option(),
    *options.request_options(max_tokens=128),
    Option(
        "--logprobs",
        type=int,
        metavar="N",
        group="Request",
        rare=True,
        help="print log-probabilities of each token, and of the N likeliest tokens at its position",
    ),
    *options.connection_options(without=options.REQUEST_KEYS),
)
def generate(arguments: Arguments) -> int:
    from outrider.transport.request_codec import request_to_proto

    # A wrong request raises here, before a deployment is started. Standard input is read here, too,
    # because in an event loop Ctrl-C would not interrupt the read.
    request = _request(arguments)
    request_to_proto(request)
    asyncio.run(_run(arguments, request))
    return 0


async def _run(arguments: Arguments, request: GenerateRequest) -> None:
    from outrider.client import CompletionBuilder

    builder = CompletionBuilder()
    async with options.connected(arguments) as connection, connection.client() as client:
        if arguments.json:
            values = asdict(await client.complete(request))
            unasked = () if values["logprobs"] else ("logprobs",)
            for name in ("origins", "rounds", *unasked):
                del values[name]
            print(json.dumps(values, ensure_ascii=False))
            return
        printer = Printer(connection.tokenizer_directory)
        try:
            await printer.show_all(client, request, builder)
        except BaseException:
            if builder.text:
                print(flush=True)  # The error must begin on a new line.
            raise
        completion = builder.build()
        # Without a tokenizer the answer has no text, only token ids.
        ids = "" if arguments.token_ids is None else ",".join(map(str, completion.token_ids))
        print("" if completion.text else ids, flush=True)
        if completion.logprobs:
            show(logprob_table(completion, connection.tokenizer_directory))
        if not progress.quiet:
            _say(figures(completion))


def _request(arguments: Arguments) -> GenerateRequest:
    exclusive(arguments, "token_ids", "chat")
    fields = options.request_fields(arguments)
    if arguments.prompt is None and arguments.token_ids is None:
        raise ConfigError("PROMPT: is missing; give a text or --token-ids")
    if arguments.prompt is not None and arguments.token_ids is not None:
        raise ConfigError("--token-ids: cannot go with PROMPT")
    if arguments.system is not None and not arguments.chat:
        raise BadRequest("system", "needs --chat")
    prompt: Prompt = _text(arguments.prompt) if arguments.token_ids is None else arguments.token_ids
    if arguments.chat:
        turns = [] if arguments.system is None else [ChatMessage("system", arguments.system)]
        prompt = (*turns, ChatMessage("user", str(prompt)))
    return GenerateRequest(**fields | {"prompt": prompt})


def _text(prompt: str) -> str:
    if prompt == "-":
        try:
            given = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise BadRequest("prompt", f"standard input is not UTF-8: {error.reason}") from None
        prompt = given.removesuffix("\r\n" if given.endswith("\r\n") else "\n")
    if not prompt:
        raise BadRequest("prompt", "is empty; it must be a text of at least one character")
    return prompt


def figures(completion: Completion) -> str:
    metrics = completion.metrics
    drafted = "no drafts proposed"
    if proposed := metrics.num_draft_tokens:
        drafted = f"acceptance {metrics.num_accepted_draft_tokens / proposed:.0%} of {proposed}"
    per_round = 1 + metrics.num_accepted_draft_tokens / max(1, metrics.num_rounds)
    return (
        f"{completion.usage.completion_tokens} tokens, {metrics.tokens_per_second:.1f} tokens/s, "
        f"{metrics.num_rounds} rounds, {drafted}, {per_round:.2f} tokens per "
        f"round ({completion.finish_reason})"
    )


class Printer:
    """Prints answers as they arrive. On a terminal each token has the colour of its origin."""

    def __init__(self, directory: str) -> None:
        """`directory` has the tokenizer. Without a tokenizer, each event has a single colour."""
        self.console: Console | None = None
        self._tokenizer = _tokenizer(directory)
        self._begin()
        if sys.stdout.isatty():
            from rich.console import Console

            self.console = Console()
            if not progress.quiet:
                legend = "  ".join(f"[{style}]{name}[/]" for name, style in STYLES.items())
                Console(stderr=True).print(legend)

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[Origin] = []
        """The origin of each character that is decoded but not printed yet."""

    async def show_all(
        self, client: Client, request: GenerateRequest, builder: CompletionBuilder
    ) -> None:
        self._begin()
        async with aclosing(client.generate(request)) as events:
            async for event in events:
                builder.add(event)
                if isinstance(event, Tokens):
                    self.show(event)

    def show(self, event: Tokens) -> None:
        """Prints an event's text. The text of its last tokens may come with the next event."""
        text = event.text_delta
        if self.console is None:
            print(text, end="", flush=True)
            return
        if self._tokenizer is None:
            common = max(event.origins, key=event.origins.count, default=Origin.BONUS)
            self._waiting = [common] * len(text)
        else:
            for token_id, origin in zip(event.token_ids, event.origins, strict=True):
                certain = self._stream.step(self._tokenizer, token_id) or ""
                self._waiting += [origin] * len(certain)
        origins = chain(self._waiting, repeat(Origin.BONUS))
        for origin, pairs in groupby(zip(text, origins, strict=False), key=itemgetter(1)):
            piece = "".join(character for character, _ in pairs)
            self.console.print(
                piece, style=STYLES[origin], end="", markup=False, highlight=False, soft_wrap=True
            )
        del self._waiting[: len(text)]


def _tokenizer(directory: str) -> Any:
    path = Path(directory) / "tokenizer.json"
    if not directory or not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def logprob_table(completion: Completion, directory: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    tokenizer = _tokenizer(directory)

    def name(token_id: int) -> str:
        if tokenizer is None:
            return str(token_id)
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return f"{token_id} {json.dumps(text, ensure_ascii=False)}"

    table = Table(box=None, pad_edge=False)
    for title in ("token", "logprob", "likeliest at its position"):
        table.add_column(title, overflow="fold")
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        top = ", ".join(f"{name(other)} {logprob:.4f}" for other, logprob in entry.top)
        table.add_row(*map(Text, (name(token_id), f"{entry.logprob:.4f}", top)))
    return table


COMMANDS = {
    "/stats": "show figures of each answer",
    "/reset": "start a new conversation",
    "/help": "show this list",
    "/exit": "leave; the end of the input does the same",
}


@command(
    "chat",
    Option("--system", metavar="TEXT", help="system message"),
    Option("--raw", is_flag=True, help="continue the conversation's text, without chat template"),
    *options.request_options(max_tokens=512),
    *options.connection_options(without=options.REQUEST_KEYS),
)
def chat(arguments: Arguments) -> int:
    # Wrong fields raise here, before a deployment is started.
    return asyncio.run(_talk(arguments, options.request_fields(arguments)))


async def _talk(arguments: Arguments, fields: dict[str, Any]) -> int:
    async with options.connected(arguments) as connection, connection.client() as client:
        serves = await client.describe()
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if on_terminal and not progress.quiet:
            _say(f"{serves.model} at {connection.address}; /help lists the commands")
        printer = Printer(connection.tokenizer_directory)
        with _restored_terminal(on_terminal):
            return await Chat(client, printer, arguments, fields, on_terminal).run()


@dataclass(frozen=True)
class Chat:
    """A conversation. A question without an answer does not become part of the conversation."""

    client: Client
    printer: Printer
    arguments: Arguments
    fields: dict[str, Any]
    on_terminal: bool
    turns: list[ChatMessage] = field(default_factory=list)
    answers: list[Completion] = field(default_factory=list)
    """All complete answers, including those before a reset."""

    async def run(self) -> int:
        """Runs until the end of input, `/exit` or an interrupt. On a terminal, an interrupt of an
        answer stops only the answer. Returns the exit code."""
        loop = asyncio.get_running_loop()
        while True:
            turn = asyncio.create_task(self._take_turn())
            loop.add_signal_handler(signal.SIGINT, turn.cancel)
            try:
                await asyncio.wait((turn,))
            finally:
                loop.remove_signal_handler(signal.SIGINT)
                turn.cancel()  # The turn still runs if the chat's own task was cancelled.
            if turn.cancelled():
                return 128 + signal.SIGINT
            if not turn.result():
                return 0

    async def _take_turn(self) -> bool:
        """Reads a line, and answers it. Returns False at the end of the chat."""
        line = None
        try:
            line = await _read_line(self.on_terminal)
        finally:
            if line is None and self.on_terminal:
                print()  # Ctrl-D and Ctrl-C leave the cursor in the line of the `> ` prompt.
        if line is None or line.strip() == "/exit":
            return False
        if line.startswith("/"):
            self._run_command(line.strip())
        elif line.strip():
            await self._answer(line)
        return True

    def _run_command(self, command: str) -> None:
        if command == "/reset":
            self.turns.clear()
            _say("new conversation")
        elif command == "/stats":
            for answer in self.answers:
                _say(figures(answer))
            num = len(self.answers)
            _say(f"{num} complete answer{'s' * (num != 1)}, {len(self.turns)} messages")
        else:
            if command != "/help":
                _say(f"{command}: no such command")
            for name, purpose in COMMANDS.items():
                _say(f"{name:8}{purpose}")

    async def _answer(self, question: str) -> None:
        from outrider.client import CompletionBuilder

        builder = CompletionBuilder()
        try:
            request = GenerateRequest(self._prompt(question), **self.fields)
            await self.printer.show_all(self.client, request, builder)
            self.answers.append(builder.build())
            self._keep(question, builder.text)
            print(flush=True)
        except asyncio.CancelledError:
            if builder.text:
                self._keep(question, builder.text)
            print(flush=True)
            _say("interrupted")
            if not self.on_terminal:
                raise
        except OutriderError as error:
            if not self.on_terminal:
                raise
            print(flush=True)
            why = options.error_line(error, self.arguments)
            _say(f"error: {why} (your message is not part of the conversation)")

    def _prompt(self, question: str) -> Prompt:
        system = self.arguments.system
        first = [] if system is None else [ChatMessage("system", system)]
        turns = (*first, *self.turns, ChatMessage("user", question))
        return "\n".join(turn.content for turn in turns) if self.arguments.raw else turns

    def _keep(self, question: str, answer: str) -> None:
        self.turns.extend((ChatMessage("user", question), ChatMessage("assistant", answer)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _restored_terminal(on_terminal: bool) -> Iterator[None]:
    """Restores the terminal's settings at the end. An unfinished `input` leaves the echo off."""
    if not on_terminal:
        yield
        return
    import readline  # noqa: F401 - adds line editing to `input`
    import termios

    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


async def _read_line(on_terminal: bool) -> str | None:
    """Returns the next line of standard input without its line end, or None at the end of input. A
    daemon thread reads the line, because a read of a terminal cannot be cancelled."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def deliver(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def work() -> None:
        text = None
        with suppress(EOFError, OSError, ValueError):
            text = input("> ") if on_terminal else _read_raw()
        with suppress(RuntimeError):  # The event loop may be closed by now.
            loop.call_soon_threadsafe(deliver, text)

    threading.Thread(target=work, name="lines", daemon=True).start()
    return await line


def _read_raw() -> str | None:
    """Reads a line without the buffer of `sys.stdin`. A thread that reads through the buffer holds
    the buffer's lock, and at exit the interpreter would wait for this lock."""
    with open(0, "rb", buffering=0, closefd=False) as file:
        line = file.readline()
    return line.decode("utf-8", "replace").rstrip("\r\n") if line else None
