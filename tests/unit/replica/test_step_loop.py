"""The loop of steps: what shares a step, what a step means for each request, and what goes first.
No thread and no clock: the tests state all times."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.errors import EngineLost
from outrider.interfaces.messages import DraftItem, ProposalReply, Refused, RoundAnswer
from outrider.replica.step_loop import (
    STARVED_REST_S,
    Arrival,
    Continuation,
    Eviction,
    Outcome,
    Release,
    StepLoop,
    Withdrawal,
)
from outrider.replica.step_request import AnswerSender, StepRequest, Unfinished
from tests.support.rounds import make_head, session_name
from tests.support.scripted_worker import ScriptedWorker, number

STEP_S = 0.01
SENDER = AnswerSender(lambda answers: None)


def request(
    session: int,
    round_index: int = 0,
    *,
    arrived_at: float = 0.0,
    expires_at: float = math.inf,
    sender: AnswerSender = SENDER,
) -> StepRequest[DraftItem]:
    item = DraftItem(make_head((1, 2), session=session, round_index=round_index), 2)
    return StepRequest(item, sender, arrived_at, expires_at)


class Series(Continuation[DraftItem]):
    """Sessions whose next rounds follow from their answers, until round `last`."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.forgotten: list[int] = []

    def answered(
        self, work: StepRequest[DraftItem], answer: RoundAnswer | None, now: float
    ) -> tuple[StepRequest[DraftItem] | None, float]:
        session, index = number(work.session_id), work.item.head.round
        if not isinstance(answer, ProposalReply) or index >= self._last:
            return None, 0.0
        return request(session, index + 1, arrived_at=now), 1.5 * STEP_S

    def forget(self, session_id: str) -> None:
        self.forgotten.append(number(session_id))


class Turns:
    """A loop of steps, and turns of it that each take `STEP_S` if they have a step."""

    def __init__(self, max_num_seqs: int = 8, **options: Any) -> None:
        self.worker = ScriptedWorker()
        self.steps = StepLoop(self.worker, max_num_seqs, **options)
        self.now = 0.0
        self.outcomes: list[Outcome[DraftItem]] = []
        self.between: Callable[[], None] = lambda: None
        """Called between launch and end of each step."""

    def arrive(self, *args: int, **options: Any) -> StepRequest[DraftItem]:
        work = request(*args, **({"arrived_at": self.now} | options))
        self.steps.receive(Arrival(work))
        return work

    def turn(self) -> Outcome[DraftItem] | None:
        step = self.steps.schedule(self.now)
        if step.works:
            self.steps.launch(step)
            self.between()
            self.steps.wait(step)
            self.now += STEP_S
        self.steps.postprocess(step, self.now)
        outcome = self.steps.report()
        if outcome is not None:
            self.outcomes.append(outcome)
        return outcome

    def finish(self) -> dict[tuple[int, int], Any]:
        """Runs steps until nothing is due. The answers so far by session and round."""
        self.turn()
        while self.steps.due_at < math.inf:
            self.now = max(self.now, self.steps.due_at)
            self.turn()
        return self.answers()

    def answers(self) -> dict[tuple[int, int], Any]:
        found: dict[tuple[int, int], Any] = {}
        for outcome in self.outcomes:
            for one in (*outcome.ended, *outcome.progress):
                for answer in one.answers:
                    assert (
                        found.setdefault((number(answer.key.session_id), answer.key.round), answer)
                        is answer
                    )
        return found


@pytest.fixture
def at() -> Turns:
    return Turns()


def test_a_step_takes_one_item_a_session_in_order_of_arrival() -> None:
    at = Turns(max_num_seqs=3)
    for session, round_index in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0)):
        at.arrive(session, round_index)
    assert len(at.finish()) == 5
    assert at.worker.steps == [[(1, 0), (2, 0), (3, 0)], [(1, 1), (4, 0)]]
    assert [outcome.is_idle for outcome in at.outcomes] == [False, True]
    assert at.worker.seconds == pytest.approx([STEP_S, STEP_S])


def test_nothing_is_told_if_nothing_has_happened(at: Turns) -> None:
    assert at.turn() is None
    at.steps.receive(Eviction([]))
    told = at.turn()
    assert told is not None
    assert (told.num_received, told.is_idle, told.expected) == (1, True, None)
    assert at.turn() is None


def test_expired_work_is_refused_without_a_step_and_its_pages_are_freed(at: Turns) -> None:
    at.arrive(2, expires_at=0.5)
    at.arrive(3, expires_at=2.0)
    at.now = 1.0
    answers = at.finish()
    assert answers[2, 0].code == 4
    assert isinstance(answers[3, 0], ProposalReply)
    assert at.worker.steps == [[(3, 0)]]
    assert at.worker.heard == [("evict", 2)]


def test_an_item_that_expires_between_two_parts_is_refused_and_its_session_parked(
    at: Turns,
) -> None:
    at.worker.left[1] = 1000
    at.arrive(1, expires_at=3.5 * STEP_S)
    assert at.finish()[1, 0].code == 4
    assert len(at.worker.steps) == 4
    assert at.worker.heard == [("evict", 1)]


def test_work_of_a_closed_connection_ends_without_an_answer(at: Turns) -> None:
    closed = AnswerSender(lambda answers: None)
    dropped = at.arrive(2, sender=closed)
    at.arrive(3)
    closed.closed = True
    assert set(at.finish()) == {(3, 0)}
    assert at.worker.steps == [[(3, 0)]]
    assert [(one.work, one.answers) for one in at.outcomes[0].ended] == [(dropped, ())]


def test_a_release_drops_queued_work_and_reaches_the_worker_before_the_next_step(at: Turns) -> None:
    at.arrive(1)
    at.arrive(2)
    at.steps.receive(Release(session_name(2)))
    at.steps.receive(Eviction([session_name(2)]))
    at.worker.during_step = lambda: heard.extend(at.worker.heard)
    heard: list[tuple[str, int]] = []
    at.finish()
    assert heard == [("release", 2)]
    assert at.worker.steps == [[(1, 0)]]
    at.arrive(2, 1)
    at.finish()
    assert at.worker.steps[1:] == [[(2, 1)]]


def test_all_that_waits_is_withdrawn() -> None:
    series = Series(0)
    at = Turns(continuation=series)
    at.arrive(1)
    at.arrive(2)
    at.steps.receive(Release(session_name(2)))
    at.steps.receive(Withdrawal([session_name(1), session_name(2)]))
    at.arrive(1, 1)
    assert set(at.finish()) == {(1, 1)}
    assert at.worker.heard == [("release", 2), ("evict", 1)]
    assert series.forgotten == [2, 1]


def test_after_a_crash_each_item_runs_alone_and_only_the_culprit_fails(at: Turns) -> None:
    at.worker.crash, at.worker.culprits = ZeroDivisionError("bug"), {2}
    for session in (1, 2, 3):
        at.arrive(session)
    at.turn()
    at.arrive(4)
    answers = at.finish()
    assert {key for key, answer in answers.items() if isinstance(answer, Refused)} == {(2, 0)}
    assert (len(answers), answers[2, 0].code) == (4, 13)
    assert [len(step) for step in at.worker.steps] == [3, 1, 1, 1, 1]
    assert at.worker.heard[-1] == ("release", 2)
    assert [type(outcome.failure) for outcome in at.outcomes].count(ZeroDivisionError) == 2


def test_a_session_released_during_a_crash_does_not_run_again(at: Turns) -> None:
    at.worker.crash, at.worker.culprits = ZeroDivisionError("bug"), {2}
    at.arrive(1)
    at.arrive(2)
    at.turn()
    at.steps.receive(Release(session_name(1)))
    assert set(at.finish()) == {(2, 0)}
    assert at.worker.steps == [[(1, 0), (2, 0)], [(2, 0)]]


def test_a_wrong_number_of_answers_is_a_crash(at: Turns) -> None:
    at.worker.run = lambda items: []  # type: ignore[method-assign]
    at.arrive(1)
    assert isinstance(at.finish()[1, 0], Refused)


def test_a_lost_engine_is_told_and_answers_nobody(at: Turns) -> None:
    at.worker.crash = EngineLost("rank 1 is gone")
    at.arrive(1)
    at.arrive(2)
    outcome = at.turn()
    assert outcome is not None
    assert outcome.failure is at.worker.crash
    assert not at.answers()
    assert at.worker.heard == [("release", 1), ("release", 2)]


def test_a_step_that_finds_no_pages_is_not_tried_again_at_once(at: Turns) -> None:
    """Only after a while, or after something has changed, here that a session is evicted."""
    at.worker.starved = {1}
    at.arrive(1)
    outcome = at.turn()
    assert outcome is not None
    assert (outcome.is_starved, outcome.is_idle) == (True, False)
    assert [one.result for one in outcome.progress] == [Unfinished.WAITS]
    assert at.steps.due_at == at.now + STARVED_REST_S
    assert at.turn() is None
    at.now = at.steps.due_at
    at.turn()
    assert len(at.worker.steps) == 2
    assert at.turn() is None
    at.steps.receive(Eviction([session_name(9)]))
    at.turn()
    assert len(at.worker.steps) == 3
    answer = at.answers()[1, 0]
    assert at.worker.heard == [("evict", 9)]
    assert answer.queue_ms > 1000 * STARVED_REST_S
    assert answer.compute_ms == pytest.approx(1e3 * STEP_S)


def test_a_step_with_one_item_that_finds_pages_is_followed_at_once(at: Turns) -> None:
    at.worker.starved = {1}
    at.arrive(1)
    at.arrive(2)
    at.turn()
    assert at.steps.due_at == at.now


def test_the_next_round_of_a_session_shares_the_next_step() -> None:
    """It is formed in this object. A request that came during the step goes before it."""
    at = Turns(continuation=Series(3))
    at.arrive(1)
    at.arrive(2)
    at.turn()
    at.steps.receive(Arrival(request(3, 3, arrived_at=0.5 * STEP_S)))
    answers = at.finish()
    assert at.worker.steps == [
        [(1, 0), (2, 0)],
        [(3, 3), (1, 1), (2, 1)],
        [(1, 2), (2, 2)],
        [(1, 3), (2, 3)],
    ]
    assert len(answers) == 9
    [first, *_] = at.outcomes[0].progress
    assert first.then is not None
    assert (number(first.then.session_id), first.then.item.head.round) == (1, 1)
    assert answers[1, 1].queue_ms == 0


def test_an_answer_is_held_only_after_a_step_that_is_shorter() -> None:
    at = Turns(continuation=Series(1))
    at.arrive(1)
    [told] = at.turn().progress  # type: ignore[union-attr]
    assert told.held_s == 1.5 * STEP_S
    at.arrive(2)
    step = at.steps.schedule(at.now)
    at.steps.launch(step)
    at.steps.wait(step)
    at.steps.postprocess(step, at.now + 2 * STEP_S)
    outcome = at.steps.report()
    assert outcome is not None
    assert [one.held_s for one in outcome.progress] == [0, 0]


def test_a_session_that_is_released_during_a_step_gets_no_further_round() -> None:
    at = Turns(continuation=Series(3))
    at.arrive(1)
    at.arrive(2)
    at.turn()
    at.steps.receive(Release(session_name(1)))
    at.finish()
    assert at.worker.steps == [[(1, 0), (2, 0)], [(2, 1)], [(2, 2)], [(2, 3)]]
    assert at.worker.heard == [("release", 1)]


def test_while_a_step_runs_what_arrives_waits_and_no_page_is_freed(at: Turns) -> None:
    """The worker may validate it meanwhile. If this fails, only the item's own step may fail."""
    validated: list[DraftItem] = []

    def expect(item: DraftItem) -> None:
        validated.append(item)
        raise ZeroDivisionError("bug")

    at.worker.expect = expect  # type: ignore[method-assign]

    def arrive() -> None:
        at.steps.receive(Arrival(request(2, arrived_at=0.5 * STEP_S)))
        at.steps.receive(Eviction([session_name(3)]))
        assert not at.worker.heard
        at.between = lambda: None

    at.between = arrive
    at.arrive(1)
    assert set(at.finish()) == {(1, 0), (2, 0)}
    assert at.worker.steps == [[(1, 0)], [(2, 0)]]
    assert [number(item.head.session_id) for item in validated] == [2]
    assert at.worker.heard == [("evict", 3)]


@pytest.mark.parametrize("leaves", [Release(session_name(1)), Withdrawal([session_name(1)])])
@pytest.mark.parametrize("left", [0, 5])
def test_a_session_that_leaves_while_its_step_runs_gets_no_answer_and_no_further_step(
    leaves: Any, left: int
) -> None:
    """Its pages are freed at once afterwards, even if no step follows. A newer item of the session
    counts."""
    series = Series(3)
    at = Turns(continuation=series)
    at.worker.left[1] = left

    def leave() -> None:
        at.steps.receive(leaves)
        assert not at.worker.heard
        at.between = lambda: None

    at.between = leave
    at.arrive(1)
    assert at.finish() == {}
    assert at.worker.steps == [[(1, 0)]]
    assert at.worker.heard == [("release" if isinstance(leaves, Release) else "evict", 1)]
    assert series.forgotten == [1]
    assert at.outcomes[-1].is_idle
    at.worker.left.clear()
    at.arrive(1, 3)
    assert set(at.finish()) == {(1, 3)}


def test_a_request_that_is_cancelled_while_it_runs_ends_once(at: Turns) -> None:
    def cancel() -> None:
        at.steps.cancel(work, [gone])
        at.between = lambda: None

    at.between = cancel
    work = at.arrive(1)
    gone = Refused(work.key, 1, "cancelled")
    at.arrive(2)
    assert at.finish()[1, 0] is gone
    assert [one.work for one in at.outcomes[0].ended] == [work]
    assert [number(one.work.session_id) for one in at.outcomes[0].progress] == [2]


def test_a_session_that_leaves_while_its_step_crashes_does_not_run_again(at: Turns) -> None:
    at.worker.crash, at.worker.culprits = ZeroDivisionError("bug"), {2}

    def leave() -> None:
        at.steps.receive(Release(session_name(1)))
        at.between = lambda: None

    at.between = leave
    for session in (1, 2, 3):
        at.arrive(session)
    assert set(at.finish()) == {(2, 0), (3, 0)}
    assert at.worker.steps == [[(1, 0), (2, 0), (3, 0)], [(2, 0)], [(3, 0)]]


def test_a_step_that_finds_no_pages_is_tried_again_if_something_changed_meanwhile(
    at: Turns,
) -> None:
    at.worker.starved = {1}
    at.between = lambda: at.steps.receive(Eviction([session_name(9)]))
    at.arrive(1)
    at.turn()
    at.turn()
    assert len(at.worker.steps) == 2


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), EngineLost("rank 1 is gone")])
def test_a_launch_that_fails_is_a_step_that_fails(at: Turns, error: Exception) -> None:
    launch = at.worker.launch

    def fail(items: Any) -> Any:
        at.worker.launch = launch  # type: ignore[method-assign]
        raise error

    at.worker.launch = fail  # type: ignore[method-assign]
    at.arrive(1)
    at.arrive(2)
    at.turn()
    assert at.outcomes[-1].failure is error
    assert at.outcomes[-1].progress == []
    assert at.worker.heard == [("release", 1), ("release", 2)]
    if not isinstance(error, EngineLost):
        assert set(at.finish()) == {(1, 0), (2, 0)}
        assert at.worker.steps == [[(1, 0)], [(2, 0)]]


def test_only_answers_that_a_caller_waits_for_are_reported_before_the_next_launch() -> None:
    at = Turns(continuation=Series(1))
    at.arrive(1)
    for is_awaited in (False, True):
        step = at.steps.schedule(at.now)
        at.steps.launch(step)
        at.steps.wait(step)
        at.steps.postprocess(step, at.now + STEP_S)
        assert at.steps.is_awaited == is_awaited
        outcome = at.steps.report()
        assert outcome is not None
        assert len(outcome.progress) == 1
        assert at.steps.report() is None
        assert not at.steps.is_awaited


def test_rounds_run_again_after_a_crash() -> None:
    at = Turns(continuation=Series(2))

    def fail() -> None:
        if len(at.worker.steps) == 2:
            raise RuntimeError("planted")

    at.worker.during_step = fail
    at.arrive(1)
    at.arrive(2)
    answers = at.finish()
    assert at.worker.steps[:3] == [[(1, 0), (2, 0)], [(1, 1), (2, 1)], [(1, 1)]]
    assert at.worker.heard == [("release", 1), ("release", 2)]
    assert len(answers) == 6
    assert all(isinstance(answer, ProposalReply) for answer in answers.values())


def test_a_step_waits_for_a_session_that_is_expected_soon() -> None:
    """Two sessions take turns, 2 ms apart. A shared step takes no longer than a step of one."""
    at = Turns(seconds=lambda rows, sessions: STEP_S)
    gap_s = 0.002
    for index in range(6):
        at.arrive(1, index)
        at.turn()
        at.now += gap_s
        at.arrive(2, index)
        at.turn()
    at.arrive(1, 6)
    before = len(at.worker.steps)
    assert at.turn() is None
    assert len(at.worker.steps) == before
    assert at.now < at.steps.due_at < at.now + STEP_S
    at.now += gap_s
    at.arrive(2, 6)
    at.turn()
    assert at.worker.steps[-1] == [(1, 6), (2, 6)]


def test_a_session_whose_next_item_has_come_already_is_not_expected() -> None:
    """It came while the step before ran."""
    at = Turns(seconds=lambda rows, sessions: STEP_S)
    for index in range(6):
        at.arrive(1, index)
        at.turn()
        at.now += 0.002
    at.between = lambda: at.steps.receive(Arrival(request(1, 7, arrived_at=at.now)))
    at.arrive(1, 6)
    at.turn()
    at.between = lambda: None
    assert at.turn() is not None
    assert at.worker.steps[-1] == [(1, 7)]


def test_a_step_waits_no_longer_than_it_may() -> None:
    at = Turns(seconds=lambda rows, sessions: STEP_S)
    for index in range(6):
        at.arrive(1, index)
        at.turn()
        at.now += 0.002
        at.arrive(2, index)
        at.turn()
    at.arrive(1, 6)
    assert at.turn() is None
    at.now = at.steps.due_at
    at.turn()
    assert at.worker.steps[-1] == [(1, 6)]


def rounds_of(requests: Sequence[StepRequest[DraftItem]]) -> list[int]:
    return [one.item.head.round for one in requests]


def test_an_answered_request_gives_way_to_a_newer_one_of_its_session(at: Turns) -> None:
    at.worker.left[1] = 3
    old = at.arrive(1)
    at.turn()
    old.answered = True
    at.arrive(1, 1)
    at.turn()
    assert rounds_of([one.work for one in at.outcomes[-1].ended]) == [0]
    assert at.worker.steps[-1] == [(1, 1)]
