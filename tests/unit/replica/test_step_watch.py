"""Which steps count as late or hung."""

import asyncio

import pytest

from outrider.limits import FIRST_STEP_S, HUNG_STEP_S, LATE_STEP_FACTOR, LATE_STEP_S
from outrider.replica.step_watch import CHECK_PERIOD_S, COUNTED_S_MAX, ExpectedStep, StepWatch

pytestmark = pytest.mark.virtual


class Watched:
    """A watch, and what it has told, each with the time."""

    def __init__(self, may_compile: bool = False) -> None:
        self.step = ExpectedStep(4, 2, 0.0)
        self.told: list[tuple[str, float]] = []
        self.since: float | None = None
        self.watch = StepWatch(
            lambda: self.step,
            lambda: self.since,
            may_compile,
            lambda seconds: self.told.append(("late", seconds)),
            lambda seconds: self.told.append(("hung", seconds)),
        )

    def begin(self) -> None:
        self.since = asyncio.get_running_loop().time()
        self.watch.begin()

    def end(self) -> None:
        assert self.since is not None
        since, self.since = self.since, None
        self.watch.note(since, asyncio.get_running_loop().time(), self.step)

    async def run(self, seconds: float) -> None:
        self.begin()
        await asyncio.sleep(seconds)
        self.end()


@pytest.fixture
def watched() -> Watched:
    return Watched()


async def test_many_steps_in_a_row_are_not_one_long_step(watched: Watched) -> None:
    for _ in range(100):
        await watched.run(0.9 * LATE_STEP_S)
    assert watched.told == []


async def test_a_step_is_late_once_and_hung_once(watched: Watched) -> None:
    await watched.run(3 * HUNG_STEP_S)
    assert [what for what, _ in watched.told] == ["late", "hung"]
    for (_, seconds), limit in zip(watched.told, (LATE_STEP_S, HUNG_STEP_S), strict=True):
        assert limit <= seconds <= limit + CHECK_PERIOD_S


async def test_only_the_time_of_the_running_step_counts(watched: Watched) -> None:
    """Also if the event loop hears of the end of a step only after the next step has begun."""
    watched.begin()
    await asyncio.sleep(0.9 * LATE_STEP_S)
    first, ended_at = watched.since, asyncio.get_running_loop().time()
    watched.begin()
    await asyncio.sleep(0.9 * LATE_STEP_S)
    assert first is not None
    watched.watch.note(first, ended_at, watched.step)
    assert watched.told == []
    await asyncio.sleep(0.1 * LATE_STEP_S + CHECK_PERIOD_S)
    assert [what for what, _ in watched.told] == ["late"]


async def test_nothing_is_watched_while_no_step_can_run(watched: Watched) -> None:
    await watched.run(1.0)
    watched.watch.end()
    watched.since = asyncio.get_running_loop().time()
    await asyncio.sleep(2 * LATE_STEP_S)
    assert watched.told == []


async def test_steps_of_a_machine_that_became_slow_are_not_late_for_ever(watched: Watched) -> None:
    """Each late step that ends doubles the limits. After many steps in time, they are as before."""
    watched.step = ExpectedStep(4, 2, 0.01)
    for _ in range(4):
        await watched.run(3 * LATE_STEP_S)
    assert [what for what, _ in watched.told] == ["late", "late"]
    for _ in range(200):
        await watched.run(0.01)
    await watched.run(3 * LATE_STEP_S)
    assert [what for what, _ in watched.told] == ["late"] * 3


async def test_the_longest_recent_step_counts_if_nothing_is_foretold(watched: Watched) -> None:
    """It is forgotten after many shorter steps."""
    await watched.run(2.0)
    await watched.run(0.9 * 2.0 * LATE_STEP_FACTOR)
    assert watched.told == []
    watched = Watched()
    await watched.run(2.0)
    for _ in range(500):
        await watched.run(0.01)
    await watched.run(0.9 * 2.0 * LATE_STEP_FACTOR)
    assert [what for what, _ in watched.told] == ["late", "hung"]


async def test_the_first_step_of_a_size_may_compile() -> None:
    """Sizes are rounded up to powers of two. Other sizes may need other kernels."""
    watched = Watched(may_compile=True)
    watched.begin()
    await asyncio.sleep(FIRST_STEP_S - 1)
    assert watched.told == []
    watched.end()
    watched.step = ExpectedStep(3, 2, 0.01)
    await watched.run(HUNG_STEP_S + 1)
    assert [what for what, _ in watched.told] == ["late", "hung"]
    watched.told.clear()
    for step in (ExpectedStep(5, 2, 0.01), ExpectedStep(3, 3, 0.01)):
        watched.step = step
        await watched.run(HUNG_STEP_S + 1)
        assert watched.told == []
    watched.step = ExpectedStep(300, 2, 0.01)
    await watched.run(FIRST_STEP_S + 1)
    assert [what for what, _ in watched.told] == ["late", "hung"]


async def test_time_in_which_the_loop_does_not_run_does_not_count(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP and SIGCONT: a step must not count as hung because its process stood
    still."""
    loop = asyncio.get_running_loop()
    stood_s, real = 0.0, loop.time
    watched.begin()
    monkeypatch.setattr(loop, "time", lambda: real() + stood_s)
    await asyncio.sleep(1.0)
    stood_s = 10 * HUNG_STEP_S
    await asyncio.sleep(LATE_STEP_S - 1.0 - COUNTED_S_MAX - CHECK_PERIOD_S)
    watched.end()
    assert watched.told == []


async def test_a_step_whose_process_stood_still_is_not_what_later_steps_may_take(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    stood_s, real = 0.0, loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + stood_s)
    watched.begin()
    stood_s = 10 * HUNG_STEP_S
    watched.end()
    await watched.run(HUNG_STEP_S + 2 * CHECK_PERIOD_S)
    assert [what for what, _ in watched.told] == ["late", "hung"]
