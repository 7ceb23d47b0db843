"""What became of an actor that does not say where it runs."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deploy.fleet.ray_cluster import Actor, Demand
from outrider.errors import Unavailable
from outrider.replica.process_setup import Place


def actor_that(answer: Future[Any]) -> Actor:
    reference = SimpleNamespace(future=lambda: answer)
    handle = SimpleNamespace(ping=SimpleNamespace(remote=lambda: reference))
    return Actor(Demand("target", 1.0, 0.0), handle)


async def test_an_actor_that_runs_says_where() -> None:
    answer: Future[Any] = Future()
    answer.set_result(Place(1, "here"))
    actor = actor_that(answer)
    assert await actor.find_place(20.0)
    assert actor.place == Place(1, "here")


async def test_an_actor_that_waits_has_no_place() -> None:
    assert not await actor_that(Future()).find_place(0.01)


async def test_an_actor_that_died_had_one() -> None:
    """Its error says why it died, and nothing of CPUs."""
    answer: Future[Any] = Future()
    answer.set_exception(ray.exceptions.RayActorError(error_msg="out of\nmemory"))
    with pytest.raises(Unavailable, match="the target actor died: out of memory"):
        await actor_that(answer).find_place(20.0)


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_call_that_is_cancelled_while_its_answer_comes_is_cancelled(num_turns: int) -> None:
    """Whoever ends a fleet's task must not find it going on."""
    answer: Future[Any] = Future()
    calling = asyncio.create_task(actor_that(answer).call("ping", timeout_s=20.0))
    await asyncio.sleep(0.01)
    answer.set_result(Place(1, "here"))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if not calling.cancel():
        return  # It was over.
    with pytest.raises(asyncio.CancelledError):
        await calling
