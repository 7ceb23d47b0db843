"""Calls every gRPC method with messages, with invalid bytes, and in streams of any order."""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from outrider.v1 import coordinator_pb2, draft_pb2, target_pb2
from tests.fuzz.hostile import BYTES, broken, messages, mutated
from tests.fuzz.ledger import REDIS_LATE, REDIS_REST_S, Ledger
from tests.fuzz.started import Started
from tests.fuzz.valid import STREAMS, VALID

CALL_S: Final = 30.0
"""Within this time, every call must end by itself, or its caller ends it."""
_PATIENT: Final[list[tuple[str, int]]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 2**20),
    ("grpc.enable_retries", 0),
]
_WRONG: Final = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
)
_WRONG_CODES: Final = frozenset(status.value[0] for status in _WRONG)
Ending = Literal["closed", "cancelled", "left open"]
_SERVICES: Final = (
    (coordinator_pb2, "Coordinator", ("coordinator", "locked_coordinator")),
    (target_pb2, "Target", ("target",)),
    (draft_pb2, "Draft", ("draft",)),
)
METHODS: Final[list[tuple[MethodDescriptor, str]]] = [
    (method, place)
    for module, name, places in _SERVICES
    for method in module.DESCRIPTOR.services_by_name[name].methods
    for place in places
] + [
    (method, "target")
    for module, name in ((health_pb2, "Health"), (reflection_pb2, "ServerReflection"))
    for method in module.DESCRIPTOR.services_by_name[name].methods
]
"""Every method, and the servers that have it."""
_METADATA: Final[tuple[tuple[tuple[str, Any], ...], ...]] = (
    *((),) * 8,
    (("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),),
    (("traceparent", "x" * 300),),
    (("traceparent", "00-zz-\x7e-01"), ("traceparent", "")),
    (("x-large", "x" * 15_000),),
    (("x-huge", "x" * 100_000),),
    (("x-bytes-bin", b"\xff\0\xfe"),),
)
_ENDLESS: Final = "Watch"
"""A method that runs until its caller leaves."""


@dataclass(frozen=True)
class Call:
    """One call, and how the caller ends it."""

    method: MethodDescriptor
    place: str
    frames: Sequence[bytes]
    key: str = "fuzzer"
    ending: Ending = "closed"
    num_replies: int = 20
    """Replies that are read before the caller leaves."""
    metadata: tuple[tuple[str, str], ...] = ()
    path: str = ""


@st.composite
def calls(draw: st.DrawFn, *, raw: bool) -> Call:
    """Calls with random messages; with `raw`, with bytes that may be no valid message."""
    method, place = draw(st.sampled_from(METHODS))
    name = method.input_type.name
    if method.client_streaming:
        stream = STREAMS.get(name, st.lists(messages(method.input_type), max_size=4))
        frames = [frame.SerializeToString() for frame in draw(stream)]
    else:
        anything = messages(method.input_type)
        frames = [draw(mutated(VALID.get(name, anything)) | anything).SerializeToString()]
    if raw:
        frames = [draw(broken(st.just(data)) | BYTES) for data in frames] or [draw(BYTES)]
    return Call(
        method=method,
        place=place,
        frames=frames,
        key=draw(st.sampled_from(("fuzzer",) * 6 + ("", "wrong"))),
        ending=draw(st.sampled_from(("closed", "closed", "closed", "cancelled", "left open"))),
        num_replies=draw(st.sampled_from((0, 1, 3, 20, 10_000))),
        metadata=draw(st.sampled_from(_METADATA)),
        path=draw(st.sampled_from(("",) * 30 + ("/outrider.v1.Coordinator/Nothing", "/x/y"))),
    )


class GrpcFeed:
    """Makes calls and checks how they end."""

    def __init__(self, started: Started, ledger: Ledger) -> None:
        self._keys = started.keys
        self._ledger = ledger
        self._channels = {
            place: grpc.insecure_channel(started.addresses[place], options=_PATIENT)
            for place in {place for _, place in METHODS}
        }

    def feed(self, kind: str, again: str, call: Call) -> None:
        """Makes the call, and counts it under this kind."""
        status, details = self._made(again, call)
        if REDIS_LATE in details:
            time.sleep(REDIS_REST_S)
            status, details = self._made(again, call)
        self._ledger.count(kind, status.name)
        if status in _WRONG:
            self._ledger.fail(again, f"{status.name} {details}", call)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _made(self, again: str, call: Call) -> tuple[grpc.StatusCode, str]:
        method = call.method
        word = "_".join(
            "stream" if streams else "unary"
            for streams in (method.client_streaming, method.server_streaming)
        )
        path = call.path or f"/{method.containing_service.full_name}/{method.name}"
        key = self._keys.get(call.key, call.key)
        options: dict[str, Any] = {
            "metadata": [*call.metadata, *((("authorization", f"Bearer {key}"),) if key else ())],
            "timeout": CALL_S,
        }
        made: Any = getattr(self._channels[call.place], word)(path)
        over = threading.Event()
        asked = _frames(call, over) if method.client_streaming else call.frames[0]
        try:
            if not method.server_streaming:
                made(asked, **options)
                return grpc.StatusCode.OK, ""
            replies = made(asked, **options)
            self._read(again, call, replies)
            return replies.code() or grpc.StatusCode.CANCELLED, replies.details() or ""
        except grpc.RpcError as error:
            found: Any = error
            status, details = found.code(), found.details() or ""
            # This is a failure unless the server reports the deadline that the request itself has.
            if status is grpc.StatusCode.DEADLINE_EXCEEDED and "deadline_ms" not in details:
                self._ledger.fail(again, f"it did not end within {CALL_S} s", call)
            return status, details
        finally:
            over.set()

    def _read(self, again: str, call: Call, replies: Any) -> None:
        """Reads as many replies as the caller waits for. A replica must not refuse an item with a
        code that means a bug in Outrider."""
        waits = call.ending == "closed" or not call.method.client_streaming
        number = call.num_replies if waits else min(call.num_replies, len(call.frames))
        if call.ending != "closed" or call.method.name == _ENDLESS:
            # On an open stream, an invalid item may get no answer.
            threading.Timer(0.05, replies.cancel).start()
        output: Any = call.method.output_type
        kind = output._concrete_class
        for data in itertools.islice(replies, number):
            if call.method.input_type.name not in STREAMS:
                continue
            for item in kind.FromString(data).items:
                if item.WhichOneof("answer") == "refused" and item.refused.code in _WRONG_CODES:
                    self._ledger.fail(again, f"refused: {item.refused}", call)
        replies.cancel()


def _frames(call: Call, over: threading.Event) -> Iterator[bytes]:
    yield from call.frames
    if call.ending != "closed":
        over.wait(CALL_S)
