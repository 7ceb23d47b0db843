"""`Client` and `SyncClient` give the same results."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from stack import Stack, toy_stack

from outrider.client import ChatMessage, Completion, GenerateRequest, SyncClient
from outrider.errors import BadRequest, NotFound
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule, SamplingParams

PROMPT = (1, 2, 3)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    # With look-ahead, proposals would depend on timing.
    async with toy_stack(tmp_path, look_ahead=0) as running:
        yield running


def without_times(completion: Completion) -> Completion:
    """The parts of a completion that are the same each time."""
    metrics = dataclasses.replace(
        completion.metrics, time_to_first_token_ms=0.0, tokens_per_second=0.0
    )
    return dataclasses.replace(completion, session_id="", metrics=metrics)


ANSWERED: list[dict[str, Any]] = [
    {"sampling": SamplingParams(temperature=0.0)},
    {"sampling": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01)},
    {"rule": Rule.BLOCK, "logprobs": 2},
    {"prompt": "the quick brown", "stop": ("e",)},
    {"prompt": (ChatMessage("user", "hello"),), "num_draft_tokens": 0},
]


async def test_both_clients_give_the_same_answer(stack: Stack) -> None:
    for fields in ANSWERED:
        request = GenerateRequest(**({"prompt": PROMPT, "max_tokens": 12, "seed": 7} | fields))
        answer = await stack.client.complete(request)
        with SyncClient(stack.client.address) as blocking:
            waited_for = await asyncio.to_thread(blocking.complete, request)
        assert answer.session_id != waited_for.session_id
        assert without_times(waited_for) == without_times(answer)


async def test_an_ended_session_can_be_read(stack: Stack) -> None:
    answer = await stack.client.complete(GenerateRequest(PROMPT, max_tokens=5))
    view = await stack.client.get_session(answer.session_id)
    assert view.token_ids == (*PROMPT, *answer.token_ids)
    assert (view.state, view.finish_reason) == ("finished", FinishReason.LENGTH)
    for missing, error in (("0" * 31 + "1", NotFound), ("no id", BadRequest)):
        with pytest.raises(error):
            await stack.client.get_session(missing)
