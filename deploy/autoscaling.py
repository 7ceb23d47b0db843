"""Changes how many replicas are wanted, as a deployment's policy says."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from outrider.errors import OutriderError
from outrider.fleet.autoscaling import Autoscaler, Policy
from outrider.fleet.registry import ROLES, Registry

_log = logging.getLogger(__name__)

LOOK_PERIOD_S: Final = 1.0
"""Between two looks at what replicas say of their work."""


class Autoscaling:
    """Looks at the registry until it is cancelled."""

    def __init__(self, registry: Registry, policy: Policy) -> None:
        """`policy` is the one at first; `outrider autoscale` changes what the registry knows."""
        self._registry = registry
        self._policy = policy.to_json()
        self._thresholds: Policy | None = None
        self._scaler = Autoscaler()

    async def begin(self) -> None:
        """Tells the registry the policy. Raises `StoreUnavailable`."""
        await self._registry.note("policy", self._policy)

    def go_by(self, policy: Policy) -> None:
        """Other thresholds from now on; bounds stay as they were told."""
        self._thresholds = policy

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self.look()
            except (OutriderError, ValueError) as error:
                _log.warning("the numbers of replicas stay: %s", error)
            except Exception:  # noqa: BLE001 (the fleet goes on with the numbers that it has)
                _log.exception("the numbers of replicas stay")
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self) -> None:
        """Once. Raises `StoreUnavailable`, and `ValueError` for a policy that is none."""
        text = await self._registry.noted("policy")
        if not text:  # It has lost everything.
            await self.begin()
            return
        policy = Policy.from_json(text)
        if self._thresholds is not None:
            policy = replace(self._thresholds, bounds=policy.bounds)
            text = policy.to_json()
            await self._registry.note("policy", text)
            self._thresholds = None
        self._policy = text
        if not policy.bounds:
            return
        wanted = await self._registry.wanted()
        records = {role: await self._registry.records(role) for role in ROLES}
        now = asyncio.get_running_loop().time()
        for change in self._scaler.decide(now, policy, wanted, records):
            _log.info("wanted: %s=%d, %s", change.role, change.count, change.reason)
            await self._registry.want({change.role: change.count})
