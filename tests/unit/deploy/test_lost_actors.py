"""What a deployment does when one of its actors has ended: it ends too, or goes on without a
draft."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.cluster import Actor, Demand
from deploy.launcher import Deployment
from outrider.config import load_config
from outrider.errors import EngineLost

AT_ONCE_S = 5.0


class Sitter(Actor):
    """An actor that waits until it is told how it ends."""

    def __init__(self, role: str, rank: int = 0) -> None:
        super().__init__(Demand(role, 1.0, 0.0), None, rank)
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def call(self, method: str, *_: object, timeout_s: float | None = None) -> Any:
        assert method == "wait"
        await asyncio.shield(self.end)


class Started:
    """A deployment of five actors, and those of them that it has removed."""

    def __init__(self, directory: Path) -> None:
        self.deployment: Any = Deployment(load_config({}, {}), directory)
        self.removed: list[str] = []
        self.deployment._cluster = SimpleNamespace(remove=self.remove)
        actors = [Sitter(role) for role in ("target", "draft", "coordinator")]
        followers = [Sitter(role, 1) for role in ("target", "draft")]
        self.deployment._actors = {actor.role: actor for actor in actors}
        self.deployment._followers = followers
        self.actors = {actor.name: actor for actor in (*actors, *followers)}

    async def remove(self, actors: Sequence[Actor]) -> None:
        self.removed += [actor.name for actor in actors]


@pytest.mark.parametrize("name", ["target", "target-rank-1", "coordinator"])
async def test_nothing_goes_on_without_a_rank_of_the_target_or_the_coordinator(
    tmp_path: Path, name: str
) -> None:
    started = Started(tmp_path)
    started.actors[name].end.set_exception(EngineLost("rank 1 is gone"))
    async with asyncio.timeout(AT_ONCE_S):
        assert await started.deployment.wait() == started.actors[name].role


@pytest.mark.parametrize("name", ["draft", "draft-rank-1"])
async def test_the_draft_ends_with_any_of_its_ranks_and_nothing_else_does(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its processes are ended, the one that serves too, and their places given back."""
    started = Started(tmp_path)
    waiting = asyncio.create_task(started.deployment.wait())
    started.actors[name].end.set_exception(EngineLost("rank 1 is gone"))
    async with asyncio.timeout(AT_ONCE_S):
        while not started.removed:
            await asyncio.sleep(0)
        assert started.removed == ["draft", "draft-rank-1"]
        assert [record.message for record in caplog.records] == [
            f"the {name} actor is gone: rank 1 is gone"
        ]
        assert not started.deployment.followers("draft")
        assert not waiting.done()
        started.actors["target"].end.set_result(None)
        assert await waiting == "target"
