"""Steps of a service, and what it knows of its sessions and its load."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import EngineLost, Overloaded, StaleEpoch, Unavailable
from outrider.interfaces.engine import PageCounts
from outrider.interfaces.messages import DraftItem, ProposalReply, Refused
from outrider.limits import (
    HUNG_STEP_FACTOR,
    HUNG_STEP_S,
    LATE_STEP_FACTOR,
    LATE_STEP_S,
    RELEASES_REMEMBERED_MAX,
)
from outrider.registry.registry import WINDOW_S
from outrider.replica.executors import InlineExecutor
from outrider.replica.service import STARVED_REST_S, StaleRoundFilter, StepLoad, SteppedService
from outrider.replica.step_request import (
    CANCELLED_CODE,
    AnswerSender,
    StepFigures,
    StepRequest,
    Unfinished,
)
from outrider.replica.step_watch import CHECK_PERIOD_S, ExpectedStep
from outrider.speculation.proposal import EMPTY_PROPOSAL
from tests.support.rounds import PATIENCE_S, make_head, session_name

PAGES = PageCounts(10, 2, 3, 0, 0)


class GatedExecutor:
    """Each step waits until the test opens the gate."""

    may_compile = False

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.closed = False
        self.waited = False

    async def run(self, step: Any) -> Any:
        self.entered.set()
        await self.gate.wait()
        return step()

    def close(self, *, wait: bool = True) -> None:
        self.closed, self.waited = True, wait


class Worker:
    """Answers an item after as many steps as its session has left; records its calls."""

    grammars = None

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, int]]] = []
        self.heard: list[tuple[str, str]] = []
        self.crash: Exception | None = None
        self.culprits: set[str] = set()  # if not empty, only steps with these sessions crash
        self.left: dict[str, int] = {}
        self.starved: set[str] = set()
        self.figures = StepFigures(PAGES)
        self.during_step: Any = lambda: None
        self.expected_s = 0.0

    def expected(self) -> ExpectedStep:
        return ExpectedStep(1, 1, self.expected_s)

    def step(self, items: Sequence[DraftItem]) -> list[ProposalReply | Unfinished]:
        self.steps.append([(item.head.session_id, item.head.round) for item in items])
        self.during_step()
        names = {item.head.session_id for item in items}
        if self.crash is not None and (not self.culprits or names & self.culprits):
            raise self.crash
        return [self._answer(item) for item in items]

    def _answer(self, item: DraftItem) -> ProposalReply | Unfinished:
        name = item.head.session_id
        if name in self.starved:
            self.figures.num_starved += 1
            return Unfinished.WAITS
        self.left[name] = self.left.get(name, 0) - 1
        if self.left[name] > 0:
            return Unfinished.CONTINUES
        return ProposalReply(item.head.key, EMPTY_PROPOSAL, 0, 0)  # type: ignore[arg-type]

    def leave(self, session_ids: Mapping[str, bool]) -> None:
        words = {True: "release", False: "evict"}
        self.heard += [(words[is_over], name) for name, is_over in session_ids.items()]
        if session_ids:
            self.starved.clear()

    def note_seconds(self, seconds: float) -> None:
        """Ignores them."""


class Desk:
    """A service, and a connection that records answers. Steps wait for a gate, or take `step_s`."""

    def __init__(self, max_batch: int = 8, step_s: float | None = None) -> None:
        self.gated, self.worker = GatedExecutor(), Worker()
        executor: Any = self.gated if step_s is None else InlineExecutor(lambda: step_s)
        description: Any = SimpleNamespace(max_num_seqs=max_batch)
        self.service = SteppedService(self.worker, executor, description)  # type: ignore[arg-type]
        self.frames: list[list[Any]] = []
        self.outlet: AnswerSender = AnswerSender(lambda answers: self.frames.append(list(answers)))

    def submit(self, session: int, round_index: int = 0, **changes: Any) -> StepRequest:
        outlet = changes.pop("outlet", self.outlet)
        head = make_head((1, 2), session=session, round_index=round_index, **changes)
        now, left_ms = asyncio.get_running_loop().time(), head.deadline_ms
        expires_at = now + left_ms / 1e3 if left_ms else float("inf")
        work = StepRequest(DraftItem(head, 2), outlet, now, expires_at)
        self.service.submit(work)
        return work

    def submit_series(self, session: int, num_rounds: int) -> None:
        """Submits rounds that follow from the round before, each after the answer before."""

        def round_of(index: int) -> DraftItem:
            return DraftItem(make_head((1, 2), session=session, round_index=index), 2)

        def submit(index: int) -> None:
            now = asyncio.get_running_loop().time()
            work = StepRequest(round_of(index), self.outlet, now, float("inf"))
            if index + 1 < num_rounds:
                work.follow = lambda *_: round_of(index + 1)
                work.on_done = lambda *_: submit(index + 1)
            self.service.submit(work)

        submit(0)

    async def finish(self) -> list[Any]:
        """Opens the gate until nothing is left; all answers."""
        self.gated.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await self.service.drain()
        return [answer for frame in self.frames for answer in frame]

    def rounds(self) -> list[list[tuple[int, int]]]:
        """The (session, round) of each item, by step."""
        return [[(int(name, 16), index) for name, index in step] for step in self.worker.steps]

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


async def test_a_step_takes_one_item_a_session_in_order_of_arrival() -> None:
    desk = Desk(max_batch=3)
    for session, round_index in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0)):
        desk.submit(session, round_index)
    answers = await desk.finish()
    assert desk.rounds() == [[(1, 0), (2, 0), (3, 0)], [(1, 1), (4, 0)]]
    assert len(answers) == 5
    assert [len(frame) for frame in desk.frames] == [3, 2]
    await desk.service.close()


@pytest.mark.virtual
async def test_expired_work_is_refused_without_a_step(desk: Desk) -> None:
    desk.submit(1)
    await desk.gated.entered.wait()
    desk.submit(2, deadline_ms=1)
    desk.submit(3, deadline_ms=60_000)
    await asyncio.sleep(0.01)
    answers = await desk.answered()
    assert answers[2].code == 4
    assert isinstance(answers[3], ProposalReply)
    assert [len(step) for step in desk.worker.steps] == [1, 1]


async def test_work_of_a_closed_connection_is_dropped(desk: Desk) -> None:
    other = Desk()
    desk.submit(1)
    await desk.gated.entered.wait()
    told: list[Any] = []
    dropped = desk.submit(2)
    dropped.on_done = lambda work, answer: told.append(answer)
    desk.submit(3, outlet=other.outlet)
    desk.outlet.closed = True
    await desk.finish()
    assert desk.worker.steps[1] == [(session_name(3), 0)]
    assert told == [None]
    assert (len(desk.frames), len(other.frames)) == (0, 1)


async def test_a_full_queue_refuses(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.replica.step_request.STREAM_QUEUE_ITEMS_MAX", 2)
    for session in (1, 2, 3):
        desk.submit(session)
    assert [answer.code for [answer] in desk.frames] == [Overloaded.grpc_code]
    desk.frames.clear()
    await desk.finish()
    desk.submit(3)
    assert len(await desk.finish()) == 3


async def test_a_release_drops_queued_work_and_reaches_the_worker_before_the_next_step(
    desk: Desk,
) -> None:
    desk.submit(1)
    await desk.gated.entered.wait()
    desk.submit(2)
    desk.service.release(session_name(2), 1)
    desk.service.release(session_name(2), 1)
    desk.submit(2, 1, epoch=2)
    [[dropped]] = desk.frames
    assert (dropped.key.epoch, dropped.code) == (1, CANCELLED_CODE)
    await desk.finish()
    assert desk.worker.heard == [("release", session_name(2))]
    assert desk.worker.steps[1:] == [[(session_name(2), 1)]]


async def test_an_item_whose_round_is_over_is_refused_without_a_step(desk: Desk) -> None:
    counted: list[str] = []
    desk.service._observer = SimpleNamespace(
        stale=lambda: counted.append("stale"), stepped=lambda *_: counted.append("step")
    )
    connection = desk.service.connect(desk.outlet.send)
    for epoch, round_index in ((2, 3), (1, 9), (2, 1)):
        head = make_head((1, 2), epoch=epoch, round_index=round_index)
        connection.receive([DraftItem(head, 2)])
    assert [answer.code for [answer] in desk.frames] == [StaleEpoch.grpc_code, CANCELLED_CODE]
    await desk.finish()
    assert desk.worker.steps == [[(session_name(1), 3)]]
    assert counted == ["stale", "stale", "step"]


async def test_after_a_crash_each_item_runs_alone_and_only_the_culprit_fails(desk: Desk) -> None:
    desk.worker.crash, desk.worker.culprits = ZeroDivisionError("bug"), {session_name(2)}
    for session in (1, 2, 3):
        desk.submit(session)
    desk.worker.during_step = lambda: len(desk.worker.steps) == 1 and desk.submit(4)
    answers = await desk.answered()
    assert {one for one, answer in answers.items() if isinstance(answer, Refused)} == {2}
    assert (set(answers), answers[2].code) == ({1, 2, 3, 4}, 13)
    assert [len(step) for step in desk.worker.steps] == [3, 1, 1, 1, 1]
    assert desk.worker.heard[-1] == ("release", session_name(2))
    desk.worker.crash = None
    desk.submit(2)
    assert isinstance((await desk.finish())[-1], ProposalReply)
    assert desk.service.healthy


async def test_a_session_released_during_a_crash_does_not_run_again(desk: Desk) -> None:
    desk.worker.crash, desk.worker.culprits = ZeroDivisionError("bug"), {session_name(2)}
    desk.submit(1)
    desk.submit(2)
    desk.worker.during_step = lambda: desk.service.release(session_name(1), 1)
    answers = await desk.answered()
    assert answers[1].code == CANCELLED_CODE
    assert desk.rounds() == [[(1, 0), (2, 0)], [(2, 0)]]


async def test_a_lost_engine_ends_the_steps_and_all_that_waits() -> None:
    desk = Desk(max_batch=2)
    desk.worker.crash = EngineLost("rank 1 is gone")
    for session, round_index in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0)):
        desk.submit(session, round_index)
    answers = await desk.finish()
    assert [(answer.code, answer.message) for answer in answers] == [(14, "rank 1 is gone")] * 5
    assert len(desk.worker.steps) == 1
    assert desk.service.health_changed.is_set()
    assert str(desk.service.lost) == "rank 1 is gone"
    desk.submit(5)
    assert desk.frames[-1][0].message == "rank 1 is gone"
    desk.service.evict([session_name(1)])
    desk.service.release(session_name(1), 1)
    async with asyncio.timeout(PATIENCE_S):
        await desk.service.drain()
        await desk.service.close()
    assert desk.worker.heard == [("release", session_name(one)) for one in (1, 2)]


async def test_a_bug_between_steps_is_a_lost_engine(desk: Desk) -> None:
    desk.service.sessions = None  # type: ignore[assignment]
    desk.submit(1)
    await desk.finish()
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
    desk.submit(1)
    await asyncio.sleep(0.1)
    desk.submit(2)
    await asyncio.sleep(late_s - 0.2)
    assert desk.service.healthy
    assert desk.service.describe() is desk.service.description
    await asyncio.sleep(CHECK_PERIOD_S + 0.2)
    answers = [answer for frame in desk.frames for answer in frame]
    assert [answer.code for answer in answers] == [Unavailable.grpc_code] * 2
    assert not desk.service.healthy
    with pytest.raises(Unavailable, match="has not ended in"):
        desk.service.describe()
    desk.submit(3)
    assert desk.frames[-1][0].code == Unavailable.grpc_code
    assert desk.service.lost is None
    await asyncio.sleep(hung_s - late_s - CHECK_PERIOD_S - 0.2)
    assert desk.service.lost is None
    await asyncio.sleep(CHECK_PERIOD_S + 0.2)
    assert desk.service.lost is not None
    async with asyncio.timeout(PATIENCE_S):
        await desk.service.drain()
        await desk.service.close()
    assert (desk.gated.closed, desk.gated.waited) == (True, False)


@pytest.mark.virtual
async def test_a_late_step_that_ends_sends_nothing_and_the_replica_serves_again() -> None:
    """Its sessions have moved. If they return, they get new answers."""
    desk = Desk()
    told: list[Any] = []
    desk.submit(1).on_done = lambda _, answer: told.append(answer)
    await asyncio.sleep(LATE_STEP_S + CHECK_PERIOD_S + 0.1)
    [[refused]] = desk.frames
    assert told == [refused]
    desk.frames.clear()
    desk.gated.gate.set()
    await asyncio.sleep(0.1)
    assert desk.frames == []
    assert desk.service.healthy
    assert desk.service.describe() is desk.service.description
    assert desk.worker.heard == [("evict", session_name(1))]
    desk.submit(1)
    assert isinstance((await desk.finish())[-1], ProposalReply)
    assert len(told) == 1
    await desk.service.close()


async def test_close_waits_for_the_step_and_takes_no_more() -> None:
    desk = Desk()
    desk.submit(1)
    await desk.gated.entered.wait()
    closing = asyncio.create_task(desk.service.close())
    await asyncio.sleep(0)
    assert not desk.gated.closed
    desk.gated.gate.set()
    await closing
    assert desk.gated.closed
    assert len(desk.frames) == 1
    assert not desk.service.healthy
    desk.submit(2)
    assert desk.frames[-1][0].code == Unavailable.grpc_code


@pytest.mark.virtual
async def test_a_step_that_finds_no_pages_is_not_tried_again_at_once() -> None:
    """Only after something has changed, here that a session is evicted."""
    desk = Desk(2, step_s=0.001)
    told: list[Any] = []
    desk.service._observer = SimpleNamespace(stepped=lambda _, answers, *__: told.extend(answers))
    desk.worker.starved.add(session_name(1))
    desk.submit(1)
    await asyncio.sleep(2.5 * STARVED_REST_S)
    assert 2 <= len(desk.worker.steps) <= 4
    desk.service.evict([session_name(9)])
    answer = (await desk.answered())[1]
    assert answer.queue_ms > 2000 * STARVED_REST_S
    assert answer.compute_ms < 100
    assert desk.worker.heard == [("evict", session_name(9))]
    assert set(told[:-1]) == {Unfinished.WAITS}
    await desk.service.close()


@pytest.mark.virtual
async def test_an_item_that_expires_between_two_parts_is_refused_and_its_session_parked() -> None:
    desk = Desk(2, step_s=0.02)
    desk.worker.left[session_name(1)] = 1000
    desk.submit(1, deadline_ms=30)
    assert (await desk.answered())[1].code == 4
    assert len(desk.worker.steps) <= 3
    assert desk.worker.heard == [("evict", session_name(1))]
    await desk.service.close()


async def test_two_rounds_that_are_known_run_before_their_answers_are_sent() -> None:
    desk, num_sent = Desk(step_s=0.01), list[int]()
    desk.worker.during_step = lambda: num_sent.append(len(desk.frames))
    for session in (1, 2):
        desk.submit_series(session, 5)
    answers = await desk.finish()
    assert desk.rounds() == [[(1, index), (2, index)] for index in range(5)]
    assert [answer.key.round for answer in answers] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert num_sent == [0, 0, 2, 2, 4]
    assert desk.service.figures.queue_steps >= 0
    await desk.service.close()


def test_a_service_is_built_outside_an_event_loop() -> None:
    assert Desk(step_s=0.02).service.healthy


async def test_time_before_the_first_step_counts_as_idle() -> None:
    desk = Desk(step_s=0.02)
    assert desk.service.figures.busy == 0
    await asyncio.sleep(0.2)
    desk.submit(1)
    await desk.finish()
    assert 0.01 < desk.service.figures.busy < 0.5
    await desk.service.close()


async def test_a_service_may_be_made_on_a_thread_without_an_event_loop() -> None:
    desk = await asyncio.to_thread(Desk, step_s=0.01)
    assert desk.service.figures.busy == 0
    await desk.service.close()


async def test_a_request_that_comes_during_a_step_shares_the_next_one() -> None:
    desk = Desk(step_s=0.01)
    desk.worker.during_step = lambda: len(desk.worker.steps) == 3 and desk.submit(3)
    for session in (1, 2):
        desk.submit_series(session, 4)
    await desk.finish()
    assert desk.rounds()[2:] == [[(1, 2), (2, 2)], [(3, 0), (1, 3), (2, 3)]]
    await desk.service.close()


async def test_a_session_that_is_released_during_two_rounds_gets_no_third_one() -> None:
    desk = Desk(step_s=0.01)

    def release() -> None:
        if len(desk.worker.steps) == 2:
            desk.service.release(session_name(1), 1)

    desk.worker.during_step = release
    desk.service._forget = lambda name: going.discard(name)  # type: ignore[method-assign]
    going = {session_name(1), session_name(2)}
    submit = desk.service.submit
    desk.service.submit = lambda work: work.session_id in going and submit(work)  # type: ignore
    for session in (1, 2):
        desk.submit_series(session, 4)
    answers = await desk.finish()
    assert desk.rounds()[2:] == [[(2, 2)], [(2, 3)]]
    assert desk.worker.heard == [("release", session_name(1))]
    assert [(int(one.key.session_id, 16), one.key.round) for one in answers[:3]] == [
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    await desk.service.close()


async def test_after_a_crash_in_the_second_step_its_rounds_run_again() -> None:
    desk = Desk(step_s=0.01)

    def fail() -> None:
        if len(desk.worker.steps) == 2:
            raise RuntimeError("planted")

    desk.worker.during_step = fail
    for session in (1, 2):
        desk.submit_series(session, 3)
    answers = await desk.finish()
    assert desk.rounds() == [[(1, index), (2, index)] for index in (0, 1, 1, 2)]
    assert desk.worker.heard == [("release", session_name(1)), ("release", session_name(2))]
    assert [isinstance(answer, ProposalReply) for answer in answers] == [True] * 6
    await desk.service.close()


async def test_an_engine_that_is_lost_in_the_second_step_runs_no_third_one() -> None:
    desk = Desk(step_s=0.01)

    def fail() -> None:
        if len(desk.worker.steps) == 2:
            desk.submit(3)
            raise EngineLost("rank 1 is gone")

    desk.worker.during_step = fail
    for session in (1, 2):
        desk.submit_series(session, 2)
    answers = await desk.finish()
    assert [isinstance(answer, ProposalReply) for answer in answers[:2]] == [True, True]
    assert [answer.message for answer in answers[2:]] == ["rank 1 is gone"] * 3
    assert len(desk.worker.steps) == 2
    assert str(desk.service.lost) == "rank 1 is gone"
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
    assert desk.worker.heard == [
        ("release", session_name(3)),
        ("evict", session_name(1)),
        ("evict", session_name(2)),
    ]


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
