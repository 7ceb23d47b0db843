"""A simulated fleet against the services' own step schedulers, on a virtual clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from rounds import make_head

from outrider.clock import run_virtually
from outrider.engine.step_costs import StepCosts
from outrider.fleet_simulator.scenario import Demand, Drafting, FleetSize, Scenario
from outrider.fleet_simulator.simulation import simulate
from outrider.messages import DraftItem, ProposalReply, ReplyKey
from outrider.planning.round_times import ServiceTimes
from outrider.replica.scheduler import InlineExecutor, StepScheduler
from outrider.replica.step_request import AnswerSender, StepFigures, StepRequest
from outrider.speculation.proposal import EMPTY_PROPOSAL

WARM_UP_S, SECONDS = 2.0, 10.0
VERIFY = StepCosts((1, 101), (0.0198, 0.0298), session_s=0.001)
DRAFT = StepCosts((1, 64), (0.0011, 0.0022))
K = 4


class _Replica:
    """A step scheduler whose steps take as long as is said, and who waits for their answers."""

    def __init__(self, seats: int, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self._step_s = 0.0
        self._waiting: dict[ReplyKey, asyncio.Future[None]] = {}
        self._outlet: AnswerSender[Any] = AnswerSender(self._answered)
        self._scheduler: StepScheduler[DraftItem, Any] = StepScheduler(
            InlineExecutor(lambda: self._step_s), self, max_batch=seats, queue_max=1_000
        )

    async def ask(self, session: int, index: int) -> None:
        head = make_head((1, 2), session=session, round_index=index)
        now = asyncio.get_running_loop().time()
        self._waiting[head.key] = asyncio.get_running_loop().create_future()
        self._scheduler.submit(StepRequest(DraftItem(head, K), [self._outlet], now, math.inf))
        await self._waiting[head.key]

    def _answered(self, answers: Sequence[ProposalReply]) -> None:
        for answer in answers:
            self._waiting.pop(answer.key).set_result(None)

    async def close(self) -> None:
        await self._scheduler.close()

    @property
    def figures(self) -> StepFigures:
        return StepFigures()

    def step(self, items: Sequence[DraftItem]) -> list[ProposalReply]:
        self._step_s = self._seconds(len(items))
        return [ProposalReply(item.head.key, EMPTY_PROPOSAL, 0, 0) for item in items]

    def park(self, session_ids: Sequence[str]) -> None:
        pass

    def release(self, session_id: str, epoch: int) -> None:
        pass

    def recover(self, items: Sequence[DraftItem]) -> None:
        pass

    def check_integrity(self) -> None:
        pass


async def _rounds_per_second(sessions: int, seats: int, rest_s: float) -> float:
    """Of sessions that begin one by one, by the services' schedulers."""
    loop = asyncio.get_running_loop()
    target = _Replica(seats, lambda num: VERIFY.step_seconds(num * (K + 1), num))
    draft = _Replica(seats, lambda num: K * DRAFT.step_seconds(num, num))
    num_rounds = 0

    async def play(session: int) -> None:
        nonlocal num_rounds
        await asyncio.sleep(WARM_UP_S / 2 * session / sessions)
        for index in count():
            await target.ask(session, index)
            if loop.time() >= WARM_UP_S + SECONDS:
                return
            num_rounds += loop.time() >= WARM_UP_S
            await asyncio.sleep(rest_s)
            await draft.ask(session, index)

    await asyncio.gather(*map(play, range(sessions)))
    await target.close()
    await draft.close()
    return num_rounds / SECONDS


@pytest.mark.parametrize(
    ("sessions", "seats", "rest_s"),
    [(1, 4, 0.0), (2, 2, 0.0005), (3, 2, 0.002), (8, 8, 0.001), (10, 3, 0.03), (30, 8, 0.002)],
)
def test_steps_are_shared_as_the_services_share_them(
    sessions: int, seats: int, rest_s: float
) -> None:
    """Rounds a second of one target and one draft, within 1 %: whoever waits when a step ends is in
    the next one, first come, first served."""
    scenario = Scenario(
        fleet=FleetSize(targets=1, drafts=1),
        demand=Demand(sessions=sessions, prompt_tokens=2, answer_tokens=math.inf),
        drafting=Drafting.of((0.0,) * K),
        times=ServiceTimes(
            target=VERIFY, verify=VERIFY, draft=DRAFT, rest_s=rest_s, max_num_seqs=seats
        ),
        coordinator_s=0.0,
        warm_up_s=WARM_UP_S,
        seconds=SECONDS,
    )
    played = run_virtually(_rounds_per_second(sessions, seats, rest_s))
    assert simulate(scenario).rounds_per_second == pytest.approx(played, rel=0.01)
