"""Changes how many replicas are wanted, as a deployment's policy says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from outrider.autoscaling import Autoscaler, Bounds, Policy
from outrider.errors import OutriderError
from outrider.registry.registry import ROLES, Registry, Role

from .saved_state import Kept

_log = logging.getLogger(__name__)

LOOK_PERIOD_S: Final = 1.0
"""Between two looks at what replicas say of their work."""
RETRY_PERIOD_S: Final = 1.0
"""Until what is kept is read again, where that failed."""


class Autoscaling:
    """Looks at the registry until it is cancelled."""

    def __init__(self, kept: Kept, registry: Registry, policy: Policy) -> None:
        """`policy` is the one at first; `outrider autoscale` changes its bounds."""
        self._kept = kept
        self._registry = registry
        self._scaler = Autoscaler()
        self.policy = policy
        """The one that holds."""

    async def begin(self) -> None:
        """Forgets what a deployment of this name had before. Raises `Unavailable`."""
        await self._kept.save("policy", self.policy.to_json())

    async def forget(self) -> None:
        """Keeps no policy any more, at the end of a deployment. Raises `Unavailable`."""
        await self._kept.save("policy", "")

    async def return_to(self) -> None:
        """Goes by the bounds that held when another one had the care of the fleet."""
        while True:
            try:
                if text := await self._kept.load("policy"):
                    self.policy = replace(self.policy, bounds=Policy.from_json(text).bounds)
                return
            except (OutriderError, ValueError) as error:
                _log.warning("the bounds that hold are not known yet: %s", error)
                await asyncio.sleep(RETRY_PERIOD_S)

    async def bound(self, changes: Mapping[Role, Bounds | None]) -> Policy:
        """Other bounds for some roles, None for a role whose number the load no longer decides;
        the policy that holds then. Raises `Unavailable`; then the one before still holds."""
        bounds = {
            role: pair for role, pair in {**self.policy.bounds, **changes}.items()
            if pair is not None
        }  # fmt: skip
        policy = replace(self.policy, bounds=bounds)
        if policy != self.policy:
            await self._kept.save("policy", policy.to_json())
            self.policy = policy
        return self.policy

    def go_by(self, policy: Policy) -> None:
        """Other thresholds from now on; bounds stay as they were told."""
        self.policy = replace(policy, bounds=self.policy.bounds)

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self.look()
            except OutriderError as error:
                _log.warning("the numbers of replicas stay: %s", error)
            except Exception:  # noqa: BLE001 (the fleet goes on with the numbers that it has)
                _log.exception("the numbers of replicas stay")
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self) -> None:
        """Once. Raises `StoreUnavailable`."""
        if not self.policy.bounds:
            return
        wanted = await self._registry.wanted()
        records = {role: await self._registry.records(role) for role in ROLES}
        now = asyncio.get_running_loop().time()
        for change in self._scaler.decide(now, self.policy, wanted, records):
            _log.info("wanted: %s=%d, %s", change.role, change.count, change.reason)
            await self._registry.want({change.role: change.count})
