"""Which requests a coordinator admits."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from coordinator.admission import Admission
from coordinator.decoding.loop import SessionRun
from outrider import errors, limits
from outrider.interfaces.request import Finished, GenerateRequest, Started
from tests.support.coordinator_bench import REQUEST, SlowText, bench

pytestmark = pytest.mark.virtual


async def test_no_request_is_taken_while_the_event_loop_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single pause is no reason, however long. CPU time is measured too."""
    loop: Any = asyncio.get_running_loop()

    def stall() -> None:
        nonlocal timer
        loop._virtual.wait(1.0)  # Something blocks the event loop.
        timer = loop.call_later(0.001, stall)

    monkeypatch.setattr(time, "process_time", lambda: 0.4 * loop.time())
    async with bench() as b:
        timer = loop.call_later(0, stall)
        await asyncio.sleep(2)
        assert isinstance((await b.events(REQUEST))[-1], Finished)
        await asyncio.sleep(4)
        with pytest.raises(errors.Overloaded, match=r"is \d{3} ms late") as refused:
            await b.events(REQUEST)
        assert refused.value.of_server
        assert (b.service.health.figures.loop_lag_ms or 0) > 300
        timer.cancel()
        await asyncio.sleep(5)
        assert isinstance((await b.events(REQUEST))[-1], Finished)
        assert b.service.health.figures.busy == pytest.approx(0.4, rel=0.15)


async def test_many_sessions_begin_and_end_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the steps, the event loop does other work."""
    turn, steps = 0, {"check": Counter[int](), "stop": Counter[int]()}

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            steps[name][turn] += 1
            return call(*arguments, **named)

        return wrapped

    monkeypatch.setattr(SessionRun, "stop", noted("stop", SessionRun.stop))
    async with bench(max_sessions=100) as b:
        monkeypatch.setattr(Admission, "check", noted("check", Admission.check))
        counting = asyncio.create_task(count_turns())
        streams = [b.service.streams.generate(REQUEST, resumable=False) for _ in range(64)]
        await asyncio.gather(*map(anext, streams))
        await asyncio.gather(*(one.aclose() for one in streams))
        await b.service._sessions.end_background()
        counting.cancel()
    for found in steps.values():
        assert found.total() == 64
        assert max(found.values()) <= limits.STARTS_MAX == limits.ENDINGS_MAX


@pytest.mark.virtual(False)
async def test_tokenizing_counts_for_the_deadline_and_for_admission() -> None:
    async with bench(text=SlowText(0.5), max_sessions=1) as b:
        first = asyncio.create_task(b.events(GenerateRequest("abcd", max_tokens=1)))
        await asyncio.sleep(0.1)
        with pytest.raises(errors.Overloaded) as refused:
            await b.events(GenerateRequest("abcd", max_tokens=1))
        assert refused.value.of_server
        assert isinstance((await first)[-1], Finished)
        with pytest.raises(errors.DeadlineExceeded, match="deadline_ms"):
            await b.events(GenerateRequest("abcd", max_tokens=1, deadline_ms=100))


@pytest.mark.parametrize("seed", [None, 7])
async def test_two_coordinators_draw_different_seeds(seed: int | None) -> None:
    """With `--seed`, a coordinator of the same name draws the same series again."""

    async def drawn(name: str) -> list[int]:
        async with bench(name=name, seed=seed) as b:
            events = [await b.events(replace(REQUEST, seed=None, max_tokens=1)) for _ in range(9)]
        return [one.seed for one in chain(*events) if isinstance(one, Started)]

    names = ("one", "other", "one")
    [one, other, again] = [await drawn(name) for name in names]
    assert len({*one, *other}) == 18
    assert (one == again) == (seed is not None)


async def test_an_error_names_the_start_of_an_unknown_model() -> None:
    """To quote 8 MiB would hold the event loop."""
    async with bench() as b:
        with pytest.raises(errors.NotFound, match=r"^model 'xxx") as refused:
            await b.events(replace(REQUEST, model="x" * 2**20))
    assert len(refused.value.message) < 400
