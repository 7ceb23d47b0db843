"""Answers with drafts are held against plain ones, prompt by prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.identity import Identity, passes
from benchmarks.prompts import BenchPrompt
from outrider.request import GenerateRequest
from outrider.speculation.sampling_params import Rule

PROMPTS = [BenchPrompt(text, "other") for text in ("a", "b")]


class Client:
    """Answers with the length of its prompt, but otherwise in one way to one prompt."""

    def __init__(self, differs: str = "", accepts: int = 1) -> None:
        self.differs, self.accepts = differs, accepts
        self.requests: list[GenerateRequest] = []

    async def complete(self, request: GenerateRequest) -> Any:
        self.requests.append(request)
        message: Any = request.prompt[0]
        drafted = bool(request.num_draft_tokens)
        tokens = (len(message.content), drafted and message.content == self.differs)
        accepted = self.accepts if drafted else 0
        return SimpleNamespace(
            token_ids=tokens, metrics=SimpleNamespace(num_accepted_draft_tokens=accepted)
        )


async def reports(client: Any) -> Any:
    identity = Identity(client, PROMPTS, 16, context_words=100)
    ways, rules = ("alone", "beside", "context"), (Rule.GREEDY, Rule.COUPLED)
    return await identity.reports(ways, rules, (1, 8), 2)


async def test_all_ways_are_held_against_plain_decoding() -> None:
    client = Client()
    found = await reports(client)
    assert passes(found)
    assert [(r.way, r.num_draft_tokens) for r in found[:4]] == [
        ("alone", 1), ("alone", 8), ("beside", 1), ("beside", 8),
    ]  # fmt: skip
    assert {r.num_same for r in found} == {2}
    coupled = [r for r in client.requests if r.rule is Rule.COUPLED]
    assert {(r.seed, r.sampling.temperature) for r in coupled} == {(0, 1.0), (1, 1.0)}
    assert sum(r.num_draft_tokens == 0 for r in coupled) == 4  # without a context, and with one


@pytest.mark.parametrize("client", [Client(differs="b"), Client(accepts=0)])
async def test_a_difference_fails_and_so_do_drafts_that_were_never_accepted(client: Any) -> None:
    found = await reports(client)
    assert not passes(found)
    if client.differs:
        assert found[0].different == (1,)
