"""When a step waits for sessions that will soon want one too."""

import asyncio
from itertools import count

import pytest

from outrider.interfaces.messages import VerifyItem
from outrider.interfaces.step_costs import StepCosts
from outrider.replica.batching_delay import BatchingDelay
from tests.support.rounds import Replica, ask, make_head
from tests.support.toy_engine import ToyEngine


def one_time(rows: int, sessions: int) -> float:
    """Steps always take 75 ms."""
    return 0.075


def known(*gaps_s: float) -> BatchingDelay:
    """Sessions of 5 rows each that return so long after an answer. All but the first have
    theirs."""
    batching_delay, now = BatchingDelay(one_time, 8), -100.0
    for _ in range(30):
        for session, gap_s in enumerate(gaps_s):
            batching_delay.answered(str(session), 5, now)
            batching_delay.arrived(str(session), now + gap_s)
        now += 1
    for session in range(1, len(gaps_s)):
        batching_delay.answered(str(session), 5, 0.0)
    return batching_delay


def test_a_step_waits_for_sessions_that_come_soon() -> None:
    """Together they have a round in 8 + 75 ms each, in turns in 150."""
    assert known(0.008, 0.008).hold(0.0, [5]) == pytest.approx(0.008, abs=1e-3)
    assert known(0.055, 0.055).hold(0.0, [5]) == pytest.approx(0.055, abs=1e-3)
    assert known(0.065, 0.065).hold(0.0, [5]) == 0.0, "65 + 75 ms are hardly less than 150"


def test_a_step_waits_only_for_some_sessions() -> None:
    """Two return at once, and one much later: it has a step of its own either way."""
    batching_delay = known(0.0, 0.004, 0.006, 0.070)
    assert batching_delay.hold(0.0, [5]) == 0.0, "there are two steps in any case"
    batching_delay.forget("3")
    assert batching_delay.hold(0.0, [5]) == pytest.approx(0.006, abs=1e-3)


def test_waiting_in_vain_reduces_trust_for_a_while() -> None:
    def waits(num: int, comes: bool) -> list[bool]:
        found = []
        for _ in range(num):
            batching_delay.answered("1", 5, 0.0)
            found.append(batching_delay.hold(0.0, [5]) > 0.0)
            if comes:
                batching_delay.awaited.clear()
        return found

    batching_delay = known(0.030, 0.030)
    assert all(waits(20, comes=True))
    in_vain = waits(12, comes=False)
    assert in_vain[0]
    assert sum(in_vain[-6:]) <= 1, "now and then it is tried again"
    assert any(waits(40, comes=True))


def test_a_session_that_comes_after_the_step_began_was_awaited_in_vain() -> None:
    batching_delay = known(0.008, 0.008, 0.008)
    began_at = batching_delay.hold(0.0, [5])
    batching_delay.arrived("1", began_at)
    batching_delay.arrived("2", began_at + 0.001)
    assert batching_delay.awaited == {"2"}


def test_a_step_does_not_wait_without_room_or_reason() -> None:
    assert known(*[0.008] * 9).hold(0.0, [5] * 8) == 0.0
    assert known(*[0.008] * 9).hold(0.0, []) == 0.0
    assert known(0.008, 0.008, 0.008).hold(0.5, [5]) == 0.5, "they are too late already"
    fresh = BatchingDelay(one_time, 8)
    fresh.answered("a", 5, 0.0)
    assert fresh.hold(0.001, [5]) == 0.001, "it is unknown when it comes"


async def rounds_of_two(costs: StepCosts | None) -> tuple[int, set[int]]:
    """Two sessions that begin 20 ms apart and return after 8 ms have steps of 75 ms for 10 s.
    Returns their rounds, and the sizes of their last steps."""
    at = Replica("target", ToyEngine(), 0.075, costs=costs)

    async def session(number: int) -> None:
        link = at.connect()
        await asyncio.sleep(0.02 * number)
        for index in count():
            await ask(*link, VerifyItem(make_head((1, 2), session=number, round_index=index)))
            await asyncio.sleep(0.008)

    running = [asyncio.create_task(session(number)) for number in range(2)]
    await asyncio.sleep(10)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await at.service.close()
    sizes = [len(batch) for batch in at.engine.batches]
    return sum(sizes), set(sizes[5:-1])


@pytest.mark.virtual
async def test_sessions_that_would_take_turns_share_steps() -> None:
    num_in_turns, sizes = await rounds_of_two(None)
    assert sizes == {1}
    num_together, sizes = await rounds_of_two(StepCosts((1, 512), (0.075, 0.075)))
    assert sizes == {2}
    assert num_together / num_in_turns == pytest.approx(150 / 83, rel=0.05)
