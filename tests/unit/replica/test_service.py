"""The event loop's side of a replica: what it refuses, which requests are open, and what it knows
of its sessions and its load."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import EngineLost, Overloaded, StaleEpoch, Unavailable
from outrider.interfaces.messages import DraftItem, ProposalReply, Refused
from outrider.limits import (
    HUNG_STEP_FACTOR,
    HUNG_STEP_S,
    LATE_STEP_FACTOR,
    LATE_STEP_S,
    RELEASES_REMEMBERED_MAX,
    SILENT_SESSION_MS,
)
from outrider.registry.registry import WINDOW_S
from outrider.replica.drivers import InlineDriver
from outrider.replica.service import StaleRoundFilter, StepLoad, SteppedService
from outrider.replica.step_loop import StepLoop
from outrider.replica.step_request import CANCELLED_CODE, StepFigures
from outrider.replica.step_watch import CHECK_PERIOD_S
from tests.support.rounds import PATIENCE_S, each_step, make_head, session_name
from tests.support.scripted_worker import PAGES, ScriptedWorker


class GatedDriver(InlineDriver):
    """Each step waits until the test opens the gate."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()

    async def run(self, *step: Any) -> None:
        self.entered.set()
        await self.gate.wait()
        await super().run(*step)


class Desk:
    """A service, and a connection that records answers. Steps wait for a gate, or take `step_s`."""

    def __init__(self, max_batch: int = 8, step_s: float | None = None) -> None:
        self.gated, self.worker = GatedDriver(), ScriptedWorker()
        driver = self.gated if step_s is None else InlineDriver(each_step(step_s))
        description: Any = SimpleNamespace(max_num_seqs=max_batch)
        self.service = SteppedService(StepLoop(self.worker, max_batch), driver, description)
        self.frames: list[list[Any]] = []
        self.connection: Any = self.service.connect(
            lambda answers: self.frames.append(list(answers))
        )

    def send(self, session: int, round_index: int = 0, **changes: Any) -> None:
        head = make_head((1, 2), session=session, round_index=round_index, **changes)
        self.connection.receive([DraftItem(head, 2)])

    async def finish(self) -> list[Any]:
        """Opens the gate until nothing is left; all answers."""
        self.gated.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await self.service.drain()
        return [answer for frame in self.frames for answer in frame]

    async def answered(self) -> dict[int, Any]:
        """Answers by session, once nothing waits."""
        return {int(answer.key.session_id, 16): answer for answer in await self.finish()}


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    """A `Desk` whose steps wait for the gate."""
    made = Desk()
    yield made
    made.gated.gate.set()
    await made.service.close()


async def test_the_answers_of_a_step_are_one_message(desk: Desk) -> None:
    for session in (1, 2, 3):
        desk.send(session)
    assert len(await desk.finish()) == 3
    assert [len(frame) for frame in desk.frames] == [3]
    assert desk.worker.steps == [[(1, 0), (2, 0), (3, 0)]]


async def test_nothing_is_sent_over_a_closed_connection(desk: Desk) -> None:
    other: list[Any] = []
    desk.send(1)
    await desk.gated.entered.wait()
    desk.send(2)
    desk.service.connect(other.append).receive([DraftItem(make_head((1, 2), session=3), 2)])
    desk.connection.close()
    await desk.finish()
    assert desk.worker.steps[1] == [(3, 0)]
    assert (len(desk.frames), len(other)) == (0, 1)
    assert not desk.service._open


async def test_too_many_open_requests_are_refused(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.limits.STREAM_QUEUE_ITEMS_MAX", 2)
    for session in (1, 2, 3):
        desk.send(session)
    assert [answer.code for [answer] in desk.frames] == [Overloaded.grpc_code]
    desk.frames.clear()
    await desk.finish()
    desk.send(3)
    assert len(await desk.finish()) == 3


async def test_a_release_cancels_all_requests_of_its_session(desk: Desk) -> None:
    """Also the one that runs. Its answer is dropped."""
    desk.send(1)
    await desk.gated.entered.wait()
    desk.send(1, 1)
    desk.send(2)
    desk.service.release(session_name(1), 1)
    desk.service.release(session_name(1), 1)
    assert [(one.key.round, one.code) for [one] in desk.frames] == [
        (0, CANCELLED_CODE),
        (1, CANCELLED_CODE),
    ]
    desk.send(1, 2, epoch=2)
    answers = await desk.finish()
    assert [(one.key.session_id, one.key.epoch) for one in answers[2:]] == [
        (session_name(2), 1),
        (session_name(1), 2),
    ]
    assert desk.worker.heard == [("release", 1)]
    assert desk.worker.steps == [[(1, 0)], [(2, 0), (1, 2)]]


async def test_an_item_whose_round_is_over_is_refused_without_a_step(desk: Desk) -> None:
    counted: list[str] = []
    desk.service._observer = SimpleNamespace(  # type: ignore[assignment]
        stale=lambda: counted.append("stale"), stepped=lambda *_: counted.append("step")
    )
    for epoch, round_index in ((2, 3), (1, 9), (2, 1)):
        desk.send(1, round_index, epoch=epoch)
    assert [answer.code for [answer] in desk.frames] == [StaleEpoch.grpc_code, CANCELLED_CODE]
    await desk.finish()
    assert desk.worker.steps == [[(1, 3)]]
    assert counted == ["stale", "stale", "step"]


async def test_steps_that_crash_make_a_replica_unhealthy_until_one_does_not(desk: Desk) -> None:
    desk.worker.crash = ZeroDivisionError("bug")
    for session in (1, 2, 3):
        desk.send(session)
    assert {answer.code for answer in (await desk.answered()).values()} == {13}
    assert not desk.service.healthy
    assert desk.service.health_changed.is_set()
    desk.worker.crash = None
    desk.send(4)
    assert isinstance((await desk.finish())[-1], ProposalReply)
    assert desk.service.healthy


async def test_a_lost_engine_ends_the_steps_and_all_that_waits() -> None:
    desk = Desk(max_batch=2)
    desk.worker.crash = EngineLost("rank 1 is gone")
    for session, round_index in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0)):
        desk.send(session, round_index)
    answers = await desk.finish()
    assert [(answer.code, answer.message) for answer in answers] == [(14, "rank 1 is gone")] * 5
    assert len(desk.worker.steps) == 1
    assert desk.service.health_changed.is_set()
    assert str(desk.service.lost) == "rank 1 is gone"
    desk.send(5)
    assert desk.frames[-1][0].message == "rank 1 is gone"
    desk.service.evict([session_name(1)])
    desk.service.release(session_name(1), 1)
    async with asyncio.timeout(PATIENCE_S):
        await desk.service.drain()
        await desk.service.close()
    assert desk.worker.heard == [("release", 1), ("release", 2)]


@pytest.mark.parametrize("place", ["event loop", "steps"])
async def test_a_bug_between_steps_is_a_lost_engine(desk: Desk, place: str) -> None:
    if place == "steps":
        desk.worker.figures = None  # type: ignore[assignment]
    desk.send(1)
    if place == "event loop":
        desk.service.sessions = None  # type: ignore[assignment]
    assert "has failed" in (await desk.finish())[-1].message
    assert "NoneType" in str(desk.service.lost)
    assert desk.service.health_changed.is_set()
    assert not desk.service.healthy


@pytest.mark.virtual
@pytest.mark.parametrize("expected_s", [0.0, 2.0])
async def test_a_step_that_never_ends_is_late_and_then_a_lost_engine(expected_s: float) -> None:
    desk = Desk()
    desk.worker.expected_s = expected_s
    late_s = max(LATE_STEP_S, LATE_STEP_FACTOR * expected_s)
    hung_s = max(HUNG_STEP_S, HUNG_STEP_FACTOR * expected_s)
    desk.send(1)
    await asyncio.sleep(0.1)
    desk.send(2)
    await asyncio.sleep(late_s - 0.2)
    assert desk.service.healthy
    assert desk.service.describe() is desk.service.description
    await asyncio.sleep(CHECK_PERIOD_S + 0.2)
    answers = [answer for frame in desk.frames for answer in frame]
    assert [answer.code for answer in answers] == [Unavailable.grpc_code] * 2
    assert not desk.service.healthy
    with pytest.raises(Unavailable, match="has not ended in"):
        desk.service.describe()
    desk.send(3)
    assert desk.frames[-1][0].code == Unavailable.grpc_code
    assert desk.service.lost is None
    await asyncio.sleep(hung_s - late_s - CHECK_PERIOD_S - 0.2)
    assert desk.service.lost is None
    await asyncio.sleep(CHECK_PERIOD_S + 0.2)
    assert desk.service.lost is not None
    async with asyncio.timeout(PATIENCE_S):
        await desk.service.drain()
        await desk.service.close()
    assert desk.worker.steps == []


@pytest.mark.virtual
async def test_a_late_step_that_ends_sends_nothing_and_the_replica_serves_again() -> None:
    """Its sessions have moved. If they return, they get new answers."""
    desk = Desk()
    desk.send(1)
    desk.send(2)
    await asyncio.sleep(LATE_STEP_S + CHECK_PERIOD_S + 0.1)
    assert [type(answer) for frame in desk.frames for answer in frame] == [Refused] * 2
    desk.frames.clear()
    desk.gated.gate.set()
    await asyncio.sleep(0.1)
    assert desk.frames == []
    assert desk.service.healthy
    assert desk.service.describe() is desk.service.description
    assert desk.worker.heard == [("evict", 1), ("evict", 2)]
    desk.send(1)
    assert isinstance((await desk.finish())[-1], ProposalReply)
    assert desk.worker.steps == [[(1, 0), (2, 0)], [(1, 0)]]
    await desk.service.close()


async def test_close_waits_for_the_step_and_takes_no_more() -> None:
    desk = Desk()
    desk.send(1)
    await desk.gated.entered.wait()
    desk.send(2)
    closing = asyncio.create_task(desk.service.close())
    await asyncio.sleep(0)
    assert not closing.done()
    desk.gated.gate.set()
    await closing
    assert [answer.key.session_id for [answer] in desk.frames] == [session_name(1)]
    assert desk.worker.steps == [[(1, 0)]]
    assert not desk.service.healthy
    desk.send(3)
    assert desk.frames[-1][0].code == Unavailable.grpc_code
    assert not desk.service._open


@pytest.mark.virtual
async def test_sessions_that_are_silent_lose_their_pages_when_others_find_none() -> None:
    """A session with a request is not silent."""
    desk = Desk(2, step_s=0.001)
    desk.send(1)
    await desk.finish()
    desk.worker.starved = {2}
    desk.send(2)
    await asyncio.sleep(SILENT_SESSION_MS / 2e3)
    assert desk.worker.heard == []
    await desk.finish()
    assert desk.worker.heard == [("evict", 1)]
    assert [*desk.service.sessions] == [session_name(2)]
    await desk.service.close()


def test_a_service_is_built_outside_an_event_loop() -> None:
    assert Desk(step_s=0.02).service.healthy


async def test_time_before_the_first_step_counts_as_idle() -> None:
    desk = Desk(step_s=0.02)
    assert desk.service.figures.busy == 0
    await asyncio.sleep(0.2)
    desk.send(1)
    await desk.finish()
    assert 0.01 < desk.service.figures.busy < 0.5
    await desk.service.close()


async def test_a_service_may_be_made_on_a_thread_without_an_event_loop() -> None:
    desk = await asyncio.to_thread(Desk, step_s=0.01)
    assert desk.service.figures.busy == 0
    await desk.service.close()


async def test_a_closed_connection_takes_along_those_heard_on_it_last(desk: Desk) -> None:
    first, second = (desk.service.connect(lambda answers: None) for _ in range(2))
    for connection, sessions in ((first, (1, 2, 3)), (second, (2,))):
        connection.receive([DraftItem(make_head((1, 2), session=one), 2) for one in sessions])
    desk.service.release(session_name(3), 1)
    for connection, left in ((first, [session_name(2)]), (second, [])):
        connection.close()
        assert [*desk.service.sessions] == left
    await desk.finish()
    assert desk.worker.heard == [("release", 3), ("evict", 1), ("evict", 2)]


def test_rounds_and_epochs_only_grow() -> None:
    rounds = StaleRoundFilter()
    assert rounds.admit(make_head((1,), epoch=1, round_index=5)) is None
    assert rounds.admit(make_head((1,), epoch=1, round_index=5)) is None
    assert rounds.admit(make_head((1,), epoch=2, round_index=0)) is None
    assert not rounds.release(session_name(1), 1)
    assert rounds.admit(make_head((1,), epoch=1, round_index=9)) is not None
    assert rounds.release(session_name(1), 2)
    assert rounds.admit(make_head((1,), epoch=2, round_index=2**40)).code == 1
    assert rounds.admit(make_head((1,), epoch=1)) is not None
    assert rounds.admit(make_head((1,), epoch=3)) is None
    assert rounds.release(session_name(2), 1)
    assert rounds.admit(make_head((1,), session=2)) is not None
    for session in range(3, RELEASES_REMEMBERED_MAX + 3):
        rounds.release(session_name(session), 1)
    assert rounds.admit(make_head((1,), session=2)) is None


def works(started_at: float, *arrived: float) -> Any:
    return [SimpleNamespace(arrived_at=at, started_at=started_at) for at in arrived]


def test_steps_one_after_the_other_are_busy_and_items_wait_for_them() -> None:
    """Steps of 20 ms with half of the places taken, for which items wait 10 ms; then nothing."""
    load, now = StepLoad(4, 0.0), 0.0
    while now < 60:
        load.stepped(works(now, now - 0.01, now - 0.01), now, now + 0.02)
        now += 0.02
    found = load.figures(now, StepFigures(PAGES))
    assert found.busy == pytest.approx(1.0, abs=0.01)
    assert found.fill == pytest.approx(0.5)
    assert found.step_ms == pytest.approx(20)
    assert found.queue_steps == pytest.approx(0.5)
    assert found.kv_usage == pytest.approx(0.5)
    later = load.figures(now + 0.9 * WINDOW_S, StepFigures(PAGES))
    assert later.busy == pytest.approx(0.41, abs=0.01)
    assert later.fill == pytest.approx(0.5)
    after = load.figures(now + 1.1 * WINDOW_S, StepFigures(PAGES))
    assert (after.fill, after.queue_steps) == (None, None), "ended work is no load"
