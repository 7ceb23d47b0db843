"""Requests with a constraint, from a coordinator's check to a resumed session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from constrained import CONSTRAINTS, EndingEngine, grammars, hf_tokenizer
from coordinator_bench import CONFIG
from test_recovery import nobody, taken, tokens_of
from twin_store import TwinStore

from coordinator.service import CoordinatorService
from draft_service.service import DraftService
from outrider.drafters.lookup import NgramDrafter
from outrider.replica.executors import InlineExecutor
from outrider.request import GenerateRequest
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.tokenizer import TokenizerText
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

REQUEST = GenerateRequest(
    tuple(range(60, 68)),
    sampling=SamplingParams(temperature=0.8),
    max_tokens=150,
    num_draft_tokens=3,
    seed=4,
    rule=Rule.COUPLED,
    constraint=CONSTRAINTS["schema"],
)


@asynccontextmanager
async def served(store: TwinStore, name: str, text: Any = None) -> AsyncIterator[Any]:
    """A coordinator with replicas of its own."""
    executor = InlineExecutor(lambda: 0.0)
    target = TargetService(EndingEngine(1), executor, max_num_seqs=8, grammars=grammars())
    draft = DraftService.with_model(EndingEngine(2), executor, max_num_seqs=8, grammars=grammars())
    service = CoordinatorService(
        replace(CONFIG, resume_grace_ms=10_000, look_ahead=4),
        name,
        store=store,
        targets={"t": MemoryLink(target)},
        drafts={"d": MemoryLink(draft)},
        fallback=NgramDrafter(),
        text=TokenizerText(hf_tokenizer(), "small") if text is None else text,
    )
    await service.start()
    yield service
    await service.close()
    service.check_integrity()
    for replica in (target, draft):
        await replica.close()
        replica.check_integrity()


def store() -> TwinStore:
    loop = asyncio.get_running_loop()
    return TwinStore(lambda: loop.time() * 1e3)


async def test_a_session_goes_on_with_its_constraint_on_another_coordinator() -> None:
    """Whose replicas have never heard of it."""
    kept = store()
    async with served(kept, "a") as first, served(kept, "b") as second:
        whole = tokens_of([event async for event in first.generate(REQUEST)])
        async with aclosing(first.generate(REQUEST)) as events:
            broken = await taken(events, 4)
            kept.hold_lease = nobody  # type: ignore[method-assign]
            await asyncio.sleep(2.5)  # The lease runs out.
            rest = [event async for event in second.resume(broken.request)]
        assert 4 <= len(tokens_of(broken.heard)) < len(whole)
        assert tokens_of(broken.heard) + tokens_of(rest) == whole
