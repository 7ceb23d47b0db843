"""What became of an actor that does not say where it runs."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deploy.fleet.ray_cluster import Actor
from deploy.fleet.replica import _all_or_error
from outrider.config import DraftConfig, TargetConfig
from outrider.engine.tensor_parallel.rank_process import RankLeader, threads_of_a_rank
from outrider.errors import ConfigError, Unavailable
from outrider.replica.process_setup import Place


def actor_that(answer: Future[Any]) -> Actor:
    reference = SimpleNamespace(future=lambda: answer)
    handle = SimpleNamespace(ping=SimpleNamespace(remote=lambda: reference))
    return Actor("target", handle)


async def test_what_became_of_an_actor_is_told_by_whether_it_says_where_it_runs() -> None:
    """One that waits has no place; the error of one that died says why, and nothing of CPUs."""
    answer: Future[Any] = Future()
    answer.set_result(Place(1, "here"))
    actor = actor_that(answer)
    assert await actor.find_place(20.0)
    assert actor.place == Place(1, "here")
    assert not await actor_that(Future()).find_place(0.01)
    died: Future[Any] = Future()
    died.set_exception(ray.exceptions.RayActorError(error_msg="out of\nmemory"))
    with pytest.raises(Unavailable, match="the target actor died: out of memory"):
        await actor_that(died).find_place(20.0)


async def _after(delay_s: float, outcome: object) -> object:
    await asyncio.sleep(delay_s)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def test_a_rank_that_cannot_start_is_told_of_without_waiting_for_the_others() -> None:
    """The wrong setting of one, though another has ended for it before; and what still waits is
    given up."""
    with pytest.raises(Unavailable, match="late"):
        await _all_or_error(_after(0, "address"), _after(0.05, Unavailable("late")))
    waits = asyncio.ensure_future(_after(3600, "address"))
    with pytest.raises(ConfigError, match="no such file"):
        await _all_or_error(
            waits, _after(0, Unavailable("ended")), _after(0.05, ConfigError("no such file"))
        )
    await asyncio.sleep(0)
    assert waits.cancelled()


def test_neighbours_share_the_cores() -> None:
    """At least one each; what a configuration says is what each rank gets."""
    ranks = RankLeader(4, 4, 1.0)
    try:
        assert threads_of_a_rank(TargetConfig(), 16, None) == 16
        assert threads_of_a_rank(TargetConfig(), 16, ranks) == 4
        assert threads_of_a_rank(DraftConfig(), 2, ranks) == 1
        assert threads_of_a_rank(TargetConfig(num_threads=3), 16, ranks) == 3
    finally:
        ranks.close()
