"""How requests of a measurement are made. What `HttpClient` reads is tested by `bench serve`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.clients import GrpcClient
from benchmarks.measurement import Decoding
from benchmarks.prompts import parse_prompts
from outrider.errors import Unavailable
from outrider.request import ChatMessage, Event, Finished, GenerateRequest, Metrics, Tokens, Usage
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule


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
    """A prompt may ask for JSON. One that was cut short is no measurement."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    [prompt] = parse_prompts(json.dumps({"prompt": "Hello.", "response_format": schema}), "here")
    decoding = Decoding(33, temperature=0.5, rule=Rule.BLOCK, seed=4, num_draft_tokens=8)
    client: Any = RecordingClient()
    done = await GrpcClient(client, raw=raw).generate(prompt, decoding)
    [request] = client.requests
    assert request.prompt == ("Hello." if raw else (ChatMessage("user", "Hello."),))
    assert (request.sampling.temperature, request.rule, request.seed) == (0.5, Rule.BLOCK, 4)
    assert (request.max_tokens, request.num_draft_tokens) == (33, 8)
    assert request.constraint.text == '{"type":"array"}'
    assert not request.ignore_eos
    assert (done.token_ids, done.prompt_tokens) == ((5, 6, 7), 4)
    assert (done.num_rounds, done.num_draft_tokens, done.num_accepted_draft_tokens) == (2, 9, 1)
    assert 0 < done.chunk_s[0] < done.chunk_s[1] < done.seconds
    client = RecordingClient(FinishReason.DEADLINE)
    with pytest.raises(Unavailable, match="deadline"):
        await GrpcClient(client, raw=True).generate(prompt, decoding)
