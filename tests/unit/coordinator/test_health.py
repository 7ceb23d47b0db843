"""A coordinator's health: when it reports trouble."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from coordinator.health import CHECK_PERIOD_S, TROUBLE_S
from outrider import errors
from tests.support.coordinator_bench import bench, failing

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize(("silent_s", "is_healthy"), [(2.5, True), (10.0, False)])
@pytest.mark.parametrize("what", ["store", "target"])
async def test_a_short_silence_is_no_trouble(what: str, silent_s: float, is_healthy: bool) -> None:
    """As while a replica that is being loaded takes the cores of the target or the store."""
    async with bench() as b:
        loop = asyncio.get_running_loop()
        start = loop.time()
        if what == "store":
            b.store.load = failing(b.store.load, start + silent_s)
        else:
            b.target_link.sever(errors.LinkLost("gone"), reachable=False)
            loop.call_later(silent_s, b.target_link.restore)
        found = set[str]()
        while loop.time() < start + silent_s:
            found.add(b.service.health.trouble)
            assert found == {""} or loop.time() >= start + TROUBLE_S
            await asyncio.sleep(0.1)
        reason = max(found)
        assert reason == "" if is_healthy else what in reason
        await asyncio.sleep(CHECK_PERIOD_S + 0.3)
        assert b.service.health.trouble == ""
    assert "shutting down" in b.service.health.trouble


async def test_the_time_of_a_look_counts_as_silence() -> None:
    """If no replica answers, a check takes 4 s."""

    async def silent() -> bool:
        await asyncio.sleep(4)
        return False

    async with bench() as b:
        b.service.targets.healthy = silent  # type: ignore[method-assign]
        await asyncio.sleep(CHECK_PERIOD_S + 4.1)
        assert "target" in b.service.health.trouble


async def test_a_check_that_crashes_is_trouble_until_the_next_check_succeeds() -> None:
    async with bench() as b:
        targets: Any = b.service.targets
        healthy, targets.healthy = targets.healthy, AsyncMock(side_effect=KeyError("x"))
        await asyncio.sleep(TROUBLE_S + 2 * CHECK_PERIOD_S)
        assert b.service.health.trouble
        targets.healthy = healthy
        await asyncio.sleep(2 * CHECK_PERIOD_S)
        assert b.service.health.trouble == ""
