"""The coordinator called by gRPC, with a target and a draft behind gRPC, and Redis."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from models import byte_level_tokenizer
from stack import VOCAB, Stack
from toy_engine import toy_logits

from outrider.request import GenerateRequest
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import SamplingParams
from outrider.transport.channel import open_channel
from outrider.v1 import coordinator_pb2 as pb


async def test_tokens_text_usage_and_metrics(stack: Stack) -> None:
    request = GenerateRequest(
        (1, 2, 3), sampling=SamplingParams(temperature=0.0), max_tokens=12, num_draft_tokens=4,
        include_rounds=True,
    )  # fmt: skip
    answer = await stack.client.complete(request)
    plain = [1, 2, 3]
    for _ in range(12):
        plain.append(int(toy_logits(1, plain, VOCAB).argmax()))
    assert list(answer.token_ids) == plain[3:]
    tokenizer = byte_level_tokenizer(VOCAB)
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert answer.finish_reason is FinishReason.LENGTH
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
    metrics = answer.metrics
    assert metrics.num_rounds == len(answer.rounds) > 1
    # The draft is the target's equal, so whatever it proposes is accepted.
    assert metrics.num_draft_tokens == metrics.num_accepted_draft_tokens > 6
    ratio = 1 + metrics.num_accepted_draft_tokens / metrics.num_rounds
    assert metrics.mean_acceptance_length == pytest.approx(ratio)
    assert sum(r.num_accepted for r in answer.rounds) == metrics.num_accepted_draft_tokens
    assert [len(answer.origins), answer.origins.count("accepted")] == [
        12,
        metrics.num_accepted_draft_tokens,
    ]


async def test_what_cannot_be_decoded_or_is_missing_is_invalid(stack: Stack) -> None:
    """Raw bytes, no prompt, an unknown rule: INVALID_ARGUMENT with the field."""
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
