"""What a reconciler must know again when it returns, kept where the right to run code is needed to
write it: in the key-value store of Ray's head (GCS), and not in Redis.

| topic | text |
| --- | --- |
| `changes` | settings that differ from those that the deployment began with (`rolling_update.py`) |
| `policy` | between which bounds the load decides how many replicas a role has (`autoscaling.py`) |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from .ray_cluster import asking_head

T = TypeVar("T")
Topic = Literal["changes", "policy"]


class Kept(Protocol):
    """One text for each topic."""

    async def load(self, topic: Topic) -> str:
        """What was saved last; empty where nothing was. Raises `Unavailable`."""
        ...

    async def save(self, topic: Topic, text: str) -> None:
        """Keeps a text in place of the one before. Raises `Unavailable`."""
        ...


class KeptByRay:
    """A `Kept` in the cluster that this process is connected to, as Ray Serve keeps its own."""

    def __init__(self, namespace: str) -> None:
        """`namespace` is the deployment's."""
        self._namespace = namespace.encode()

    async def load(self, topic: Topic) -> str:
        """See `Kept.load`."""
        from ray.experimental.internal_kv import _internal_kv_get

        found = await _called(_internal_kv_get, topic.encode(), namespace=self._namespace)
        return "" if found is None else bytes(found).decode()

    async def save(self, topic: Topic, text: str) -> None:
        """See `Kept.save`."""
        from ray.experimental.internal_kv import _internal_kv_put

        await _called(
            _internal_kv_put, topic.encode(), text.encode(), overwrite=True,
            namespace=self._namespace,
        )  # fmt: skip


async def _called(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    with asking_head():
        return await asyncio.to_thread(function, *arguments, **options)
