"""What became of an actor that does not say where it runs."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deploy.cluster import Actor, Demand
from outrider.errors import Unavailable
from outrider.hosting import Place


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
