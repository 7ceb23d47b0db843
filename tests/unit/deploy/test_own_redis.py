"""Where `outrider status` finds the Redis of the deployment that runs here."""

from __future__ import annotations

import argparse

import pytest
from asked_here import record

from deploy.cli.own_redis import add_redis_flags, redis_of
from outrider.errors import SettingError
from outrider.sessions.redis_address import RedisAddress

OWN = "unix:///own.sock"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_redis_flags(parser)
    return parser.parse_args(words)


def test_the_deployments_own_redis_wins_over_settings() -> None:
    """Which may be those of another deployment; who one is there is no matter of its own one."""
    words = ("--redis-url", "redis://other", "--redis-username", "me", "--redis-password", "x")
    assert redis_of(arguments(*words), record()) == RedisAddress(url=OWN, key_prefix="ours:")


def test_another_redis_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record keeps no URL that may hold a password; the prefix of keys it does."""
    elsewhere = record(redis_url="")
    with pytest.raises(SettingError, match="another Redis than its own") as caught:
        redis_of(arguments(), elsewhere)
    assert caught.value.key == "redis_url"
    monkeypatch.setenv("OUTRIDER_REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("OUTRIDER_REDIS_KEY_PREFIX", "theirs:")
    found = redis_of(arguments("--redis-username", "me", "--redis-ca-file", "ca"), elsewhere)
    assert found == RedisAddress(
        url="redis://elsewhere", username="me", ca_file="ca", key_prefix="ours:"
    )
