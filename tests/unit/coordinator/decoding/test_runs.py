"""What the runs of sessions share: lengths, and the counts of a trial."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider import errors
from outrider.drafters.drafter import DraftRequest
from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.step_costs import StepCosts
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.coordinator_bench import (
    REQUEST,
    STEP_S,
    Bench,
    bench,
    running,
    target_service,
    tokens_of,
)
from tests.support.rounds import SeverableLink
from tests.support.toy_engine import ToyEngine

pytestmark = pytest.mark.virtual


async def test_sessions_of_a_draft_on_trial_learn_separately_but_know_all_seeds() -> None:
    async with bench(length_control=True) as b:

        async def drafted(seed: int) -> list[float]:
            """Weights of the rounds with a draft from which sessions learned, without the trial and
            in it."""
            await b.events(replace(REQUEST, seed=seed, rule=Rule.TOKEN, sampling=SamplingParams()))
            lengths, tried = b.service.runs.lengths, b.draft.describe()
            return [lengths.learned(one).costs._target.weight for one in (None, tried)]

        [before, _] = await drafted(seed=1)
        await b.service.drafts.join("tried", SeverableLink(b.draft), trial_share=1.0)
        assert await drafted(seed=1) == [before, 0]
        [without, tried] = await drafted(seed=2)
        assert without == before > 0 < tried
        b.service.drafts.retire("tried")
        assert await drafted(seed=2) == [before, tried]

        # The draft on trial may be the first that a coordinator knows.
        await b.service.drafts.join("other", SeverableLink(b.draft), trial_share=1.0)
        lengths = b.service.runs.lengths
        lengths._draft = None
        kept = b.service.drafts.replicas.pop(next(iter(b.service.drafts.replicas)))
        await drafted(seed=3)
        assert lengths._draft is None
        b.service.drafts.replicas["kept"] = kept
        await drafted(seed=4)
        assert lengths._draft is kept.description


@pytest.mark.parametrize(
    ("rule", "num_counted"), [(Rule.TOKEN, 1), (Rule.BLOCK, 1), (Rule.COUPLED, 3)]
)
@pytest.mark.parametrize("length_control", [False, True])
async def test_a_trial_counts_no_session_that_repeats_a_seed(
    rule: Rule, num_counted: int, length_control: bool
) -> None:
    """If the first session with this seed still runs when the second begins, it does not count
    either."""
    request = replace(REQUEST, seed=6, rule=rule, sampling=SamplingParams())
    async with bench(length_control=length_control) as b:
        await b.service.drafts.join("tried", SeverableLink(b.draft), trial_share=1.0)
        sums = []
        for _ in range(3):
            await b.events(request)
            await asyncio.sleep(1)
            sums.append(b.service.runs.trial.sums.new)
        assert [one.num_sessions for one in sums] == [min(n, num_counted) for n in (1, 2, 3)]
        assert (sums[0] == sums[2]) == (num_counted == 1)
        first = asyncio.create_task(b.events(replace(request, seed=7)))
        await asyncio.sleep(6 * STEP_S)
        await b.events(replace(request, seed=7))
        await first
        await asyncio.sleep(1)
        assert (b.service.runs.trial.sums.new == sums[2]) == (num_counted == 1)


class Repeating(ToyEngine):
    """A target's engine and self-drafter, which drafts one token over and over."""

    @property
    def engine(self) -> "Repeating":
        return self

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        self._num_rows = [step.num_logits for step in steps]
        return super().forward(steps)

    def features(self) -> list[torch.Tensor]:
        return [torch.empty(num, 1) for num in self._num_rows]

    def propose(
        self, requests: Sequence[DraftRequest], features: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        return [Proposal((1,) * one.num_draft_tokens) for one in requests]


async def test_sessions_of_a_target_on_trial_learn_and_are_counted_apart() -> None:
    costs = [StepCosts((1,), (seconds,)) for seconds in (STEP_S, 2 * STEP_S)]
    engines: list[Any] = [Repeating(), Repeating()]
    targets = [
        target_service(engine, self_drafter=engine, costs=one)
        for engine, one in zip(engines, costs, strict=True)
    ]
    async with bench(target=targets[0], length_control=True) as b:
        request = replace(REQUEST, seed=None, sampling=SamplingParams(temperature=0.0))
        text = tokens_of(await b.events(request))
        lengths = b.service.runs.lengths
        before = lengths.costs._target.weight
        link = SeverableLink(targets[1])
        await b.service.targets.join("tried", link, trial_share=1.0)
        assert tokens_of(await b.events(request)) == text
        tried = lengths.learned(targets[1].describe()).costs
        assert lengths.costs._target.weight == before > 0 < tried._target.weight
        assert [one._table for one in (lengths.costs, tried)] == costs
        await asyncio.sleep(1)
        sums = b.service.runs.trial.sums
        assert (sums.replica, sums.old.num_rounds) == ("tried", 0)
        assert sums.new.num_rounds > 0
        running = asyncio.create_task(b.events(request))
        await asyncio.sleep(5 * STEP_S)
        link.sever(errors.LinkLost("down"), reachable=False)
        assert tokens_of(await running) == text
        await asyncio.sleep(1)
        assert b.service.runs.trial.sums.old.num_rounds == 0
        await b.service.targets.join("other", SeverableLink(targets[1]), trial_share=1e-9)
        assert tokens_of(await b.events(request)) == text
        await asyncio.sleep(1)
        sums = b.service.runs.trial.sums
        assert (sums.replica, sums.new.num_rounds) == ("other", 0)
        assert sums.old.num_rounds > 0
    await targets[1].close()


async def test_lengths_are_learned_for_a_target_that_is_not_on_trial() -> None:
    made = Bench(length_control=True)
    costs = StepCosts((1,), (STEP_S,))
    tried = target_service(costs=costs)
    await made.service.targets.join("tried", SeverableLink(tried), trial_share=1.0)
    async with running(made) as b:
        assert b.service.targets.first.step_costs == costs
        assert b.service.runs.lengths._target.step_costs is None
    await tried.close()
