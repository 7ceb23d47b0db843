"""The actor of a coordinator, without Ray."""

import gc
from typing import Any

import pytest

from coordinator.actor import GARBAGE_OBJECTS, CoordinatorActor
from outrider.config.deployment import CoordinatorConfig


async def test_garbage_collections_skip_what_exists_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection of all imported modules would block the event loop."""

    class Host:
        def __init__(self, config: Any) -> None:
            self.kept = [config]

        async def start(self) -> str:
            return "address"

    monkeypatch.setattr("coordinator.host.CoordinatorHost", Host)
    for name in ("use_threads", "log_to"):
        monkeypatch.setattr(f"coordinator.actor.{name}", lambda *_: None)
    threshold, actor = gc.get_threshold(), CoordinatorActor()
    gc.set_threshold(700, 10, 10)
    try:
        assert await actor.start(CoordinatorConfig(), "") == "address"
        kept: Any = actor.host
        assert not any(one is kept.kept for one in gc.get_objects())
        assert gc.get_threshold()[0] == GARBAGE_OBJECTS
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
