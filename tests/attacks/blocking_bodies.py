"""Sends the costliest bodies and gRPC messages within all limits, each several times.

Held if none blocks the event loop for more than `STALL_MS` in its best try."""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import grpc
import httpx

from outrider.v1 import coordinator_pb2 as pb
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


def messages() -> Iterator[tuple[str, pb.GenerateRequest]]:
    """Name and message."""
    size, asked = 8 * 2**20 - 400, pb.GenerateRequest
    yield "a text of 2 million characters", asked(text="\U0001f600" * (size // 4))
    ids = pb.TokenIds(ids=[2**31 - 1] * (2**19 - 60))
    yield "524,228 ids of 5 bytes", asked(token_ids=ids)
    yield "2,621,340 ids", asked(token_ids=pb.TokenIds(ids=[1] * (5 * 2**19 - 100)))
    turns = [pb.ChatMessage(role="user", content="x" * 2000)] * 4090
    yield "4,090 turns", asked(chat=pb.ChatMessages(messages=turns))
    yield "a schema", asked(text="x", json_schema='{"a":"' + "x" * size + '"}')
    yield "8,000 stop strings", asked(text="x", stop=["x" * 1000] * 8000)
    biases = pb.GenerateRequest().sampling
    biases.logit_bias.update(dict.fromkeys(range(8000), 0.5))
    yield "8,000 biases", asked(text="x" * 2**16, sampling=biases)


def calls(doors: Doors) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, size in bytes, and a call that returns the answer's status."""
    headers = doors.headers("alice")
    with httpx.Client(timeout=60, headers=headers) as client:

        def post(route: str, data: bytes) -> object:
            return client.post(f"http://{doors.addresses['http']}{route}", content=data).status_code

        for name, route, body in bodies():
            data = body
            if not isinstance(body, bytes):
                data = json.dumps(body, separators=(",", ":")).encode()
            yield name, len(data), partial(post, route, data)
    channel: Any
    with grpc.insecure_channel(doors.addresses["grpc"]) as channel:
        generate = channel.unary_stream("/outrider.v1.Coordinator/Generate")
        metadata = [("authorization", headers["authorization"])]

        def send(data: bytes) -> object:
            call = generate(data, metadata=metadata, timeout=60)
            try:
                next(call)
            except grpc.RpcError as error:
                return error.code().name
            call.cancel()
            return "OK"

        for name, message in messages():
            data = message.SerializeToString()
            yield f"{name}, gRPC", len(data), partial(send, data)


def attack() -> tuple[bool, str]:
    stalls: dict[str, float] = {}
    with Doors() as doors:
        for name, size, call in calls(doors):
            found = []
            for _ in range(TRIES):
                doors.ask()
                status = call()
                time.sleep(0.05)
                found.append(doors.ask()["lag_ms"])
            stalls[name] = min(found)
            print(f"{stalls[name]:8.1f} ms  {size / 2**20:.2f} MiB  {status}  {name}")
    num_over = sum(stall > STALL_MS for stall in stalls.values())
    worst = max(stalls, key=stalls.__getitem__)
    return not num_over, (
        f"{num_over} of {len(stalls)} bodies block the loop for over {STALL_MS:g} ms; at most "
        f"{stalls[worst]:.0f} ms ({worst})"
    )


if __name__ == "__main__":
    judge(attack)
