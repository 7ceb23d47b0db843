"""Items that a step does not finish: they keep their place, wait without spinning, and end when
their session does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rounds import PATIENCE_S, make_head, session_name

from outrider.clock import run_virtually
from outrider.messages import DraftItem, ProposalReply, Refused
from outrider.replica.scheduler import STARVED_REST_S, InlineExecutor, StepScheduler
from outrider.replica.step_request import (
    CANCELLED_CODE,
    AnswerSender,
    StepFigures,
    StepRequest,
    Unfinished,
    expiry,
)
from outrider.speculation.proposal import EMPTY_PROPOSAL


class PatientWorker:
    """Answers each item after as many steps as its session has left, unless it waits for pages."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.left: dict[str, int] = {}
        self.starved: set[str] = set()
        self.num_starved = 0
        self.heard: list[tuple[str, str]] = []
        self.during_step: Any = lambda: None

    @property
    def figures(self) -> StepFigures:
        return StepFigures(num_starved=self.num_starved)

    def step(self, items: Sequence[DraftItem]) -> list[ProposalReply | Unfinished]:
        self.steps.append([item.head.session_id for item in items])
        self.during_step()
        return [self._answer(item) for item in items]

    def _answer(self, item: DraftItem) -> ProposalReply | Unfinished:
        name = item.head.session_id
        if name in self.starved:
            self.num_starved += 1
            return Unfinished.WAITS
        self.left[name] = self.left.get(name, 0) - 1
        if self.left[name] > 0:
            return Unfinished.CONTINUES
        return ProposalReply(item.head.key, EMPTY_PROPOSAL, 0, 0)  # type: ignore[arg-type]

    def park(self, session_ids: Sequence[str]) -> None:
        self.heard += [("park", name) for name in session_ids]
        self.starved.clear()

    def release(self, session_id: str, epoch: int) -> None:
        self.heard.append(("release", session_id))

    def recover(self, items: Sequence[DraftItem]) -> None: ...

    def check_integrity(self) -> None: ...


class Desk:
    def __init__(self, step_s: float = 0.001) -> None:
        self.worker = PatientWorker()
        self.scheduler: StepScheduler[DraftItem, Any] = StepScheduler(
            InlineExecutor(lambda: step_s), self.worker, max_batch=2, queue_max=100
        )
        self.answers: list[Any] = []
        self.outlet: AnswerSender[Any] = AnswerSender(self.answers.extend)

    def submit(self, session: int, deadline_ms: int = 0) -> None:
        head = make_head((1, 2), session=session, deadline_ms=deadline_ms)
        now = asyncio.get_running_loop().time()
        self.scheduler.submit(
            StepRequest(DraftItem(head, 2), [self.outlet], now, expiry(head, now))
        )

    async def finish(self) -> dict[int, Any]:
        """Answers by session, once nothing waits."""
        async with asyncio.timeout(PATIENCE_S):
            await self.scheduler.drain()
        await self.scheduler.close()
        return {int(answer.key.session_id, 16): answer for answer in self.answers}


async def test_what_continues_is_in_the_next_step_before_what_came_later() -> None:
    desk = Desk()
    desk.worker.left[session_name(1)] = 3
    for session in (1, 2, 3):
        desk.submit(session)
    answers = await desk.finish()
    assert [[int(name, 16) for name in step] for step in desk.worker.steps] == [[1, 2], [1, 3], [1]]
    assert list(answers) == [2, 3, 1]


async def test_times_count_from_the_first_step_that_did_something() -> None:
    """Three steps of 20 ms: all are computing, none is waiting."""
    desk = Desk(step_s=0.02)
    desk.worker.left[session_name(1)] = 3
    desk.submit(1)
    answer = (await desk.finish())[1]
    assert answer.queue_ms < 20
    assert answer.compute_ms >= 60


async def test_a_step_that_finds_no_pages_is_not_tried_again_at_once() -> None:
    """Not before something has changed, here that a session is parked; and the wait is no
    computing."""
    desk = Desk()
    desk.worker.starved.add(session_name(1))
    desk.submit(1)
    await asyncio.sleep(2.5 * STARVED_REST_S)
    assert 2 <= len(desk.worker.steps) <= 4
    desk.scheduler.park([session_name(9)])
    answer = (await desk.finish())[1]
    assert answer.queue_ms > 2000 * STARVED_REST_S
    assert answer.compute_ms < 100
    assert desk.worker.heard == [("park", session_name(9))]


async def test_who_knows_of_silent_sessions_is_asked_when_nothing_finds_pages() -> None:
    desk = Desk()
    desk.worker.starved.add(session_name(1))
    asked: list[set[str]] = []

    def starved(waiting: Any) -> None:
        asked.append(set(waiting))
        desk.scheduler.park([session_name(5)])

    desk.scheduler.watch_pages(starved)
    desk.submit(1)
    assert isinstance((await desk.finish())[1], ProposalReply)
    assert asked == [{session_name(1)}]


def test_who_knows_of_silent_sessions_is_asked_while_others_go_on() -> None:
    """One session runs step after step, another finds no pages in any of them: asked about as often
    as a step that finds none rests, and no more once it has its pages."""

    async def main() -> None:
        desk = Desk(step_s=0.01)
        desk.worker.left[session_name(1)] = 100
        desk.worker.starved.add(session_name(2))
        asked: list[float] = []

        def starved(waiting: Any) -> None:
            assert waiting == {session_name(1), session_name(2)}
            asked.append(asyncio.get_running_loop().time())
            if len(asked) == 4:
                desk.scheduler.park([session_name(5)])

        desk.scheduler.watch_pages(starved)
        start = asyncio.get_running_loop().time()
        desk.submit(1)
        desk.submit(2)
        answers = await desk.finish()
        assert list(answers) == [2, 1]
        assert len(desk.worker.steps) == 100
        assert len(asked) == 4
        for count, at in enumerate(asked):
            least = 0.01 + count * STARVED_REST_S
            assert least <= at - start + 1e-9 < least + count * 0.011 + 1e-6

    run_virtually(main())


async def test_an_unfinished_item_of_a_released_session_is_refused_and_forgotten() -> None:
    """The release comes while the step runs; no further step is spent on the item."""
    desk = Desk()
    desk.worker.left[session_name(1)] = 9
    desk.worker.during_step = lambda: desk.scheduler.release(session_name(1), 1)
    desk.submit(1)
    answer = (await desk.finish())[1]
    assert isinstance(answer, Refused)
    assert answer.code == CANCELLED_CODE
    assert len(desk.worker.steps) == 1
    assert desk.worker.heard == [("release", session_name(1))]


async def test_an_item_that_expires_between_two_parts_is_refused_and_its_session_parked() -> None:
    desk = Desk(step_s=0.02)
    desk.worker.left[session_name(1)] = 1000
    desk.submit(1, deadline_ms=30)
    answer = (await desk.finish())[1]
    assert isinstance(answer, Refused)
    assert answer.code == 4
    assert len(desk.worker.steps) <= 3
    assert desk.worker.heard == [("park", session_name(1))]


async def test_an_unfinished_item_that_nobody_wants_any_more_is_dropped() -> None:
    desk = Desk()
    desk.worker.left[session_name(1)] = 1000

    def close() -> None:
        desk.outlet.closed = True

    desk.worker.during_step = close
    desk.submit(1)
    assert await desk.finish() == {}
    assert len(desk.worker.steps) == 1
