"""A coordinator that begins: what it is called in the store, and what it does without a draft."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from memory_registry import MemoryRegistry
from session_links import TOY, ScriptedLink
from twin_store import TwinStore

from coordinator.host import owner_name
from coordinator.service import CoordinatorService
from outrider.config import CoordinatorConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.errors import Unavailable
from outrider.registry.registry import Membership
from outrider.sessions.redis_address import RedisAddress


def config(deployment: str, name: str) -> CoordinatorConfig:
    redis = RedisAddress(url="unix:///none", key_prefix="outrider:")
    return CoordinatorConfig(membership=Membership(redis=redis, deployment=deployment, name=name))


def test_no_two_coordinators_of_one_store_are_called_the_same() -> None:
    """Those of other deployments may have its name; such as are not announced have none."""
    alike = [config("one", "coordinator-0"), config("two", "coordinator-0")]
    others = [config("one", "coordinator-1"), CoordinatorConfig(), CoordinatorConfig()]
    assert len({owner_name(one) for one in (*alike, *others)}) == 5


def test_a_coordinator_that_is_started_anew_has_another_name_in_the_store() -> None:
    """Else its lease would keep the sessions of the one before from all others."""
    same = config("one", "coordinator-0")
    assert owner_name(same) != owner_name(same)


@asynccontextmanager
async def started(
    *, follows: bool, draft: ScriptedLink | None, drafts_itself: bool = False
) -> AsyncIterator[CoordinatorService]:
    target = ScriptedLink()
    target.description = replace(TOY, drafts_itself=drafts_itself)
    service = CoordinatorService(
        CoordinatorConfig(), "a", registry=MemoryRegistry() if follows else None,
        store=TwinStore(lambda: 0.0), targets={"t": target},
        drafts={} if draft is None else {"d": draft}, fallback=NgramDrafter(), text=None,
    )  # fmt: skip
    await service.start()
    yield service
    await service.close()


async def test_a_draft_that_is_away_stops_nobody_who_hears_of_others() -> None:
    away = ScriptedLink()
    away.away_until = math.inf
    async with started(follows=True, draft=away) as service:
        assert (service.targets.names, service.drafts.names) == (["t"], [])
    with pytest.raises(Unavailable, match="away"):
        async with started(follows=False, draft=away):
            pass


@pytest.mark.parametrize("drafts_itself", [False, True])
async def test_without_a_draft_only_a_target_that_drafts_counts_as_delayed(
    drafts_itself: bool,
) -> None:
    async with started(follows=True, draft=None, drafts_itself=drafts_itself) as service:
        assert service._lengths is not None
        assert service._lengths.costs.drafting_delays is drafts_itself
