"""Inputs that have crashed other inference engines. Each is fed once, before any random input."""

import itertools
import json
from collections.abc import Iterator
from typing import Any, Final

from outrider.limits import GRPC_MESSAGE_BYTES_MAX, HTTP_BODY_BYTES_MAX
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import draft_pb2, target_pb2, types_pb2
from tests.fuzz.by_grpc import METHODS, Call
from tests.fuzz.by_http import HttpCall
from tests.fuzz.system import MAX_MODEL_LEN, VOCAB_SIZE
from tests.fuzz.valid import CONSTRAINTS

SEED_MAX: Final = 2**64 - 1
_sessions: Final = itertools.count(2**64)
_PICKLE: Final = b"cos\nsystem\n(S'id'\ntR."
_JSON: Final = (("content-type", "application/json"),)
_TOKENS: Final = (
    [-1],
    [-(2**31)],
    [VOCAB_SIZE],
    [2**31 - 1],
    [],
    [1] * MAX_MODEL_LEN,
    [1] * 500_000,
    [1, -1],
)
_CONSTRAINTS: Final = (
    *CONSTRAINTS,
    ("regex", "(a+)+$"),
    ("regex", "(((a{0,1000}){0,1000}){0,1000})"),
    ("regex", "("),
    ("choice", "[]"),
    ("choice", "{"),
    ("choice", "[1]"),
    ("json_schema", '{"$ref":"#"}'),
    ("json_schema", '{"not":{}}'),
    ("json_schema", '{"a":' * 40 + "1" + "}" * 40),
    ("json_schema", '{"maximum":1' + "0" * 400 + "}"),
    ("", ""),
    ("nonsense", "a"),
    ("regex", "a" * 70_000),
)
_FIELDS: Final[tuple[dict[str, Any], ...]] = (
    {"n": 5000},
    {"n": -1},
    {"n": 2**70},
    {"best_of": 5000},
    {"max_tokens": 2**31},
    {"seed": -1},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"top_k": VOCAB_SIZE + 1},
    {"top_p": 0.0},
    {"temperature": -1},
    {"temperature": 1e308},
    {"top_p": 1e-320},
    {"min_p": 2},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 0},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"99999999999": 1}},
    {"logit_bias": {"1": 1e308}},
    {"logit_bias": {str(number): 1 for number in range(5000)}},
    {"stop": ["a"] * 1000},
    {"stop": "b" * 10_000},
    {"stop": [""]},
    {"logprobs": 2**31},
    {"prompt": ["a"] * 5000},
    {"prompt": [[1]] * 128, "n": 16, "max_tokens": 1},
    {"prompt": "a" * 3_000_000},
    {"structured_outputs": {"regex": "(a+)+$"}},
    {"structured_outputs": {"regex": "(((a{0,1000}){0,1000}){0,1000})"}},
    {"structured_outputs": {"regex": "(x+x+)+y"}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
    {"guided_grammar": "start: start start"},
    {"structured_outputs": {"choice": [""] * 5000}},
    {"deadline_ms": 1},
    {"deadline_ms": 1, "stream": True},
    {"stream_options": {}},
    {"chat_template": "{{ ''.__class__ }}"},
    {"trust_remote_code": True},
    {"model": "../../etc"},
)
_TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "f"}}
_CALL: Final[dict[str, Any]] = {"id": "1", "function": {"name": "f", "arguments": "[" * 10_000}}
_OF_CHAT: Final[tuple[dict[str, Any], ...]] = (
    *(
        {"tool_choice": choice, "tools": [{**_TOOL, "function": {"name": "f", "parameters": one}}]}
        for choice in ("auto", "required", _TOOL)
        for one in (
            {"$ref": "#"},
            {"$ref": "#/$defs/f"},
            {"a": [[[1] * 300] * 9]},
            {"type": "array"},
            {"properties": {"a": {"$ref": "#"}}},
            {"multipleOf": 9_999_991, "type": "integer"},
        )
    ),
    {
        "tools": [{**_TOOL, "function": {"name": f"f{n}"}} for n in range(128)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stream": True,
    },
    {"messages": [{"role": "assistant", "tool_calls": [_CALL] * 64}]},
    {"messages": [{"role": "tool", "tool_call_id": "", "content": "<|im_end|>" * 99}]},
    {"chat_template_kwargs": {"tokenize": False}},
    {"chat_template_kwargs": {"messages": 1}},
    {"chat_template_kwargs": {"tools": "a"}},
    {"chat_template_kwargs": {"raise_exception": 1}},
)
_OF_RESPONSES: Final[tuple[dict[str, Any], ...]] = (
    {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[" * 99_999}]},
    {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}] * 4095},
    {"input": [{"type": "reasoning"}]},
    {"input": [{"type": [[]]}]},
    {"input": [{"type": "x" * 10**6}]},
    {"metadata": {"a": "\ud800"}},
    {"input": [{"type": "function_call_output", "call_id": "", "output": "<|im_end|>" * 99}]},
    {"input": [{}] * 60_000},
    {"top_logprobs": 2**31, "stream": True},
    {"text": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}, "stream": True},
    {
        "tools": [{"type": "function", "name": "f", "parameters": {"$ref": "#"}}],
        "tool_choice": {"type": "function", "name": "f"},
    },
)


def by_http() -> Iterator[HttpCall]:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    response = {"input": "a", "max_output_tokens": 9}
    for place, base, changes in (
        ("/v1/chat/completions", chat, _OF_CHAT),
        ("/v1/responses", response, _OF_RESPONSES),
    ):
        for fields in changes:
            body = json.dumps({**base, **fields}).encode()
            yield HttpCall("POST", place, place, body, _JSON)
    base = {"prompt": [1, 2, 3], "max_tokens": 4}
    for fields in (*({"prompt": tokens} for tokens in _TOKENS), *_FIELDS):
        yield _completion(json.dumps({**base, **fields}).encode())
    for body in (
        b" " * HTTP_BODY_BYTES_MAX + b"{}",
        b'{"prompt":' + b"[" * 1_000_000,
        b'{"prompt":[' + b"9" * 100_000 + b"]}",
        b'{"prompt":"\\ud800"}',
        _PICKLE,
        b'{"prompt":[1],"max_tokens":4,"user":"\\udfff"}',
    ):
        yield _completion(body)
    for name, value in (("x", "y" * 60_000), ("authorization", "Bearer " + "k" * 50_000)):
        for path in ("/v1/models", "/health", "/openapi.json", "/nothing"):
            yield HttpCall("GET", path, headers=((name, value),))
    yield HttpCall("GET", "/v1/models", headers=(*((f"x{n}", "y") for n in range(900)),))


def _completion(body: bytes) -> HttpCall:
    return HttpCall("POST", "/v1/completions", "/v1/completions", body, _JSON)


def by_grpc() -> Iterator[Call]:
    for tokens in _TOKENS:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), max_tokens=4)
        yield from _calls("Generate", request.SerializeToString())
    for method in (
        "Generate",
        "Resume",
        "Cancel",
        "GetSession",
        "Describe",
        "Release",
        "Verify",
        "Propose",
    ):
        for data in (b"", b"\xff" * 100, _PICKLE):
            yield from _calls(method, data)
    for call in _calls("Describe", b""):  # Every server has it.
        yield Call(call.method, call.place, [b"\0" * (GRPC_MESSAGE_BYTES_MAX + 1)])
        for metadata in ((("x", "y" * 2**16),), (("x", "y" * 2**20),)):
            yield Call(call.method, call.place, call.frames, metadata=metadata)
    for item in _items():
        yield from _calls("Verify", target_pb2.VerifyRequest(items=[item]).SerializeToString())
        # In the parts that both requests share, field 1 is the head.
        draft = draft_pb2.DraftItem(head=item.head, num_draft_tokens=4, look_ahead=64)
        yield from _calls("Propose", draft_pb2.DraftRequest(items=[draft]).SerializeToString())
    for width, rows in ((2**31, b""), (1, b"x"), (2**15, b"\xff" * 2**16), (8, b"\x7f\xc0" * 512)):
        features = types_pb2.Features(first=2**32 - 1, width=width, rows=rows)
        item = draft_pb2.DraftItem(head=_head(), num_draft_tokens=4, features=features)
        yield from _calls("Propose", draft_pb2.DraftRequest(items=[item]).SerializeToString())


def _items() -> Iterator[target_pb2.VerifyItem]:
    """Items whose hashes, lengths, epochs or tensors are false."""
    for fields in (
        {},
        {"base_length": 2**32 - 1},
        {"base_length": 2**31 - 9},
        {"epoch": 2**32 - 1},
        {"base_length": 5, "prefix_digest": 1},
        {"round": 2**32 - 1},
        {"append": [VOCAB_SIZE]},
        {"append": [2**32 - 1]},
        {"append": [1] * 100_000},
        {"prompt_length": 2**32 - 1},
        {"tenant": "control"},
        {"deadline_ms": 1},
        {"deadline_ms": 2**32 - 1},
        {"sampling_hash": 1},
        {"seed": SEED_MAX},
        {"traceparent": "x" * 10_000},
        {"session_id": "x" * 100_000},
        {"constraint_hash": b"x"},
        {"constraint_hash": b"x" * 16},
        *({"constraint": types_pb2.Constraint(kind=k, text=t)} for k, t in _CONSTRAINTS),
    ):
        yield target_pb2.VerifyItem(head=_head(**fields))
    for q in (_PICKLE, b"\xff" * 100, b"\xff" * 2**20, b"\x02\0" + b"\0" * 12):
        proposal = types_pb2.Proposal(token_ids=[1, 2], q=q)
        yield target_pb2.VerifyItem(head=_head(), proposal=proposal, run_ahead=2**32 - 1)
        yield target_pb2.VerifyItem(head=_head(), proposal=proposal)
    for token in (VOCAB_SIZE, 2**31 - 1, 2**32 - 1):
        proposal = types_pb2.Proposal(token_ids=[token], q=b"\0\0")
        yield target_pb2.VerifyItem(head=_head(), proposal=proposal)


def _head(**fields: Any) -> types_pb2.RoundHead:
    """The head of a new session, because another epoch or round would make the item stale."""
    values: dict[str, Any] = {
        "session_id": f"{next(_sessions):032x}",
        "epoch": 1,
        "append": [1, 2, 3],
        "prompt_length": 3,
        "rule": types_pb2.RULE_TOKEN,
        "deadline_ms": 5000,
        "sampling_params": types_pb2.SamplingParams(),
    }
    if "sampling_hash" in fields:
        del values["sampling_params"]
    return types_pb2.RoundHead(**{**values, **fields})


def _calls(method: str, *frames: bytes) -> Iterator[Call]:
    for found, place in METHODS:
        if found.name == method:
            yield Call(found, place, frames)
