"""Length control in a whole coordinator, with 2 ms of latency in each direction."""

import asyncio
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest

from outrider.config.deployment import DraftConfig
from outrider.drafters.suffix import SuffixDrafter
from outrider.interfaces.messages import DraftItem, VerdictReply, VerifyItem
from outrider.interfaces.request import Finished, GenerateRequest
from outrider.interfaces.step_costs import StepCosts
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.telemetry.observer import Observation, RequestObserver
from outrider.transport.link import MemoryLink
from tests.support.coordinator_bench import CONFIG, STEP_S, bench, draft_service, target_service
from tests.support.toy_engine import ToyEngine

pytestmark = pytest.mark.virtual

WIRE_S = 0.002
NUM_TOKENS = 900


class Played(RequestObserver, Observation):
    """Observations of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.asked_for: list[int] = []
        self.seconds = 0.0
        self.num_resyncs = self.num_rounds = 0
        self.num_steps = 0
        """Forward passes of the target, the prompt's among them."""
        self.heard: list[Any] = []
        """All messages, in both directions."""

    def num_heard(self, kind: type) -> int:
        return sum(isinstance(one, kind) for one in self.heard)

    def begin(self, *arguments: Any) -> RequestObserver:
        return self

    def count(self, name: str, label: str = "") -> None:
        if name == "rounds_by_num_draft_tokens":
            self.asked_for.append(int(label))
        self.num_resyncs += name == "resyncs"


class Overheard(MemoryLink):
    """A link with latency. `heard` gets its messages."""

    def __init__(self, service: Any, heard: list[Any]) -> None:
        loop, connect = asyncio.get_running_loop(), service.connect
        super().__init__(service, lambda message: loop.call_later(WIRE_S, message))
        self._all = heard
        service.connect = lambda out: connect(lambda got: (heard.extend(got), out(got)))

    def send(self, item: Any) -> None:
        self._all.append(item)
        super().send(item)


async def generate(
    rule: Rule,
    num_draft_tokens: int,
    draft_step_s: float,
    draft_salt: int,
    *,
    lookup: SuffixDrafter | None = None,
    **settings: Any,
) -> Played:
    """Runs one request. The draft equals the target if its salt is 1. With `lookup` there is
    none."""
    found = Played()
    engines = [ToyEngine(salt=salt, max_model_len=1024) for salt in (1, draft_salt)]
    target = target_service(engines[0], costs=StepCosts((1, 17), (STEP_S, STEP_S)))
    costs = StepCosts((1, 17), (draft_step_s, draft_step_s))
    draft = draft_service(engines[1], draft_step_s, costs=costs)
    request = GenerateRequest(
        (1, 2, 3),
        sampling=SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0),
        rule=rule,
        seed=5,
        max_tokens=NUM_TOKENS,
        num_draft_tokens=num_draft_tokens,
    )
    async with bench(
        target=target,
        draft=draft,
        target_link=Overheard(target, found.heard),
        drafts={} if lookup else {"d": Overheard(draft, found.heard)},
        fallback=lookup,
        observation=found,
        length_control=True,
        lookup=DraftConfig() if lookup else CONFIG.lookup,
        **settings,
    ) as made:
        start = asyncio.get_running_loop().time()
        async for event in made.service.streams.generate(request):
            found.tokens += getattr(event, "token_ids", ())
            if isinstance(event, Finished):
                found.num_rounds = event.metrics.num_rounds
        found.seconds = asyncio.get_running_loop().time() - start
        found.num_steps = len(engines[0].batches)
    return found


async def test_rounds_without_a_draft_run_ahead_and_nearly_all_their_verdicts_are_used() -> None:
    """The draft is bad and slow, so plain phases and trials alternate. The target gets a message
    for about one plain round in eight, and needs no resync when trials begin."""
    found = await generate(Rule.COUPLED, 4, STEP_S / 4, draft_salt=2)
    plain = await generate(Rule.COUPLED, 0, STEP_S / 4, draft_salt=2)
    asked = found.asked_for
    assert found.tokens == plain.tokens
    assert 0 < sum(num > 0 for num in asked) < 0.1 * len(asked)
    assert sum(a == 0 and b > 0 for a, b in pairwise(asked)) >= 2
    assert found.num_steps == found.num_rounds
    assert found.num_heard(VerdictReply) < 1.02 * found.num_rounds
    assert found.num_heard(VerifyItem) < 0.35 * found.num_rounds
    assert found.num_resyncs == 0
    assert found.seconds < 1.10 * plain.seconds


async def test_look_ups_in_plain_rounds_save_trials() -> None:
    lookup: Any = SuffixDrafter()
    lookup.guess = Mock(wraps=lookup.guess)
    found = await generate(Rule.COUPLED, 4, 0.0, draft_salt=2, lookup=lookup)
    num_drafted = sum(num > 0 for num in found.asked_for)
    assert 0 < num_drafted < 0.05 * len(found.asked_for)
    assert num_drafted + 10 < lookup.guess.call_count < num_drafted + found.num_rounds / 8


@pytest.mark.parametrize("delays", [False, True])
async def test_a_draft_on_the_targets_cores_reads_the_prompt_after_it(delays: bool) -> None:
    found = await generate(Rule.GREEDY, 4, 0.0005, draft_salt=1, drafting_delays=delays)
    first = next(one for one in found.heard if isinstance(one, DraftItem | VerdictReply))
    assert isinstance(first, VerdictReply) is delays
    assert max(found.asked_for) == 4
