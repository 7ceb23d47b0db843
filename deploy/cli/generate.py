"""`outrider generate PROMPT`: one completion, streamed."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from outrider.errors import BadRequest, ConfigError
from outrider.request import Tokens
from outrider.speculation.accept_reject import Origin

from .command import Arguments, argument, command, json_option, option
from .connection import Connection, connected, connection_options
from .options import REQUEST_KEYS, request_fields, request_options
from .output import progress

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.client import Completion, GenerateRequest


STYLES: Final = {
    Origin.ACCEPTED: "green",
    Origin.CORRECTION: "bold red",
    Origin.BONUS: "bold cyan",
    Origin.STORED: "dim",
}
HEADINGS = ("token", "logprob", "likeliest at its place")


def _token_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise click.BadParameter(
            f"{text!r} is wrong; it must be whole numbers with commas between them"
        )
    return tuple(int(part) for part in parts)


@command(
    "generate",
    argument(
        "prompt", "the text to go on with; - = standard input to its end, without its last line "
        "feed", required=False,
    ),
    option(
        "--token-ids", type=_token_ids, metavar="ID,ID,...",
        help="token ids to go on with, instead of PROMPT",
    ),
    option("--chat", is_flag=True, help="PROMPT is a user's message: apply the chat template"),
    option("--system", metavar="TEXT", help="a system message before it, with --chat"),
    json_option(),
    *request_options(max_tokens=128),
    option(
        "--logprobs", type=int, metavar="N", group="Request", rare=True,
        help="add a table of the tokens' log-probabilities and of those of the N likeliest",
    ),
    *connection_options(without=REQUEST_KEYS),
)  # fmt: skip
def generate(arguments: Arguments) -> int:
    """Generates, and prints the text or one JSON object."""
    from outrider.client.client import check_sendable
    from outrider.speculation.sampling_params import check_sampling

    # Here, so that what is wrong shows before anything is started, and Ctrl-C ends the reading of
    # standard input, which an event loop would not let it.
    request = _request(arguments)
    check_sendable(request)
    check_sampling(request.sampling)
    asyncio.run(_run(arguments, request))
    return 0


async def _run(arguments: Arguments, request: GenerateRequest) -> None:
    from outrider.client import Client, CompletionBuilder

    builder = CompletionBuilder()

    async def receive(client: Client, show: Callable[[Tokens], None]) -> tuple[Completion, float]:
        start = time.perf_counter()
        async for event in client.generate(request):
            builder.add(event)
            if isinstance(event, Tokens):
                show(event)
        return builder.build(), time.perf_counter() - start

    async with connected(arguments) as connection, connection.client() as client:
        if arguments.json:
            completion, seconds = await receive(client, lambda event: None)
            print(json.dumps(_report(completion, seconds), ensure_ascii=False))
            return
        try:
            completion, seconds = await receive(client, printer(connection)())
        except BaseException:
            if builder.text:
                print(flush=True)  # An error, or the shell's prompt, gets a line of its own.
            raise
        print("" if completion.text else _silent(completion, arguments), flush=True)
        if completion.logprobs:
            names = token_names(connection.tokenizer_directory)
            print(logprob_table(completion, names), flush=True)
        if not progress.quiet:
            print(_closing_line(completion, seconds), file=sys.stderr)


def _silent(completion: Completion, arguments: Arguments) -> str:
    """What is printed for an answer without text: its token ids where token ids were given, as the
    model may have no tokenizer."""
    return "" if arguments.token_ids is None else ",".join(map(str, completion.token_ids))


def _request(arguments: Arguments) -> GenerateRequest:
    from outrider.request import ChatMessage, GenerateRequest, Prompt

    fields = request_fields(arguments)
    if arguments.prompt is None and arguments.token_ids is None:
        raise ConfigError("PROMPT: is missing; give a text or --token-ids")
    if arguments.prompt is not None and arguments.token_ids is not None:
        raise ConfigError("--token-ids: cannot go with PROMPT")
    if arguments.system is not None and not arguments.chat:
        raise BadRequest("system", "needs --chat")
    if arguments.chat and arguments.token_ids is not None:
        raise ConfigError("--chat: cannot go with --token-ids, which no template is applied to")
    prompt: Prompt = _text(arguments.prompt) if arguments.token_ids is None else arguments.token_ids
    if arguments.chat:
        turns = [] if arguments.system is None else [ChatMessage("system", arguments.system)]
        prompt = (*turns, ChatMessage("user", str(prompt)))
    return GenerateRequest(prompt=prompt, logprobs=arguments.logprobs, **fields)


def _text(prompt: str) -> str:
    """The prompt, or what stands for it on standard input, where a line feed ends a text and is no
    part of it. Raises `BadRequest` for an empty one."""
    if prompt != "-":
        if not prompt:
            raise BadRequest("prompt", "is empty; it must be a text of one character or more")
        return prompt
    try:
        given = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise BadRequest("prompt", f"standard input is not UTF-8: {error.reason}") from None
    text = given.removesuffix("\n").removesuffix("\r" if given.endswith("\r\n") else "")
    if not text:
        raise BadRequest("prompt", "standard input has no text; it must have a character or more")
    return text


def printer(connection: Connection) -> Callable[[], Callable[[Tokens], None]]:
    """What begins an answer and gives what shows its tokens: in the colours of their origins on a
    terminal, where a legend is shown now; as plain text else."""
    if not sys.stdout.isatty():
        return lambda: lambda event: print(event.text_delta, end="", flush=True)
    from rich.console import Console

    console, lengths = Console(), TokenLengths(connection.tokenizer_directory)
    if not progress.quiet:
        Console(stderr=True).print("  ".join(f"[{style}]{one}[/]" for one, style in STYLES.items()))

    def begin() -> Callable[[Tokens], None]:
        lengths.begin()
        return OriginPainter(console, lengths).show

    return begin


def _report(completion: Completion, seconds: float) -> dict[str, Any]:
    metrics = completion.metrics
    names = ("num_rounds", "num_draft_tokens", "num_accepted_draft_tokens",
             "mean_acceptance_length")  # fmt: skip
    report: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": asdict(completion.usage),
        "metrics": {
            "tokens_per_second": completion.usage.completion_tokens / seconds,
            **{name: getattr(metrics, name) for name in names},
        },
        "model": completion.model,
        "session_id": completion.session_id,
        "seed": completion.seed,
        "rule": completion.rule.value,
    }
    if completion.logprobs:
        report["logprobs"] = [asdict(at) for at in completion.logprobs]
    return report


def _closing_line(completion: Completion, seconds: float) -> str:
    metrics, tokens = completion.metrics, completion.usage.completion_tokens
    proposed, accepted = metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
    acceptance = f"{accepted / proposed:.0%} of {proposed}" if proposed else "nothing proposed"
    rounds = metrics.num_rounds
    return (
        f"{tokens / seconds:.1f} tokens/s, {tokens} tokens, "
        f"{rounds} rounds, acceptance {acceptance}, "
        f"{tokens / rounds if rounds else 0:.2f} tokens per round ({completion.finish_reason})"
    )


class TokenLengths:
    """How many characters each token adds to the text, by the target's own tokenizer."""

    def __init__(self, directory: str) -> None:
        """`directory` holds the tokenizer; without one nothing is known."""
        self._tokenizer: Any = None
        path = Path(directory) / "tokenizer.json"
        if directory and path.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
            self.begin()

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def begin(self) -> None:
        """Another text follows."""
        if self.known:
            from tokenizers.decoders import DecodeStream

            self._stream: Any = DecodeStream(skip_special_tokens=True)

    def length(self, token_id: int) -> int:
        """Characters that became certain with the token; 0 while they are incomplete."""
        return len(self._stream.step(self._tokenizer, token_id) or "")


class OriginPainter:
    """Prints text as it comes. A delta may lag behind its tokens, and then catches up."""

    def __init__(self, console: Console, lengths: TokenLengths) -> None:
        self._console = console
        self._lengths = lengths
        self._waiting: deque[tuple[Origin, int]] = deque()
        """Origins of tokens whose text has not come, and how long it is."""

    def show(self, event: Tokens) -> None:
        """Prints an event's text. Where the tokens' lengths are not known, all of it has the
        colour that most of its tokens have."""
        text = event.text_delta
        if not self._lengths.known:
            common = max(event.origins, key=event.origins.count, default=Origin.BONUS)
            self._print(text, common)
            return
        for token_id, origin in zip(event.token_ids, event.origins, strict=True):
            self._waiting.append((origin, self._lengths.length(token_id)))
        while text and self._waiting:
            origin, length = self._waiting.popleft()
            self._print(text[:length], origin)
            if length > len(text):
                self._waiting.appendleft((origin, length - len(text)))
            text = text[length:]
        self._print(text, Origin.BONUS)

    def _print(self, text: str, origin: Origin) -> None:
        if text:
            self._console.print(
                text, style=STYLES[origin], end="", markup=False, highlight=False, soft_wrap=True
            )


def logprob_table(completion: Completion, spell: Callable[[int], str]) -> str:
    """A line per token of the completion: what it is, its log-probability, and the likeliest
    tokens at its place with theirs. `spell` gives a token's name."""
    rows = [
        (
            spell(token_id),
            f"{found.logprob:.4f}",
            ", ".join(f"{spell(other)} {logprob:.4f}" for other, logprob in found.top),
        )
        for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    names, numbers = (max(len(row[at]) for row in (HEADINGS, *rows)) for at in (0, 1))
    lines = (f"{a:<{names}}  {b:>{numbers}}  {c}".rstrip() for a, b, c in (HEADINGS, *rows))
    return "\n".join(lines)


def token_names(directory: str) -> Callable[[int], str]:
    """What gives a token's id and, where a tokenizer lies in the directory, its text in quotes."""
    path = Path(directory) / "tokenizer.json"
    if not directory or not path.is_file():
        return str
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def name(token_id: int) -> str:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return f"{token_id} {json.dumps(text, ensure_ascii=False)}"

    return name
