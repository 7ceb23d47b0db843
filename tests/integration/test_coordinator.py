"""The coordinator by gRPC, with a target and a draft behind gRPC, and with Redis."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from outrider import limits
from outrider.config.emulated_spec import EmulatedSpec
from outrider.errors import OutriderError
from outrider.interfaces.request import GenerateRequest
from tests.support.stack import emulated_stack

pytestmark = pytest.mark.xdist_group("redis")

NUM_REQUESTS = 1_400
"""Many more than the calls that gRPC leaves waiting by default (1,000)."""
QUICK = EmulatedSpec(vocab_size=16, support=8, verify_ms=1.0, draft_ms=0.1)


async def test_a_burst_of_requests_is_served_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call of the burst is dropped for its number. A slow machine begins the last calls late, so
    none is dropped for the time that it waits."""
    monkeypatch.setattr(limits, "GRPC_PENDING_S_MAX", 600)

    async def outcome(number: int) -> str:
        request = GenerateRequest((1, 2, 3), max_tokens=2, seed=number, num_draft_tokens=0)
        try:
            return f"{len((await stack.client.complete(request)).token_ids)} tokens"
        except OutriderError as error:
            return f"{type(error).__name__}: {error}"

    async with emulated_stack(tmp_path, QUICK, max_sessions=NUM_REQUESTS) as stack:
        outcomes = await asyncio.gather(*(outcome(number) for number in range(NUM_REQUESTS)))
    assert Counter(outcomes) == {"2 tokens": NUM_REQUESTS}
