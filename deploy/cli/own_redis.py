"""The Redis of the deployment that runs on this machine, for commands that only look."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Final

from deploy.state import DeploymentRecord
from outrider.config import deployment_settings
from outrider.errors import SettingError
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_password import with_password

from .settings import add_setting_flags, deployment_config

_REDIS: Final = (
    "redis_url", "redis_username", "redis_password", "redis_password_file", "redis_ca_file",
    "redis_sentinel_password",
)  # fmt: skip


def add_redis_flags(parser: argparse.ArgumentParser) -> None:
    """How to reach a deployment's Redis; see `redis_of`."""
    others = [key for key in deployment_settings() if key not in _REDIS]
    add_setting_flags(parser, "the deployment's Redis, where it is not its own", without=others)


def redis_of(arguments: argparse.Namespace, record: DeploymentRecord) -> RedisAddress:
    """Where the deployment keeps its sessions: its own server, or the one that settings name.
    Raises `SettingError`."""
    given = deployment_config(arguments).coordinator.redis
    given = replace(
        given, key_prefix=str(record.settings.get("redis_key_prefix", given.key_prefix))
    )
    if record.redis_url:
        return RedisAddress(url=record.redis_url, key_prefix=given.key_prefix)
    if not given.url:
        raise SettingError(
            "redis_url", "the deployment has another Redis than its own; give that one's URL"
        )
    return with_password(given)
