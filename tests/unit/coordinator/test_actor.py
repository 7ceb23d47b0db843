"""The actor of a coordinator, without Ray."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.actor import GARBAGE_OBJECTS, CoordinatorActor
from coordinator.host import load_text
from outrider.config.deployment import CoordinatorConfig
from outrider.models.tokenizer import TokenizerText


def keep_process_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("use_threads", "log_to"):
        monkeypatch.setattr(f"coordinator.actor.{name}", lambda *_: None)


async def test_the_tokenizer_is_loaded_before_targets_serve_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    keep_process_settings(monkeypatch)
    monkeypatch.setattr(
        TokenizerText, "load", lambda *given, **options: loaded.append((given, options)) or "text"
    )
    config = CoordinatorConfig(tokenizer_directory=str(tmp_path), served_model_name="m")
    await CoordinatorActor().prepare(config, "")
    options = {"trust_remote_code": False, "chat_template": ""}
    assert loaded == [((tmp_path, "m"), options)]
    assert load_text(config) == "text"
    assert len(loaded) == 1
    assert load_text(replace(config, served_model_name="n")) == "text"
    assert len(loaded) == 2


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
    keep_process_settings(monkeypatch)
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
