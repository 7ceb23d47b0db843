"""Length control in the whole of a coordinator: its rounds with replicas that state their times, on
a virtual clock, with 2 ms of wire in each direction."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from toy_engine import ToyEngine
from twin_store import TwinStore

from coordinator.service import CoordinatorService
from draft_service.service import DraftService
from outrider.clock import run_virtually
from outrider.config import CoordinatorConfig, DraftConfig
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import Guess, NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.step_costs import StepCosts
from outrider.messages import VerdictReply
from outrider.replica.scheduler import InlineExecutor
from outrider.request import Finished, GenerateRequest, Tokens
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.telemetry.observer import Observation, RequestObserver
from outrider.transport.link import MemoryLink
from target_service.service import TargetService

WIRE_S = 0.002
STEP_S = 0.010
NUM_TOKENS = 900
CONFIG = CoordinatorConfig(served_model_name="toy", target_gone_ms=2_000, target_retry_ms=50)


class Counts(RequestObserver, Observation):
    """One request's lengths and resyncs."""

    def __init__(self) -> None:
        self.asked_for: list[int] = []
        self.resyncs: Counter[str] = Counter()

    def begin(self, *arguments: Any) -> RequestObserver:
        return self

    def count(self, name: str, label: str = "") -> None:
        if name == "rounds_by_num_draft_tokens":
            self.asked_for.append(int(label))
        if name == "resyncs":
            self.resyncs[label] += 1


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    num_rounds: int = 0
    counts: Counts = field(default_factory=Counts)
    num_steps: int = 0
    """Forward passes of the target, the prompt's among them."""
    num_messages: int = 0
    """To the target."""
    reads_beside: bool = False
    """Whether the draft was told of the prompt before the target's first verdict."""
    unread: int = 0
    """Verdicts that came for rounds that were over."""
    num_lookups: int = 0
    """By the coordinator."""


class CountedLookups(SuffixDrafter):
    """Counts what it is asked."""

    num_asked = 0

    def guess(self, request: DraftRequest) -> Guess:
        self.num_asked += 1
        return super().guess(request)


def deliver(message: Any) -> None:
    asyncio.get_running_loop().call_later(WIRE_S, message)


def overheard(found: Outcome, target: TargetService, to_target: Any, to_draft: Any) -> list[Any]:
    """Counts messages from now on; the target's answers as they leave."""
    heard: list[Any] = []
    send, send_draft, connect = to_target.send, to_draft.send, target.connect

    def count(item: Any) -> None:
        found.num_messages += 1
        send(item)

    def note(item: Any) -> None:
        found.reads_beside |= not heard
        send_draft(item)

    to_target.send, to_draft.send = count, note
    target.connect = lambda out: connect(lambda got: (heard.extend(got), out(got)))  # type: ignore[method-assign,func-returns-value]
    return heard


def generate(
    rule: Rule,
    num_draft_tokens: int,
    draft_step_s: float,
    draft_salt: int,
    *,
    drafting_delays: bool = False,
    looks_up: bool = False,
) -> Outcome:
    """One request; the draft is the target itself if its salt is 1, or a look-up."""

    async def main() -> Outcome:
        loop = asyncio.get_running_loop()
        found = Outcome()
        engine = ToyEngine(max_model_len=1024)
        costs = StepCosts((1, 17), (STEP_S, STEP_S))
        draft_costs = StepCosts((1, 17), (draft_step_s, draft_step_s))
        target = TargetService(engine, InlineExecutor(lambda: STEP_S), max_num_seqs=8, costs=costs)
        draft = DraftService.with_model(
            ToyEngine(salt=draft_salt, max_model_len=1024),
            InlineExecutor(lambda: draft_step_s),
            max_num_seqs=8,
            costs=draft_costs,
        )
        target_link, draft_link = MemoryLink(target, deliver), MemoryLink(draft, deliver)
        lookups = CountedLookups()
        service = CoordinatorService(
            replace(
                CONFIG,
                drafting_delays=drafting_delays,
                lookup=DraftConfig() if looks_up else None,
            ),
            "c",
            store=TwinStore(lambda: loop.time() * 1e3),
            targets={"t": target_link},
            drafts={} if looks_up else {"d": draft_link},
            fallback=lookups if looks_up else NgramDrafter(),
            text=None,
            observation=found.counts,
        )
        heard = overheard(found, target, target_link, draft_link)
        await service.start()
        start, temperature = loop.time(), 0.0 if rule is Rule.GREEDY else 1.0
        request = GenerateRequest(
            (1, 2, 3), sampling=SamplingParams(temperature=temperature), rule=rule, seed=5,
            max_tokens=NUM_TOKENS, num_draft_tokens=num_draft_tokens,
        )  # fmt: skip
        async for event in service.generate(request):
            if isinstance(event, Tokens):
                found.tokens += event.token_ids
            if isinstance(event, Finished):
                found.num_rounds = event.metrics.num_rounds
        found.seconds = loop.time() - start
        found.num_steps = len(engine.batches)
        found.num_lookups = lookups.num_asked
        verdicts = [answer.key.round for answer in heard if isinstance(answer, VerdictReply)]
        found.unread = len(verdicts) - found.num_rounds
        await service.close()
        service.check_integrity()
        for replica in (target, draft):
            await replica.close()
            replica.check_integrity()
        return found

    return run_virtually(main())


def test_rounds_without_a_draft_run_ahead_and_nearly_all_their_verdicts_are_used() -> None:
    """A draft that guesses badly and takes its time: plain phases and trials take turns. The
    target makes one step a round and none besides, hears of a plain round in eight or so, and
    finds every prefix, though it was ahead when the trials began."""
    found = generate(Rule.COUPLED, 4, STEP_S / 4, draft_salt=2)
    plain = generate(Rule.COUPLED, 0, STEP_S / 4, draft_salt=2)
    asked = found.counts.asked_for
    assert found.tokens == plain.tokens
    assert 0 < sum(num > 0 for num in asked) < 0.1 * len(asked)
    assert sum(a == 0 and b > 0 for a, b in pairwise(asked)) >= 2
    assert found.num_steps == found.num_rounds
    assert found.unread < 0.02 * found.num_rounds
    assert found.num_messages < 0.35 * found.num_rounds
    assert found.counts.resyncs == {}
    assert found.seconds < 1.10 * plain.seconds


def test_rounds_without_a_draft_are_looked_up_and_spare_trials() -> None:
    """In a text that does not repeat itself."""
    found = generate(Rule.COUPLED, 4, 0.0, draft_salt=2, looks_up=True)
    num_drafted = sum(num > 0 for num in found.counts.asked_for)
    assert 0 < num_drafted < 0.04 * len(found.counts.asked_for)
    assert num_drafted + 10 < found.num_lookups < num_drafted + found.num_rounds / 8


@pytest.mark.parametrize("delays", [False, True])
def test_a_draft_on_the_targets_cores_reads_the_prompt_behind_it(delays: bool) -> None:
    found = generate(Rule.GREEDY, 4, 0.0005, draft_salt=1, drafting_delays=delays)
    assert found.reads_beside is not delays
    assert max(found.counts.asked_for) == 4
