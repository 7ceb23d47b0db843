"""The queue before a replica's steps: order of arrival, also for unfinished requests."""

from dataclasses import replace

from outrider.interfaces.messages import DraftItem
from outrider.replica.step_request import AnswerSender, RequestQueue, StepRequest, Unfinished
from tests.support.rounds import make_head


def work(
    session: int, round_index: int = 0, expires_at: float = 9.0, tenant: str = ""
) -> StepRequest:
    head = replace(make_head((1, 2), session=session, round_index=round_index), tenant=tenant)
    item = DraftItem(head, 2)
    return StepRequest(item, AnswerSender(lambda answers: None), 0.0, expires_at)


def names(works: list[StepRequest]) -> list[tuple[int, int]]:
    return [(int(w.item.head.session_id, 16), w.item.head.round) for w in works]


def filled(*works: StepRequest) -> RequestQueue:
    queue = RequestQueue(2)
    for each in works:
        queue.add(each)
    return queue


def test_what_a_step_did_not_finish_keeps_its_place() -> None:
    queue = filled(work(1), work(2), work(3))
    first, second = queue.take(0.0)[0]
    queue.add(work(4))
    queue.requeue([first])
    assert names(queue.take(0.0)[0]) == [(1, 0), (3, 0)]
    queue.requeue([second])
    assert names(queue.take(0.0)[0]) == [(2, 0), (4, 0)]


def test_long_prompts_do_not_keep_rounds_out_of_a_step() -> None:
    prompts = [work(session) for session in (1, 2, 3)]
    for each in prompts:
        each.unfinished = Unfinished.CONTINUES
    queue = filled(*prompts, work(4), work(5), work(6))
    assert names(queue.take(0.0)[0]) == [(1, 0), (2, 0), (4, 0), (5, 0)]


def test_a_sessions_later_round_does_not_pass_its_earlier_one() -> None:
    """The earlier one waits for pages and finds no room in the batch; the later one is not
    taken."""
    waiting = [work(1), work(2), work(3)]
    for each in waiting:
        each.unfinished = Unfinished.WAITS
    queue = filled(*waiting, work(3, 1), work(4))
    assert names(queue.take(0.0)[0]) == [(1, 0), (2, 0), (4, 0)]


def test_tenants_take_turns() -> None:
    queue = filled(*(work(session, tenant="a") for session in range(1, 6)), work(6, tenant="b"))
    queue.add(work(7, tenant="b"))
    taken = [names(queue.take(0.0)[0]) for _ in range(3)]
    assert taken == [[(1, 0), (6, 0)], [(2, 0), (7, 0)], [(3, 0), (4, 0)]]


def test_a_session_that_ends_takes_its_requests_along() -> None:
    """Also those that a step did not finish."""
    queue = filled(work(1), work(2), work(1, 1), work(3))
    first, second = queue.take(0.0)[0]
    queue.requeue([first, second])
    queue.drop(first.session_id)
    queue.drop(first.session_id)
    assert names(queue.waiting) == [(2, 0), (3, 0)]
    assert queue.rows == [2, 2]
    queue.clear()
    assert queue.rows == []


def test_a_request_goes_before_those_that_arrived_later() -> None:
    """The next round of a session is formed at the end of a step. Requests that came during the
    step are received afterwards."""
    formed, came = work(1, 1), work(2)
    formed.arrived_at = 2.0
    came.arrived_at = 1.0
    assert names(filled(formed, came).waiting) == [(2, 0), (1, 1)]
