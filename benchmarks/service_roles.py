"""What runs in the processes of a deployment that a bench starts without Ray: the actors.

target       `setup`'s `config` is that of a `TargetConfig`
draft        that of a `DraftConfig`
coordinator  that of a `CoordinatorConfig`, with the others' addresses and the store's
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from outrider.config import CoordinatorConfig, DraftConfig, TargetConfig

from .roles import Role, play

Config = TypeVar("Config")
Config_contra = TypeVar("Config_contra", contravariant=True)
_GRACE_S: Final = 1.0


class _Actor(Protocol[Config_contra]):
    async def start(self, config: Config_contra, log_directory: str) -> str: ...

    async def stop(self, grace_s: float) -> None: ...


def target_role(setup: Mapping[str, Any]) -> AbstractAsyncContextManager[Role]:
    """A target replica."""
    from target_service.actor import TargetActor

    return _serving(TargetActor(), TargetConfig(**setup["config"]))


def _draft_role(setup: Mapping[str, Any]) -> AbstractAsyncContextManager[Role]:
    from draft_service.actor import DraftActor

    return _serving(DraftActor(), DraftConfig(**setup["config"]))


def _coordinator_role(setup: Mapping[str, Any]) -> AbstractAsyncContextManager[Role]:
    from coordinator.actor import CoordinatorActor

    config = CoordinatorConfig(**setup["config"])
    if config.lookup is not None:
        config = replace(config, lookup=DraftConfig(**setup["config"]["lookup"]))
    return _serving(CoordinatorActor(), config)


@asynccontextmanager
async def _serving(actor: _Actor[Config], config: Config) -> AsyncIterator[Role]:
    address = await actor.start(config, log_directory="")
    try:
        yield Role({"address": address}, lambda _: {})
    finally:
        await actor.stop(_GRACE_S)


if __name__ == "__main__":
    play({"target": target_role, "draft": _draft_role, "coordinator": _coordinator_role})
