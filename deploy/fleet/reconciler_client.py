"""Asks the reconciler of a deployment, which is a named actor of a Ray cluster.

Ray lets in only what shows the cluster's token, and whoever has that may run code anyway; so this,
and nothing in Redis, is how settings come to a deployment that runs.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import Unavailable
from outrider.settings import Value

from .ray_cluster import Actor
from .ray_connection import RayConnection
from .ray_token import forget_token, use_token
from .reconciler import find_reconciler

AWAY_S: Final = 60.0
"""A reconciler that has died is started again by Ray within seconds; after so long it is lost."""
RETRY_PERIOD_S: Final = 0.5
"""Until one that did not answer is asked again."""
CHANGE_S: Final = 900.0
"""What making a plan of other settings may take: a model's files may have to be fetched."""


@dataclass(frozen=True, slots=True)
class DeploymentLocation:
    """Which deployment, and how its cluster is reached."""

    address: str
    """Of the Ray cluster, HOST:PORT."""
    deployment: str
    """Its name."""
    elsewhere: bool = False
    """Whether settings named it, and not the record of this machine."""
    token: Path | None = None
    """File of Ray's token; None = as Ray finds it, by RAY_AUTH_TOKEN_PATH and the like."""

    @property
    def namespace(self) -> str:
        """Of its actors."""
        return namespace_of(self.deployment)


def namespace_of(deployment: str) -> str:
    """The Ray namespace of a deployment's actors."""
    return f"outrider-{deployment}"


@asynccontextmanager
async def asked(where: DeploymentLocation) -> AsyncIterator[Asked]:
    """Connects to the cluster, and leaves it in the end. Raises `SettingError` for one that cannot
    be reached."""
    if where.token is not None:
        use_token(where.token)
    try:
        connection = RayConnection(where.address, where.namespace)
        await connection.connect()
        try:
            yield Asked(lambda: find_reconciler(where.namespace))
        finally:
            await connection.disconnect()
    finally:
        if where.token is not None:
            forget_token()


class Asked:
    """A reconciler as others see it. While it is away it is asked again."""

    def __init__(self, find: Callable[[], Awaitable[Actor | None]]) -> None:
        """`find` is asked each time: another one may have taken its place."""
        self._find = find

    async def call(self, method: str, *arguments: object, timeout_s: float = AWAY_S) -> Any:
        """What a method returns. It may be called twice. Raises what it raises, and `Unavailable`
        where there is none, it does not answer in `timeout_s`, or is away for `AWAY_S`."""
        loop = asyncio.get_running_loop()
        give_up_at = None
        while True:
            try:
                found = await self._find()
                if found is not None:
                    return await found.call(method, *arguments, timeout_s=timeout_s)
            except Unavailable as error:
                give_up_at = give_up_at or loop.time() + AWAY_S
                if isinstance(error.__cause__, TimeoutError) or loop.time() > give_up_at:
                    raise
            else:
                raise Unavailable("no deployment of this name runs on the Ray cluster")
            await asyncio.sleep(RETRY_PERIOD_S)

    async def change(self, values: Mapping[str, Value]) -> str:
        """Adds settings to the changes that hold; the name that they have. Raises `ConfigError`
        where they are refused, and as `call`."""
        name = uuid.uuid4().hex
        await self.call("change", name, dict(values), timeout_s=CHANGE_S)
        return name
