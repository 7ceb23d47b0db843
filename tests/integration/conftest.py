"""Services in this process, and a Redis server with a client to inspect it."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from outrider.redis.address import RedisAddress
from outrider.redis.embedded import EmbeddedRedis
from outrider.registry.redis_registry import RedisRegistry
from outrider.sessions.redis_store import RedisStore
from tests.support.stack import Stack, slow_stack, toy_stack


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, protocol=2) as client:
        yield client


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncIterator[RedisStore]:
    made = await RedisStore.connect(RedisAddress(url=server.url, key_prefix=f"{uuid.uuid4()}:"))
    yield made
    await made.close()


@pytest.fixture
async def registry(server: EmbeddedRedis, admin: redis.Redis) -> AsyncIterator[RedisRegistry]:
    """The registry of a deployment `d`. Its keys begin with `p:`, and Redis has no others."""
    admin.flushall()
    made = RedisRegistry(RedisAddress(url=server.url, key_prefix="p:"), "d")
    yield made
    await made.close()


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with toy_stack(tmp_path / "redis") as running:
        yield running


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Stack]:
    """A slow stack with room for three sessions."""
    async with slow_stack(tmp_path / "redis", target_gone_ms=1_000, max_sessions=3) as running:
        yield running
