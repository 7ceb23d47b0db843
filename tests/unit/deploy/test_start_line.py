"""What a start-up says of itself."""

from __future__ import annotations

import pytest

from deploy.fleet.launcher import start_line
from outrider.config import load_config


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "starting Ray and Redis, finding the models"),
        ({"engine": "emulated:"}, "starting Ray and Redis"),
        (
            {"redis_url": "redis://h"},
            "starting Ray, connecting to Redis, finding the models",
        ),
        (
            {"redis_url": "redis://h", "address": "h:1"},
            "connecting to Ray and Redis, finding the models",
        ),
    ],
)
def test_only_what_is_started_is_said_to_start(settings: dict[str, object], line: str) -> None:
    assert start_line(load_config(settings, {})) == line


def test_an_emulated_target_is_not_called_by_the_model_that_would_run() -> None:
    config = load_config({"engine": "emulated:", "model": "demo"}, {})
    assert config.target_name == config.served_model_name == "emulated"
    assert load_config({"model": "demo"}, {}).served_model_name == "demo"
    named = {"engine": "emulated:", "served_model_name": "mine"}
    assert load_config(named, {}).served_model_name == "mine"
