"""The coordinator called by gRPC, with a target and a draft behind gRPC, and Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from models import byte_level_tokenizer
from stack import VOCAB, Stack
from toy_engine import toy_logits

from outrider.client import Completion
from outrider.request import GenerateRequest, Started
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import SamplingParams
from outrider.transport.channel import open_channel
from outrider.v1 import coordinator_pb2 as pb

PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0.0)


async def complete(stack: Stack, **fields: Any) -> Completion:
    defaults: dict[str, Any] = {"prompt": PROMPT, "sampling": GREEDY, "max_tokens": 12}
    return await stack.client.complete(GenerateRequest(**(defaults | fields)))


def plain_greedy(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(toy_logits(1, tokens, VOCAB).argmax()))
    return tokens[len(prompt) :]


async def test_tokens_text_usage_and_metrics(stack: Stack) -> None:
    answer = await complete(stack, num_draft_tokens=4, include_rounds=True)
    assert list(answer.token_ids) == plain_greedy(PROMPT, 12)
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


async def test_logprobs_are_of_the_raw_logits(stack: Stack) -> None:
    answer = await complete(
        stack, logprobs=2, num_draft_tokens=3, sampling=SamplingParams(top_k=5), seed=4
    )
    assert len(answer.logprobs) == 12
    tokens = list(PROMPT)
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        expected = toy_logits(1, tokens, VOCAB).double().log_softmax(0)
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-9)
        assert [v for v, _ in entry.top] == expected.topk(2).indices.tolist()
        tokens.append(token_id)


LONG = GenerateRequest(PROMPT, max_tokens=4000, seed=1, num_draft_tokens=2)


async def test_a_client_that_goes_away_cancels(slow: Stack) -> None:
    stream = slow.client.generate(LONG)
    session_id = ""
    async for event in stream:
        if isinstance(event, Started):
            session_id = event.session_id
        else:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        while (await slow.client.get_session(session_id)).state != "finished":
            await asyncio.sleep(0.02)
    assert slow.coordinator.num_running == 0


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
