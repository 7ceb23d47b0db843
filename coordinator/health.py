"""Watches the targets, the store and the event loop. Says whether requests can make progress, and
gives telemetry its readings."""

import asyncio
import logging
import math
from collections.abc import Mapping

from coordinator.admission import Admission
from coordinator.decoding.committer import Committer
from coordinator.decoding.load_meter import LoadMeter
from coordinator.decoding.sessions import OwnedSessions
from coordinator.routing.discovery import Discovery
from coordinator.routing.replica_pool import DraftPool, TargetPool
from outrider import errors
from outrider.foundation.refusals import REFUSALS
from outrider.registry.registry import Figures
from outrider.sessions.store import SessionStore
from outrider.telemetry.observer import Observation

_log = logging.getLogger(__name__)

CHECK_PERIOD_S = 1.0
TROUBLE_S = 3.0
"""`trouble` reports a target or store that has not answered for this time. Shorter pauses are
normal, for example while a replica on the same cores loads a model."""
NO_SESSION = "0" * 32
"""An id that no session has. To check whether the store answers, `Health` loads this id."""


class Health:
    """The health of one coordinator."""

    def __init__(
        self,
        targets: TargetPool,
        drafts: DraftPool,
        fleet: Discovery,
        store: SessionStore,
        admission: Admission,
        sessions: OwnedSessions,
        committer: Committer,
        meter: LoadMeter,
        observation: Observation,
    ) -> None:
        self._targets = targets
        self._drafts = drafts
        self._fleet = fleet
        self._store = store
        self._admission = admission
        self._sessions = sessions
        self._committer = committer
        self._meter = meter
        self._trouble = ""
        self._known: dict[str, Mapping[str, float]] = {}
        """Metric -> label -> number, from the newest check of targets and store."""
        self._watching: list[asyncio.Task[None]] = []
        observation.watch(self._readings)

    def start(self) -> None:
        """Starts to watch."""
        watching = [
            self._targets.watch(),
            self._drafts.watch(),
            self._meter.watch(),
            self._check_periodically(),
        ]
        if self._fleet.follows:
            watching.append(self._fleet.run())
        self._watching = [asyncio.create_task(watcher) for watcher in watching]

    @property
    def trouble(self) -> str:
        """Why requests cannot make progress; empty if they can. Drafts are not checked, because
        requests can run without them."""
        if self._committer.closing:
            return "the coordinator is shutting down"
        return self._trouble

    @property
    def figures(self) -> Figures:
        return self._meter.figures

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    async def _check_periodically(self) -> None:
        now, failing_since = asyncio.get_running_loop().time, math.inf
        while True:
            began = now()  # Not after `_check`, which takes some seconds if nothing answers.
            try:
                trouble = await self._check()
            except Exception as error:  # noqa: BLE001 (the checks must go on)
                _log.exception("the check of targets and store failed")
                trouble = str(error)
            failing_since = min(failing_since, began) if trouble else math.inf
            self._trouble = trouble if now() >= failing_since + TROUBLE_S else ""
            await asyncio.sleep(CHECK_PERIOD_S)

    async def _check(self) -> str:
        """Returns why requests cannot make progress now; empty if they can."""
        has_target, trouble = await asyncio.gather(self._targets.healthy(), self._store_trouble())
        available = {"target_available": has_target, "store_available": not trouble}
        self._known = {name: {"": float(is_there)} for name, is_there in available.items()}
        return trouble or ("" if has_target else "no target answers")

    async def _store_trouble(self) -> str:
        try:
            memory = await self._store.memory()
            self._sessions.stored.learn(memory, 1 + len(self._fleet.peers))
            await self._store.load(NO_SESSION)
        except errors.OutriderError as error:
            if not isinstance(error, errors.NotFound):
                return f"the session store does not answer: {error.message}"
        return ""

    def _readings(self) -> dict[str, Mapping[str, float]]:
        """Returns metric -> label -> number. Any thread may call this method."""
        pools = (self._targets, self._drafts)
        num_running = len(self._sessions.running)
        return self._known | {
            "wire_bytes_sent": {pool.role: pool.num_bytes["sent"] for pool in pools},
            "wire_bytes_received": {pool.role: pool.num_bytes["received"] for pool in pools},
            "refusals": dict(REFUSALS),
            "stale_answers": {pool.role: pool.num_stale for pool in pools},
            "num_requests_running": {"": num_running},
            "num_requests_waiting": {"": self._admission.num_admitted - num_running},
            "loop_lag_seconds": {"": self._meter.lag_ms / 1e3},
            "replicas_wanted": {str(role): num for role, num in self._fleet.wanted.items()},
            "replicas_present": {str(role): num for role, num in self._fleet.present.items()},
        }
