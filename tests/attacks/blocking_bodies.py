"""Sends the costliest bodies within all limits, each several times.

Held if no body blocks the event loop of the HTTP server for more than `STALL_MS` in its best
try."""

import json
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx

from tests.attacks.victims import Doors, judge

STALL_MS: Final = 50.0
TRIES: Final = 3
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGE: Final = {"role": "user", "content": "x"}


def numbered(number: int, value: Any = 1) -> dict[str, Any]:
    return dict.fromkeys(map(str, range(number)), value)


def bodies() -> Iterator[tuple[str, str, Any]]:
    """Name, route and body; a body in bytes is sent as it is."""
    chat: dict[str, Any] = {"messages": [MESSAGE]}
    yield "524,268 ids", COMPLETIONS, {"prompt": [1] * (2**19 - 20)}
    yield "texts, then an id", COMPLETIONS, {"prompt": ["a"] * (2**19 - 21) + [1]}
    yield "ids, then a text", COMPLETIONS, {"prompt": [1] * (2**19 - 21) + ["a"]}
    yield "4,096 messages", CHAT, {"messages": [MESSAGE | {"content": "x" * 900}] * 4096}
    parts = [{"type": "text", "text": text} for text in "aab"]
    yield "4,000 messages of 3 parts", CHAT, {"messages": [MESSAGE | {"content": parts}] * 4000}
    many_parts = MESSAGE | {"content": parts[:1] * 16_000}
    yield "one message of 16,000 parts", CHAT, {"messages": [many_parts]}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "tool_calls": [call]}
    yield "4,000 messages with calls", CHAT, {"messages": [calls] * 4000}
    unknown = MESSAGE | {f"roles{number}": 1 for number in range(100)}
    yield "2,000 messages of 100 unknown fields", CHAT, {"messages": [unknown] * 2000}
    yield "260,000 biases", CHAT, chat | {"logit_bias": numbered(260_000)}
    yield "200,000 wrong biases", CHAT, chat | {"logit_bias": numbered(200_000, "a")}
    yield "260,000 constraints", CHAT, chat | {"structured_outputs": numbered(260_000)}
    yield "260,000 variables", CHAT, chat | {"chat_template_kwargs": numbered(260_000)}
    yield "400,000 choices", CHAT, chat | {"structured_outputs": {"choice": ["a"] * 400_000}}
    yield "500,000 stop strings", CHAT, chat | {"stop": ["a"] * 500_000}
    yield "260,000 metadata", CHAT, chat | {"metadata": numbered(260_000)}
    texts = [{"type": "input_text", "text": text} for text in "xy"]
    item: dict[str, Any] = {"type": "message", "role": "user", "content": texts}
    yield "4,000 items", RESPONSES, {"input": [item] * 4000}
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    yield "4,090 items and a wrong one", RESPONSES, {"input": [item] * 4090 + [{"type": "z"}]}
    yield "escapes", COMPLETIONS, b'{"prompt":"' + b"\\u00e9" * 690_000 + b'"}'
    yield "4 million digits", COMPLETIONS, b'{"prompt":[1],"seed":' + b"9" * 4_000_000 + b"}"


def attack() -> tuple[bool, str]:
    stalls: dict[str, float] = {}
    with Doors() as doors, httpx.Client(timeout=60) as client:
        for name, route, body in bodies():
            data = body
            if not isinstance(body, bytes):
                data = json.dumps(body, separators=(",", ":")).encode()
            url, found = f"http://{doors.addresses['http']}{route}", []
            for _ in range(TRIES):
                doors.ask()
                answer = client.post(url, content=data, headers=doors.headers("alice"))
                time.sleep(0.05)
                found.append(doors.ask()["lag_ms"])
            stalls[name] = min(found)
            mib = len(data) / 2**20
            print(f"{stalls[name]:8.1f} ms  {mib:.2f} MiB  {answer.status_code}  {name}")
    num_over = sum(stall > STALL_MS for stall in stalls.values())
    worst = max(stalls, key=stalls.__getitem__)
    return not num_over, (
        f"{num_over} of {len(stalls)} bodies block the loop for over {STALL_MS:g} ms; at most "
        f"{stalls[worst]:.0f} ms ({worst})"
    )


if __name__ == "__main__":
    judge(attack)
