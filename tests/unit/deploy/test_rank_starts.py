"""How the ranks of a model start: the reason why they do not, and the cores that each gets."""

from __future__ import annotations

import asyncio

import pytest

from deploy.fleet.replica import _of_the_first
from outrider.config import DraftConfig, TargetConfig
from outrider.engine.tensor_parallel.rank_process import Leadership, threads_of_a_rank
from outrider.errors import ConfigError, Unavailable

AT_ONCE_S = 1.5
"""Less than the time in which another rank may still tell a better reason."""


async def _after(delay_s: float, outcome: object) -> object:
    await asyncio.sleep(delay_s)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def test_the_leaders_address_is_given_once_all_ranks_are_ready() -> None:
    """Not before: the last one may fail."""
    assert await _of_the_first(_after(0, "address"), _after(0.05, None)) == "address"
    with pytest.raises(Unavailable, match="late"):
        await _of_the_first(_after(0, "address"), _after(0.05, Unavailable("late")))


async def test_a_rank_that_cannot_start_is_told_of_without_waiting_for_the_others() -> None:
    """The wrong setting of one, though another has ended for it before; and what still waits is
    given up."""
    waits = asyncio.ensure_future(_after(3600, "address"))
    with pytest.raises(ConfigError, match="no such file"):
        await _of_the_first(
            waits, _after(0, Unavailable("ended")), _after(0.05, ConfigError("no such file"))
        )
    await asyncio.sleep(0)
    assert waits.cancelled()


async def test_a_reason_is_told_at_once_where_all_have_ended() -> None:
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(Unavailable, match="ended"):
            await _of_the_first(_after(0.05, Unavailable("ended")), _after(0, None))


def test_neighbours_share_the_cores() -> None:
    """At least one each; what a configuration says is what each rank gets."""
    ranks = Leadership(4, 4, 1.0)
    try:
        assert threads_of_a_rank(TargetConfig(), 16, None) == 16
        assert threads_of_a_rank(TargetConfig(), 16, ranks) == 4
        assert threads_of_a_rank(DraftConfig(), 2, ranks) == 1
        assert threads_of_a_rank(TargetConfig(num_threads=3), 16, ranks) == 3
    finally:
        ranks.close()
