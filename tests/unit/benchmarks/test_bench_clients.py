"""How requests of a measurement are made. What `HttpClient` reads is tested by `bench serve`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from benchmarks.clients import GrpcClient
from benchmarks.measurement import Decoding
from benchmarks.prompts import BenchPrompt, parse_prompts
from outrider.errors import Unavailable
from outrider.request import ChatMessage, Event, Finished, GenerateRequest, Metrics, Tokens, Usage
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule

DECODING = Decoding(max_tokens=33, temperature=0.5, rule=Rule.BLOCK, seed=4, num_draft_tokens=8)


class RecordingClient:
    """Stands where `outrider.client.Client` does."""

    def __init__(self, finish_reason: FinishReason = FinishReason.LENGTH) -> None:
        self.finish_reason = finish_reason
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        yield Tokens(0, (5, 6), "", (Origin.BONUS,) * 2, ())
        yield Tokens(2, (7,), "", (Origin.BONUS,), ())
        yield Finished(self.finish_reason, Usage(4, 3), Metrics(2, 9, 1, 1.5, 3.0, 100.0))


@pytest.mark.parametrize("raw", [False, True])
async def test_a_request_says_all_that_is_measured(raw: bool) -> None:
    client = RecordingClient()
    side = GrpcClient(client, raw=raw)  # type: ignore[arg-type]
    done = await side.generate(BenchPrompt("Hello.", "chat"), DECODING)
    [request] = client.requests
    assert request.prompt == ("Hello." if raw else (ChatMessage("user", "Hello."),))
    assert request.sampling.temperature == 0.5
    assert (request.rule, request.seed) == (Rule.BLOCK, 4)
    assert (request.max_tokens, request.num_draft_tokens) == (33, 8)
    assert not request.ignore_eos
    assert (done.token_ids, done.prompt_tokens) == ((5, 6, 7), 4)
    assert (done.num_rounds, done.num_draft_tokens, done.num_accepted_draft_tokens) == (2, 9, 1)
    assert 0 < done.chunk_s[0] < done.chunk_s[1] < done.seconds


async def test_a_request_that_was_cut_short_is_no_measurement() -> None:
    side = GrpcClient(RecordingClient(FinishReason.DEADLINE), raw=True)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="deadline"):
        await side.generate(BenchPrompt("a", "b"), DECODING)


async def test_a_prompt_may_ask_for_json() -> None:
    """By OpenAI's `response_format`."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    [prompt] = parse_prompts(json.dumps({"prompt": "a", "response_format": schema}), "here")
    client = RecordingClient()
    await GrpcClient(client, raw=True).generate(prompt, DECODING)  # type: ignore[arg-type]
    constraint = client.requests[0].constraint
    assert constraint is not None
    assert constraint.text == '{"type":"array"}'
