"""The coordinator by gRPC, with a target and a draft behind gRPC, and with Redis."""

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from stack import Stack, emulated_stack

from outrider.engine.emulated_spec import EmulatedSpec
from outrider.errors import OutriderError
from outrider.request import GenerateRequest
from outrider.transport.channel import open_channel
from outrider.v1 import coordinator_pb2 as pb

pytestmark = pytest.mark.xdist_group("redis")

NUM_REQUESTS = 1_400
QUICK = EmulatedSpec(vocab_size=16, support=8, verify_ms=1.0, draft_ms=0.1)


async def test_what_cannot_be_decoded_or_is_missing_is_invalid(stack: Stack) -> None:
    nowhere = pb.GenerateRequest(max_tokens=1).SerializeToString()
    silent = pb.GenerateRequest(chat=pb.ChatMessages()).SerializeToString()
    rule = pb.GenerateRequest(text="a", rule=17).SerializeToString()  # type: ignore[arg-type]
    async with open_channel(stack.client.address) as channel:
        call = channel.unary_stream("/outrider.v1.Coordinator/Generate")
        cases = {
            b"\xff\xff\xff": "message",
            nowhere: "prompt",
            silent: "chat.messages",
            rule: "rule",
        }
        for data, field in cases.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call(data):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            details = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
            status = status_pb2.Status.FromString(details)  # type: ignore[arg-type]
            bad_request = error_details_pb2.BadRequest()
            assert status.details[0].Unpack(bad_request)
            assert bad_request.field_violations[0].field == field


async def test_a_burst_of_requests_is_served_whole(tmp_path: Path) -> None:
    async def outcome(number: int) -> str:
        request = GenerateRequest((1, 2, 3), max_tokens=2, seed=number, num_draft_tokens=0)
        try:
            return f"{len((await stack.client.complete(request)).token_ids)} tokens"
        except OutriderError as error:
            return f"{type(error).__name__}: {error}"

    async with emulated_stack(tmp_path, QUICK, max_sessions=NUM_REQUESTS) as stack:
        outcomes = await asyncio.gather(*(outcome(number) for number in range(NUM_REQUESTS)))
    assert Counter(outcomes) == {"2 tokens": NUM_REQUESTS}
