"""`outrider generate PROMPT`: one completion, streamed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from outrider.errors import BadRequest

from .connection import Connection, add_connection_flags, connected
from .request import OWN_FLAGS, add_request_flags, request_fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, the request's fields, and the deployment to ask."""
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on with; - = from input")
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message: apply the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before it, with --chat")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, when it is done"
    )
    request = add_request_flags(parser, max_tokens=128)
    request.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probabilities of the N likeliest",
    )
    add_connection_flags(parser, without=OWN_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Generates, and prints the text or one JSON object."""
    asyncio.run(_run(arguments))
    return 0


async def _run(arguments: argparse.Namespace) -> None:
    from outrider.client import Client, Completion, CompletionBuilder, Event

    request = _request(arguments)
    builder = CompletionBuilder()

    async def receive(client: Client, show: Callable[[Event], None]) -> tuple[Completion, float]:
        start = time.perf_counter()
        async for event in client.generate(request):
            builder.add(event)
            show(event)
        return builder.build(), time.perf_counter() - start

    async with connected(arguments) as connection, Client(connection.address) as client:
        if arguments.json:
            completion, seconds = await receive(client, lambda event: None)
            print(json.dumps(_report(completion, seconds), ensure_ascii=False))
            return
        completion, seconds = await receive(client, _printer(connection))
        print(flush=True)
        print(_closing_line(completion, seconds), file=sys.stderr)


def _request(arguments: argparse.Namespace) -> Any:
    from outrider.generation import ChatMessage, GenerateRequest

    fields = request_fields(arguments)
    if arguments.system is not None and not arguments.chat:
        raise BadRequest("system", "needs --chat")
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    prompt: str | tuple[ChatMessage, ...] = text
    if arguments.chat:
        turns = [] if arguments.system is None else [ChatMessage("system", arguments.system)]
        prompt = (*turns, ChatMessage("user", text))
    return GenerateRequest(prompt=prompt, logprobs=arguments.logprobs, **fields)


def _printer(connection: Connection) -> Callable[[Any], None]:
    """What shows an event: text in the colours of its origins on a terminal, plain text else."""
    from outrider.generation import Tokens

    if not sys.stdout.isatty():

        def show_plain(event: Any) -> None:
            if isinstance(event, Tokens):
                print(event.text_delta, end="", flush=True)

        return show_plain
    from rich.console import Console

    from .origins import OriginPainter, TokenLengths

    painter = OriginPainter(Console(), TokenLengths(connection.tokenizer_directory))
    Console(stderr=True).print(painter.legend())

    def show_coloured(event: Any) -> None:
        if isinstance(event, Tokens):
            painter.show(event)

    return show_coloured


def _tokens_per_second(completion: Any, seconds: float) -> float:
    """Committed completion tokens over the time from request to last event, prefill included."""
    return float(completion.usage.completion_tokens / seconds)


def _report(completion: Any, seconds: float) -> dict[str, Any]:
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


def _closing_line(completion: Any, seconds: float) -> str:
    metrics, tokens = completion.metrics, completion.usage.completion_tokens
    proposed, accepted = metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
    acceptance = f"{accepted / proposed:.0%} of {proposed}" if proposed else "nothing proposed"
    rounds = metrics.num_rounds
    return (
        f"{_tokens_per_second(completion, seconds):.1f} tokens/s, {tokens} tokens, "
        f"{rounds} rounds, acceptance {acceptance}, "
        f"{tokens / rounds if rounds else 0:.2f} tokens per round ({completion.finish_reason})"
    )
