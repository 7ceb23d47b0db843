"""Requests with a constraint, from a coordinator's check to a resumed session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from constrained import CONSTRAINTS, EndingEngine, eos, grammar, grammars, hf_tokenizer
from coordinator_bench import CONFIG
from test_recovery import nobody, taken, tokens_of
from twin_store import TwinStore

from coordinator.service import CoordinatorService
from draft_service.service import DraftService
from outrider.drafters.lookup import NgramDrafter
from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint
from outrider.grammar.matcher import PrefixMatcher
from outrider.replica.scheduler import InlineExecutor
from outrider.request import Finished, GenerateRequest
from outrider.sessions.store import FinishReason
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


def meets(token_ids: list[int]) -> bool:
    return PrefixMatcher(grammar("schema")).stand(0, token_ids) == len(token_ids)


async def test_completions_meet_their_schema_and_do_not_depend_on_drafts() -> None:
    async with served(store(), "a") as service:
        found = []
        for k in (0, 3):
            asked = replace(REQUEST, num_draft_tokens=k)
            events = [event async for event in service.generate(asked)]
            assert isinstance(events[-1], Finished)
            assert events[-1].finish_reason is FinishReason.STOP
            found.append(tokens_of(events))
            assert meets(found[-1])
            assert found[-1][-1] == eos()
        assert found[0] == found[1]
        assert events[-1].metrics.num_draft_tokens > 0


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


async def test_what_cannot_be_held_to_is_refused_before_anything_is_opened() -> None:
    kept = store()
    opened = []
    kept.open = opened.append  # type: ignore[assignment, method-assign]
    async with served(kept, "a") as service:
        for constraint, said in (
            (Constraint.of_schema({"type": "nonsense"}), "json_schema: cannot be compiled"),
            (Constraint.of_regex("(a"), "regex: cannot be compiled"),
        ):
            with pytest.raises(BadRequest, match=said):
                async for _ in service.generate(replace(REQUEST, constraint=constraint)):
                    pass
    assert opened == []
