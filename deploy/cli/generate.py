"""`outrider generate PROMPT`: one completion, streamed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outrider.errors import BadRequest, ConfigError

from .connection import Connection, add_connection_flags, connected
from .logprobs import logprob_table, token_names
from .progress import progress
from .request import OWN_FLAGS, add_request_flags, request_fields

if TYPE_CHECKING:
    from outrider.client import Completion, GenerateRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, the request's fields, and the deployment to ask."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "prompt", nargs="?", metavar="PROMPT",
        help="the text to go on with; - = standard input to its end, without its last line feed",
    )  # fmt: skip
    prompt.add_argument(
        "--token-ids", type=_token_ids, metavar="ID,ID,...",
        help="token ids to go on with, instead of PROMPT",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message: apply the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before it, with --chat")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, when it is done"
    )
    request = add_request_flags(parser, max_tokens=128)
    request.add_argument(
        "--logprobs", type=int, metavar="N",
        help="add a table of the tokens' log-probabilities and of those of the N likeliest",
    )  # fmt: skip
    add_connection_flags(parser, without=OWN_FLAGS)


def _token_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is wrong; it must be whole numbers with commas between them"
        )
    return tuple(int(part) for part in parts)


def run(arguments: argparse.Namespace) -> int:
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


async def _run(arguments: argparse.Namespace, request: GenerateRequest) -> None:
    from outrider.client import Client, CompletionBuilder, Event

    builder = CompletionBuilder()

    async def receive(client: Client, show: Callable[[Event], None]) -> tuple[Completion, float]:
        start = time.perf_counter()
        async for event in client.generate(request):
            builder.add(event)
            show(event)
        return builder.build(), time.perf_counter() - start

    async with connected(arguments) as connection, connection.client() as client:
        if arguments.json:
            completion, seconds = await receive(client, lambda event: None)
            print(json.dumps(_report(completion, seconds), ensure_ascii=False))
            return
        try:
            completion, seconds = await receive(client, _printer(connection))
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


def _silent(completion: Completion, arguments: argparse.Namespace) -> str:
    """What is printed for an answer without text: its token ids for whoever asked by token ids,
    who may have no tokenizer."""
    return "" if arguments.token_ids is None else ",".join(map(str, completion.token_ids))


def _request(arguments: argparse.Namespace) -> GenerateRequest:
    from outrider.request import ChatMessage, GenerateRequest, Prompt

    fields = request_fields(arguments)
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


def _printer(connection: Connection) -> Callable[[Any], None]:
    """What shows an event: text in the colours of its origins on a terminal, plain text else."""
    from outrider.request import Tokens

    if not sys.stdout.isatty():

        def show_plain(event: Any) -> None:
            if isinstance(event, Tokens):
                print(event.text_delta, end="", flush=True)

        return show_plain
    from rich.console import Console

    from .colored_text import OriginPainter, TokenLengths

    painter = OriginPainter(Console(), TokenLengths(connection.tokenizer_directory))
    if not progress.quiet:
        Console(stderr=True).print(painter.legend())

    def show_coloured(event: Any) -> None:
        if isinstance(event, Tokens):
            painter.show(event)

    return show_coloured


def _tokens_per_second(completion: Completion, seconds: float) -> float:
    """Committed completion tokens over the time from request to last event, prefill included."""
    return float(completion.usage.completion_tokens / seconds)


def _report(completion: Completion, seconds: float) -> dict[str, Any]:
    metrics = completion.metrics
    report: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": {
            "prompt_tokens": completion.usage.prompt_tokens,
            "completion_tokens": completion.usage.completion_tokens,
        },
        "metrics": {
            "tokens_per_second": _tokens_per_second(completion, seconds),
            "num_rounds": metrics.num_rounds,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_draft_tokens": metrics.num_accepted_draft_tokens,
            "mean_acceptance_length": metrics.mean_acceptance_length,
        },
        "model": completion.model,
        "session_id": completion.session_id,
        "seed": completion.seed,
        "rule": completion.rule.value,
    }
    if completion.logprobs:
        report["logprobs"] = [
            {"logprob": at.logprob, "top": [list(top) for top in at.top]}
            for at in completion.logprobs
        ]
    return report


def _closing_line(completion: Completion, seconds: float) -> str:
    metrics, tokens = completion.metrics, completion.usage.completion_tokens
    proposed, accepted = metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
    acceptance = f"{accepted / proposed:.0%} of {proposed}" if proposed else "nothing proposed"
    rounds = metrics.num_rounds
    return (
        f"{_tokens_per_second(completion, seconds):.1f} tokens/s, {tokens} tokens, "
        f"{rounds} rounds, acceptance {acceptance}, "
        f"{tokens / rounds if rounds else 0:.2f} tokens per round ({completion.finish_reason})"
    )
